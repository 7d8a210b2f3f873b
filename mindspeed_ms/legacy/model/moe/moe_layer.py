"""Mixture of experts as the feed-forward block of a layer. Source: Megatron core, `moe_layer.py`."""

from mindspeed_ms import ops
from mindspeed_ms.core import parallel_state
from mindspeed_ms.core.expert_parallel.dispatchers import dispatcher
from mindspeed_ms.core.tensor_parallel.linear import cast
from mindspeed_ms.core.tensor_parallel.random import checkpoint
from mindspeed_ms.core.tensor_parallel.utils import divide
from mindspeed_ms.legacy.model.moe.experts import GroupedMLP, SequentialMLP
from mindspeed_ms.legacy.model.moe.router import TopKRouter
from mindspeed_ms.legacy.model.moe.shared_experts import SharedExpertMLP
from mindspeed_ms.legacy.model.parts import LayerCell, register_part


@register_part("mlp", "experts")
class MoELayer(LayerCell):
    """Mixture of experts: router, dispatcher, experts of this rank, and shared experts.

    Args:
        config (TransformerConfig): the model; read: `moe_config`.
        submodules (None): Megatron's module specs; refused.
        layer_number (Optional[int]): global number of the layer, from 1; the transformer layer sets it.

    Input: hidden states `[s, b, h]` (`[s / tp, b, h]` under sequence parallelism). Outputs: the same shape, and None for
    the bias, which is added inside.

    Raises:
        ValueError: experts that the expert-parallel size does not divide, an unknown dispatcher, module specs; in a call,
            training with tensor but without sequence parallelism.
    """

    def __init__(self, config, submodules=None, layer_number=None):
        super().__init__(config)
        if submodules is not None:
            raise ValueError("submodules are Megatron's module specs, which are not used here: leave them None.")
        model, self.moe = self.described.model, self.config.moe_config
        size = parallel_state.get_expert_model_parallel_world_size()
        divide(model.num_experts, size, "num_experts", "expert_model_parallel_size")
        self.dispatch = dispatcher(self.moe.moe_token_dispatcher_type)
        self.router = TopKRouter(self.described)
        kind = GroupedMLP if model.moe_grouped_gemm else SequentialMLP
        self.experts = kind(model.num_experts // size, self.described)
        self.shared_experts = SharedExpertMLP(self.described) if model.shared_expert_ffn_size else None
        self.recomputes = self.moe.moe_layer_recompute
        self.set_layer_number(layer_number)

    def set_layer_number(self, number):
        """Set the global number of the layer, from 1, for the names of its metrics."""
        self.layer_number = self.router.layer_number = number

    def recompute_selectively(self):
        """The whole block runs again in the backward."""
        self.recomputes = True

    def construct(self, hidden_states):
        """See the class."""
        if self.training and parallel_state.get_tensor_model_parallel_world_size() > 1 and not self.settings.sequence_parallel:
            raise ValueError("a mixture of experts trains with tensor parallelism only if sequence_parallel is on.")
        if self.recomputes and self.training:
            return checkpoint(self._run, False, hidden_states), None
        return self._run(hidden_states), None

    def _run(self, hidden_states):
        routing = self.router(hidden_states)
        dispatched = self.dispatch(hidden_states.reshape((-1, hidden_states.shape[-1])), routing)
        overlaps = self.moe.moe_shared_expert_overlap
        shared = self.shared_experts(hidden_states) if self.shared_experts is not None and overlaps else None
        output = dispatched.combine(self.experts(dispatched.tokens, dispatched.counts))
        output = output.reshape(tuple(hidden_states.shape))
        if self.shared_experts is not None and shared is None:
            shared = self.shared_experts(hidden_states)
        return output if shared is None else ops.residual_add(output, cast(shared, output.dtype))
