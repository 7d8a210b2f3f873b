"""Ascend forms of casts, sums, biases, joins and masks of documents."""

import functools

import mindspore as ms
from mindspore import Tensor, mint, ops

from mindspeed_ms.core import autograd
from mindspeed_ms.core.device import to_dtype


def cast(x, dtype):
    """See `ops.cast`."""
    dtype = to_dtype(dtype)
    return x if x.dtype == dtype else x.astype(dtype)


def total(x):
    """See `ops.total`."""
    return mint.sum(x)


def row_sums(x):
    """See `ops.row_sums`."""
    return mint.sum(x, dim=1)


def log_sigmoid(x):
    """See `ops.log_sigmoid`."""
    return mint.nn.functional.logsigmoid(x)


def add_bias(x, bias):
    """See `ops.add_bias`."""
    return mint.add(x, bias)


@autograd.no_grad()
def scaled(x, factor):
    """See `ops.scaled`."""
    return mint.mul(x, factor)


@autograd.no_grad()
def is_zero(x):
    """See `ops.is_zero`."""
    return mint.eq(x, 0).astype(ms.float32)


def cat(tensors, dim=0):
    """See `ops.cat`."""
    return mint.cat(tuple(tensors), dim=dim)


def cat_shared(own, shared):
    """See `ops.cat_shared`."""
    return mint.cat((own, mint.broadcast_to(shared, (*own.shape[:-1], shared.shape[-1]))), -1)


def document_mask(ids, end):
    """See `ops.document_mask`."""
    batch, length = ids.shape
    # float32 counts exactly up to 2^24 documents, and its cumulative sum exists on every device
    ends = (ids == end).astype(ms.float32)
    document = ops.cumsum(ends, 1) - ends
    same = document.reshape((batch, length, 1)) == document.reshape((batch, 1, length))
    allowed = ops.logical_and(same, _lower_triangle(length))
    # a query sees exactly the tokens of its document up to itself
    positions = allowed.astype(ms.float32).sum(-1) - 1.0
    return positions.astype(ms.int32), ops.logical_not(allowed).astype(ms.uint8)


@functools.cache
def _lower_triangle(length):
    positions = Tensor(list(range(length)), ms.int32)
    return positions.reshape((1, length, 1)) >= positions.reshape((1, 1, length))
