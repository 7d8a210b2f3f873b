"""Grouped product of experts with gradient accumulation into the gradient buffer."""

from itertools import pairwise

import numpy as np
from mindspore import mint

from mindspeed_ms import ops
from mindspeed_ms.core.autograd import Function
from mindspeed_ms.core.device import to_dtype
from mindspeed_ms.core.tensor_parallel.linear import cast, placeholder_gradient


class _GroupedProduct(Function):
    @staticmethod
    def forward(ctx, x, weight, counts, compute_dtype, fuse_accumulation):
        ctx.save_for_backward(x)
        # the parameter itself, not a snapshot: sharded parameters change their memory between forward and backward
        ctx.weight, ctx.counts, ctx.dtype, ctx.fuses = weight, counts, compute_dtype, fuse_accumulation
        return ops.grouped_linear_forward(cast(x, compute_dtype), cast(weight, compute_dtype), counts)

    @staticmethod
    def backward(ctx, output_grad):
        (x,) = ctx.saved_tensors
        input_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            input_grad = cast(ops.grouped_linear_input_grad(output_grad, cast(ctx.weight, ctx.dtype), ctx.counts), x.dtype)
        if ctx.needs_input_grad[1]:
            main_grad = getattr(ctx.weight, "main_grad", None) if ctx.fuses else None
            values = cast(x, ctx.dtype)
            weight_grad = ops.grouped_linear_weight_grad(output_grad, values, ctx.counts, accumulate_into=main_grad)
            if main_grad is not None:
                ctx.weight.grad_added_to_main_grad = True
                weight_grad = placeholder_gradient(ctx.weight)
            else:
                weight_grad = cast(weight_grad, ctx.weight.dtype)
        return input_grad, weight_grad, None, None, None


def grouped_product(x, weight, counts, compute_dtype=None, gradient_accumulation_fusion=False):
    """Product of each expert's rows with its weight: `[rows, in]`, `[experts, in, out]` -> `[rows, out]`.

    Args:
        x (Tensor): rows sorted by expert.
        weight (Parameter): of the local experts.
        counts (ndarray): rows of each expert.
        compute_dtype: dtype of the product; default that of `weight`.
        gradient_accumulation_fusion (bool): add the weight gradient to `weight.main_grad` inside the product.
    """
    compute_dtype = weight.dtype if compute_dtype is None else to_dtype(compute_dtype)
    return _GroupedProduct.apply(x, weight, counts, compute_dtype, gradient_accumulation_fusion)


class _Split(Function):
    """Rows of each expert; one join in the backward instead of a padded tensor for each of them."""

    @staticmethod
    def forward(ctx, x, counts):
        starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
        return tuple(mint.narrow(x, 0, start, stop - start).contiguous() for start, stop in pairwise(starts))

    @staticmethod
    def backward(ctx, *grads):
        return ops.cat(grads, dim=0), None


def rows_of_experts(x, counts):
    """The rows of each expert, from `[rows, ...]` sorted by expert: tuple of `[count, ...]`."""
    return (x,) if len(counts) == 1 else _Split.apply(x, counts)
