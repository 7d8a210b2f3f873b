"""Normalisations over the last dimension; statistics are never below float32."""

from mindspeed_ms.ops.forms import current_forms


def layer_norm(x, gamma, beta, eps=1e-5):
    """`(x - mean) / sqrt(variance + eps) * gamma + beta`, differentiable.

    Args:
        x (Tensor): [..., hidden].
        gamma (Tensor), beta (Tensor): [hidden], float32 or the dtype of `x`.

    Returns:
        Tensor of the shape and dtype of `x`.
    """
    return current_forms().layer_norm(x, gamma, beta, eps)


def rms_norm(x, weight, eps=1e-6):
    """`x / sqrt(mean(x^2) + eps) * weight`, differentiable. Shapes and dtypes as `layer_norm`."""
    return current_forms().rms_norm(x, weight, eps)
