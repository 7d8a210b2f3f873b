"""Ascend forms of casts, sums, biases and joins of tensors."""

import mindspore as ms
from mindspore import mint

from mindspeed_ms.core import autograd
from mindspeed_ms.core.device import to_dtype


def cast(x, dtype):
    """See `ops.cast`."""
    dtype = to_dtype(dtype)
    return x if x.dtype == dtype else x.astype(dtype)


def total(x):
    """See `ops.total`."""
    return mint.sum(x)


def add_bias(x, bias):
    """See `ops.add_bias`."""
    return mint.add(x, bias)


@autograd.no_grad()
def is_zero(x):
    """See `ops.is_zero`."""
    return mint.eq(x, 0).astype(ms.float32)


def cat(tensors, dim=0):
    """See `ops.cat`."""
    return mint.cat(tuple(tensors), dim=dim)
