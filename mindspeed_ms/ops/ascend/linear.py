"""Ascend forms of linear layers and matrix products."""

import mindspore as ms
from mindspore import mint

from mindspeed_ms.core import autograd, storage


def linear(x, weight, bias=None):
    """See `ops.linear`."""
    return mint.nn.functional.linear(x, weight, bias)


@autograd.no_grad()
def linear_forward(x, weight, bias=None):
    """See `ops.linear_forward`."""
    return mint.nn.functional.linear(x, weight, bias)


@autograd.no_grad()
def linear_input_grad(output_grad, weight, any_order=False):
    """See `ops.linear_input_grad`."""
    del any_order
    return mint.matmul(output_grad, weight)


@autograd.no_grad()
def linear_weight_grad(output_grad, x, accumulate_into=None, overwrite=False):
    """See `ops.linear_weight_grad`."""
    rows = output_grad.reshape(-1, output_grad.shape[-1])
    result = mint.matmul(mint.transpose(rows, 0, 1), x.reshape(-1, x.shape[-1]))
    if accumulate_into is None:
        return result
    if overwrite:
        storage.write(accumulate_into, result)
    else:
        storage.add_into(accumulate_into, result)
    return accumulate_into


@autograd.no_grad()
def add_linear(output, x, weight):
    """See `ops.add_linear`."""
    return mint.add(output, mint.nn.functional.linear(x, weight))


@autograd.no_grad()
def add_linear_input_grad(input_grad, output_grad, weight):
    """See `ops.add_linear_input_grad`."""
    return mint.add(input_grad, mint.matmul(output_grad, weight))


@autograd.no_grad()
def narrow_weight_grad(narrow, wide, transposed=False):
    """See `ops.narrow_weight_grad`."""
    return linear_weight_grad(wide, narrow) if transposed else linear_weight_grad(narrow, wide)


@autograd.no_grad()
def bias_grad(output_grad):
    """See `ops.bias_grad`; the sum is float32, the widest that the device adds quickly."""
    rows = output_grad.reshape(-1, output_grad.shape[-1])
    return mint.sum(rows, dim=0, dtype=ms.float32).astype(output_grad.dtype)


def matmul(a, b, transpose_a=False, transpose_b=False):
    """See `ops.matmul`; transposes are views, which the operator reads in place."""
    a = mint.transpose(a, -2, -1) if transpose_a else a
    b = mint.transpose(b, -2, -1) if transpose_b else b
    return mint.matmul(a, b)
