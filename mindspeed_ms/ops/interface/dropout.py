"""Dropout and residual additions.

Keep masks come from `core.rng`, so that every layout and recomputation draws alike.
"""

from mindspeed_ms.ops.forms import operator


@operator
def dropout(x, p, keep_mask):
    """Dropout `x * keep_mask / (1 - p)`, differentiable.

    Args:
        x (Tensor): any shape.
        p (float): probability of dropping, 0 <= p < 1; 0 returns `x`.
        keep_mask (Tensor): bool or uint8 of the shape of `x`, True = keep; may be None if p is 0.

    Raises:
        ValueError: p outside the range, or a mask missing.
    """


@operator
def bias_dropout_add(x, bias, residual, p=0.0, keep_mask=None):
    """Residual addition with bias and dropout, `residual + dropout(x + bias)`, differentiable.

    Args:
        x (Tensor): [..., h]; bias (Tensor): [h] in the dtype of `x`, or None; residual (Tensor): shape of `x`, dtype of
            `x` or float32.
        p, keep_mask: as in `dropout`.

    Returns:
        Tensor in the shape and dtype of `residual`.
    """


def residual_add(x, residual):
    """Residual addition `residual + x`, differentiable; dtype of `residual`."""
    return bias_dropout_add(x, None, residual)
