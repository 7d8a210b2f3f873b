"""Normalisations over the last dimension, LayerNorm and RMSNorm; statistics are never below float32."""

from mindspeed_ms.ops.forms import operator


@operator
def layer_norm(x, gamma, beta, eps=1e-5):
    """LayerNorm `(x - mean) / sqrt(variance + eps) * gamma + beta`, differentiable.

    Args:
        x (Tensor): [..., hidden].
        gamma (Tensor), beta (Tensor): [hidden], float32 or the dtype of `x`.

    Returns:
        Tensor of the shape and dtype of `x`.
    """


@operator
def rms_norm(x, weight, eps=1e-6):
    """RMSNorm `x / sqrt(mean(x^2) + eps) * weight`, differentiable. Shapes and dtypes as `layer_norm`."""


@operator
def add_rms_norm(x, bias, residual, weight, eps=1e-6):
    """`residual + (x + bias)` and its RMSNorm in one operator, without a gradient: for inference.

    Args:
        x (Tensor), residual (Tensor): [..., hidden].
        bias (Optional[Tensor]): [hidden].
        weight (Tensor), eps (float): as of `rms_norm`.

    Returns:
        Two Tensors of the shape and dtype of `residual`.
    """


@operator
def rms_norm_with_inverse(x, weight, eps=1e-6):
    """RMSNorm with the inverse root mean square [..., 1], float32, without a gradient."""
