"""Shared experts: one MLP that every token passes, with or without a gate. Source: Megatron core, `shared_experts.py`."""

from mindspeed_ms import ops
from mindspeed_ms.core.tensor_parallel.linear import cast
from mindspeed_ms.layout.layer_parameters import SharedExpertGate
from mindspeed_ms.legacy.model.mlp import ParallelMLP


class SharedExpertMLP(ParallelMLP):
    """Shared experts as one MLP; with `moe_shared_expert_gate` times `sigmoid(gate_weight x)`.

    Args:
        config (TransformerConfig): the model.

    Input and output: hidden states `[s, b, h]` (`[s / tp, b, h]` under sequence parallelism).
    """

    def __init__(self, config):
        model = config.model
        super().__init__(config, width=model.shared_expert_ffn_size)
        self.gate_weight = None
        if model.moe_shared_expert_gate:
            gate = SharedExpertGate(model.hidden_size, model.initializers.block)
            self.create_parameters(gate.describe(self.settings.part()))

    def construct(self, hidden_states):
        """See the class."""
        output, bias = super().construct(hidden_states)
        if bias is not None:
            output = ops.add_bias(output, cast(bias, output.dtype))
        if self.gate_weight is None:
            return output
        logits = ops.linear(cast(hidden_states, output.dtype), cast(self.gate_weight, output.dtype))
        return output * ops.sigmoid(logits)
