"""Normalization layers: LayerNorm, RMSNorm."""

from typing import NamedTuple

from mindspore import Tensor

from mindspeed_ms import ops
from mindspeed_ms.config.model_description import describe_config
from mindspeed_ms.core import autograd
from mindspeed_ms.layout.layer_parameters import Norm
from mindspeed_ms.legacy.model.module import Module


class _Norm(Module):
    names_are_global = False
    kind = ""

    def __init__(self, hidden_size, eps, config, scale, params_dtype, over_heads):
        super().__init__(config)
        self.eps = eps
        norm = Norm(self.kind, hidden_size, scale, over_heads)
        self.create_parameters(norm.describe(self.settings.part(params_dtype)))


class LayerNorm(_Norm):
    """LayerNorm `(x - mean) / sqrt(variance + eps) * gamma + beta` over the last dimension.

    Args:
        hidden_size (int): size of the last dimension.
        eps (float): added to the variance.
        config (Optional[TransformerConfig]): sequence parallelism and dtype.
        scale (float): initial value of `gamma`.
        params_dtype: dtype of the parameters; default config's.
        over_heads (bool): the input is heads `[..., heads, hidden_size]`, cut over the tensor-parallel group.

    Input and output: `[..., hidden_size]`, same dtype.
    """

    kind = "LayerNorm"

    def __init__(self, hidden_size, eps=1e-5, config=None, scale=1.0, params_dtype=None, over_heads=False):
        super().__init__(hidden_size, eps, config, scale, params_dtype, over_heads)

    def construct(self, x):
        """See the class."""
        return ops.layer_norm(x, self.gamma, self.beta, self.eps)


class RMSNorm(_Norm):
    """RMSNorm `x / sqrt(mean(x^2) + eps) * weight` over the last dimension. Arguments as `LayerNorm`."""

    kind = "RMSNorm"

    def __init__(self, hidden_size, eps=1e-6, config=None, scale=1.0, params_dtype=None, over_heads=False):
        super().__init__(hidden_size, eps, config, scale, params_dtype, over_heads)

    def construct(self, x):
        """See the class."""
        return ops.rms_norm(x, self.weight, self.eps)

    def of_sum(self, x, bias, residual):
        """(`residual + (x + bias)`, its norm) without a gradient, in one operator."""
        return ops.add_rms_norm(x, bias, residual, self.weight, self.eps)


class UnaddedSum(NamedTuple):
    """Hidden states `residual + (output + bias)`, without a gradient, that the next norm adds in its own operator."""

    output: Tensor
    bias: Tensor | None
    residual: Tensor


def added(hidden_states):
    """Tensor of hidden states that may be an `UnaddedSum`."""
    if isinstance(hidden_states, UnaddedSum):
        return ops.bias_dropout_add(*hidden_states, 0.0, None)
    return hidden_states


def added_and_normed(norm, hidden_states):
    """(hidden states, their norm) of hidden states that may be an `UnaddedSum`."""
    if isinstance(hidden_states, UnaddedSum) and isinstance(norm, RMSNorm) and not autograd.has_forward_hooks(norm):
        return norm.of_sum(*hidden_states)
    hidden_states = added(hidden_states)
    return hidden_states, norm(hidden_states)


FusedRMSNorm = RMSNorm  # upstream's two names for one thing: `ops` always takes the fused operator

_NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def get_norm(config, scale=1.0, over_heads=False, width=None, eps=None):
    """Build the norm `config.normalization` over `hidden_size`, over heads, or over `width` elements.

    Args:
        config (TransformerConfig): kind and epsilon.
        scale (float): initial weight.
        over_heads (bool): over the width of a head.
        width (Optional[int]): elements; None: as above.
        eps (Optional[float]): None: `norm_epsilon`.

    Raises:
        LayoutError: an unknown name.
    """
    described = describe_config(config)
    model, eps = described.model, described.config.norm_epsilon if eps is None else eps
    width = width or (model.head_dim if over_heads else model.hidden_size)
    return _NORMS[model.norm](width, eps=eps, config=described, scale=scale, over_heads=over_heads)
