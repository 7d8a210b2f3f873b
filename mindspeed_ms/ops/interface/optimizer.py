"""Optimizer steps and gradient kernels: in place on storage tensors (`core.storage`), never recorded."""

from mindspeed_ms.ops.forms import operator


@operator
def adamw_step(parameter, exp_avg, exp_avg_sq, grad, *, learning_rate, beta1, beta2, eps, weight_decay, step, grad_scale=1.0):
    """AdamW step in Megatron's form: bias-corrected, decoupled decay, eps outside the root.

    p *= 1 - lr * weight_decay;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
    p -= lr / (1 - b1^step) * m / (sqrt(v) / sqrt(1 - b2^step) + eps)   with g = grad * grad_scale

    Args:
        parameter, exp_avg, exp_avg_sq (Tensor): float32 of equal size, written in place.
        grad (Tensor): float32, float16 or bfloat16 of that size, left unchanged.
        step (int): counts from 1.
        grad_scale (float): multiplies the gradient on the fly (clipping, loss scale).
    """


@operator
def sgd_step(
    parameter, momentum_buffer, grad, *, learning_rate, momentum=0.0, weight_decay=0.0, first_step=False, grad_scale=1.0
):
    """One SGD step: g += weight_decay * p; buffer = momentum * buffer + g (g itself on the first step); p -= lr *
    buffer.

    Args:
        parameter (Tensor): float32; momentum_buffer (Tensor): float32 or None if `momentum` is 0; grad as in
            `adamw_step`.
    """


@operator
def sum_of_squares(tensor):
    """Sum of the squares of all elements as a Python float, accumulated in double precision; inf or nan if one is."""


@operator
def count_zeros(tensor):
    """Number of elements equal to zero (int)."""


@operator
def scale_in_place(tensor, factor):
    """Multiply all elements of a storage tensor by `factor`."""


@operator
def add_into(destination, source):
    """Add `source` to a storage tensor of the same number of elements; the sum is rounded once to its dtype."""
