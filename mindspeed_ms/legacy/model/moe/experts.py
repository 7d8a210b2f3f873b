"""Experts of this rank: one MLP after another, or all in two grouped products. Source: Megatron core, `experts.py`."""

from mindspore import nn

from mindspeed_ms import ops
from mindspeed_ms.core import parallel_state
from mindspeed_ms.core.device import dtype_name, to_dtype
from mindspeed_ms.core.expert_parallel.grouped import grouped_product, rows_of_experts
from mindspeed_ms.core.tensor_parallel.cell import place_globally
from mindspeed_ms.core.tensor_parallel.linear import cast
from mindspeed_ms.layout.describers.mlp import mlp_linears
from mindspeed_ms.layout.layer_parameters import GroupedExperts, LayerPart
from mindspeed_ms.legacy.model.mlp import ParallelMLP, activate, activation_name, clamp_of
from mindspeed_ms.legacy.model.module import Module


class SequentialMLP(Module):
    """Experts of this rank as single MLPs, called one after another.

    Args:
        num_local_experts (int): experts of this rank.
        config (TransformerConfig): the model.

    Inputs: `[rows, h]`, sorted by expert, and the rows of each expert (ndarray). Output: `[rows, h]`, a partial sum over
    the expert-tensor group.
    """

    names_are_global = False

    def __init__(self, num_local_experts, config):
        super().__init__(config)
        self.local_experts = nn.CellList([ParallelMLP(self.described, is_expert=True) for _ in range(num_local_experts)])
        first = parallel_state.get_expert_model_parallel_rank() * num_local_experts
        for local, expert in enumerate(self.local_experts):
            place_globally(expert, f"local_experts.{first + local}", f"local_experts.{local}")

    def construct(self, tokens, counts):
        """See the class."""
        # experts without a token take part: every parameter gets a gradient in each backward
        outputs = [self._run(expert, rows) for expert, rows in zip(self.local_experts, rows_of_experts(tokens, counts))]
        return outputs[0] if len(outputs) == 1 else ops.cat(outputs, dim=0)

    @staticmethod
    def _run(expert, rows):
        output, bias = expert(rows)
        # one rank of the expert-tensor group adds the bias: their outputs are summed
        if bias is None or parallel_state.get_expert_tensor_parallel_rank():
            return output
        return ops.add_bias(output, cast(bias, output.dtype))


class GroupedMLP(Module):
    """Experts of this rank in two tensors, each one grouped product. Arguments, inputs and output: as `SequentialMLP`."""

    names_are_global = False

    def __init__(self, num_local_experts, config):
        super().__init__(config)
        config, model, settings = self.config, self.described.model, self.settings
        self.activation, self.gated, self.clamp = activation_name(config), model.is_gated, clamp_of(config)
        self.fused = config.apply_swiglu_fusion or config.hidden_act == "fused_swiglu"
        self.compute_dtype = to_dtype(settings.compute_dtype)
        self.fuse_accumulation = settings.gradient_accumulation_fusion
        linears = mlp_linears(model, model.expert_ffn_size, expert=True)
        group = parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()
        part = LayerPart(*group, dtype_name(to_dtype(settings.params_dtype)))
        first = parallel_state.get_expert_model_parallel_rank() * num_local_experts
        experts = GroupedExperts(model.num_experts, linears["mapping"], linears["projection"])
        self.create_parameters(experts.describe(part, first, first + num_local_experts))

    def construct(self, tokens, counts):
        """See the class."""
        intermediate = grouped_product(tokens, self.weight1, counts, self.compute_dtype, self.fuse_accumulation)
        activated = activate(intermediate, None, self.activation, self.gated, self.fused, **self.clamp)
        return grouped_product(activated, self.weight2, counts, self.compute_dtype, self.fuse_accumulation)
