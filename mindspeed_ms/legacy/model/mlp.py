"""Feed-forward block (MLP). Source: Megatron's `ParallelMLP` / `MLP`."""

from mindspore import mint

from mindspeed_ms import ops
from mindspeed_ms.core import parallel_state
from mindspeed_ms.core.tensor_parallel.chunked import chunked_mlp
from mindspeed_ms.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, build_linear
from mindspeed_ms.core.tensor_parallel.linear import cast
from mindspeed_ms.core.tensor_parallel.random import checkpoint
from mindspeed_ms.layout.describers.mlp import mlp_linears
from mindspeed_ms.legacy.model.parts import LayerCell, register_part
from mindspeed_ms.ops import HALVING

_FAST_GELU = 1.702
# hidden_act -> operator; "gelu" is decided by bias_gelu_fusion
_OPERATORS = {
    "swiglu": "swiglu",
    "fused_swiglu": "swiglu",
    "clamped_swiglu": "clamped_swiglu",
    "silu": "silu",
    "relu": "relu",
    "squared_relu": "squared_relu",
    "fast_gelu": "fast_gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_erf": "gelu_erf",
}


def activation_name(config):
    """Operator name of `config.hidden_act`.

    "gelu" is the tanh form where Megatron runs its fused kernel (`bias_gelu_fusion` and a bias), else the erf form.

    Raises:
        ValueError: an unknown activation.
    """
    if config.hidden_act == "gelu":
        return "gelu_tanh" if config.gelu_approximation == "tanh" else "gelu_erf"
    if config.hidden_act not in _OPERATORS:
        raise ValueError(f"hidden_act '{config.hidden_act}' is unknown, choose one of {['gelu', *_OPERATORS]}.")
    return _OPERATORS[config.hidden_act]


def clamp_of(config):
    """`limit` and `alpha` of "clamped_swiglu" as keywords of `apply_activation`."""
    return {"limit": config.swiglu_limit, "alpha": config.swiglu_alpha}


def apply_activation(x, bias, name, fused=True, **clamp):
    """Activation `activation(x + bias)` by operator name (`activation_name`); other arguments as in `ops.bias_activation`."""
    if name != "fast_gelu":
        return ops.bias_activation(x, bias, name, fused, **clamp)
    # x * sigmoid(1.702 x)
    x = x if bias is None else ops.add_bias(x, bias)
    return ops.silu(x * _FAST_GELU) * (1.0 / _FAST_GELU)


def activate(x, bias, name, gated, fused=True, **clamp):
    """Activation of an MLP's first product `[..., n]`; `gated`: `activation(gate) * up` of its halves `[..., n / 2]`."""
    if not gated or name in HALVING:
        return apply_activation(x, bias, name, fused, **clamp)
    x = x if bias is None else ops.add_bias(x, bias)
    half = x.shape[-1] // 2
    gate, up = mint.narrow(x, -1, 0, half).contiguous(), mint.narrow(x, -1, half, half)
    return apply_activation(gate, None, name) * up


@register_part("mlp", "dense")
class ParallelMLP(LayerCell):
    """`projection(activation(mapping(x)))`; gated: `activation(gate) * up`, the two halves of the mapping's output.

    Args:
        config (TransformerConfig): sizes, `hidden_act`, `gated_linear_unit`, `mlp_has_bias` or `add_bias_linear`.
        is_expert (bool): the block is one expert.
        width (Optional[int]): features inside, such as all shared experts' together; default: `ffn_hidden_size`, of an
            expert `moe_ffn_hidden_size` if it is set.

    Input: hidden states `[s, b, h]` (`[s / tp, b, h]` under sequence parallelism). Outputs: the same shape, and the
    projection's bias `[h]` or None, which the caller adds.
    """

    def __init__(self, config, is_expert=False, width=None):
        super().__init__(config)
        config, model = self.config, self.described.model
        self.activation, self.clamp = activation_name(config), clamp_of(config)
        self.fused = config.apply_swiglu_fusion or config.hidden_act == "fused_swiglu"
        self.gated = model.is_gated
        width = width or (model.expert_ffn_size if is_expert else model.ffn_hidden_size)
        linears = mlp_linears(model, width, is_expert)
        self.mapping = build_linear(linears["mapping"], self.described, gather_output=False, skip_bias_add=True)
        self.projection = build_linear(linears["projection"], self.described, input_is_parallel=True, skip_bias_add=True)
        self.recompute_activation = False
        self.chunk_size = None if is_expert else config.mlp_chunk_size

    def recompute_selectively(self):
        """Activation and projection run again in the backward."""
        self.recompute_activation = True

    def construct(self, hidden_states):
        """See the class."""
        if self.chunk_size:
            return self._in_chunks(hidden_states), self.projection.bias
        intermediate, bias = self.mapping(hidden_states)
        bias = cast(bias, intermediate.dtype)
        if self.recompute_activation and self.training:
            # The projection runs again too: it is what would keep the activated tensor.
            return checkpoint(self._activate_and_project, False, intermediate, bias), self.projection.bias
        return self._activate_and_project(intermediate, bias), self.projection.bias

    def _in_chunks(self, hidden_states):
        """The block with `chunk_size` tokens inside at a time, computed again in the backward."""
        if not isinstance(self.mapping, ColumnParallelLinear) or not isinstance(self.projection, RowParallelLinear):
            raise ValueError("mlp_chunk_size cannot be combined with other linear layers than the block's own: leave it out.")
        return chunked_mlp(
            hidden_states,
            self.mapping.weight,
            self.mapping.bias,
            self.projection.weight,
            self._activate,
            self.chunk_size,
            parallel_state.get_tensor_model_parallel_group(),
            self.settings,
            self.mapping.compute_dtype,
        )

    def _activate_and_project(self, intermediate, bias):
        return self.projection(self._activate(intermediate, bias))[0]

    def _activate(self, x, bias):
        return activate(x, bias, self.activation, self.gated, self.fused, **self.clamp)
