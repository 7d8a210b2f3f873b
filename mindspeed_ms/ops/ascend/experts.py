"""Ascend forms of a mixture of experts. The counts are on the host, so that no form waits for the device twice."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from mindspeed_ms.core import autograd, storage
from mindspeed_ms.ops import checks


def _ends(counts):
    return Tensor(np.cumsum(counts), ms.int64)


def _product(x, weight, counts):
    # positions as running sums: the documentation asks for growing ones there, for positive numbers in the other form
    if x.shape[0] == 0:  # the operator has no documented form without rows
        return mint.zeros((0, weight.shape[2]), dtype=x.dtype)
    return ops.auto_generate.grouped_matmul_v4([x], [weight], group_list=_ends(counts), split_item=3, group_type=0)[0]


def grouped_linear(x, weight, counts):
    """See `ops.grouped_linear`."""
    checks.check_grouped_linear(x, weight, counts)
    return _product(x, weight, counts)


@autograd.no_grad()
def grouped_linear_forward(x, weight, counts):
    """See `ops.grouped_linear_forward`."""
    checks.check_grouped_linear(x, weight, counts)
    return _product(x, weight, counts)


@autograd.no_grad()
def grouped_linear_input_grad(output_grad, weight, counts):
    """See `ops.grouped_linear_input_grad`."""
    return _product(output_grad, mint.transpose(weight, 1, 2), counts)


@autograd.no_grad()
def grouped_linear_weight_grad(output_grad, x, counts, accumulate_into=None, overwrite=False):
    """See `ops.grouped_linear_weight_grad`; half precisions are added into float32 by the operator that is made for it."""
    shape = len(counts), x.shape[1], output_grad.shape[1]
    is_fused = accumulate_into is not None and accumulate_into.dtype == ms.float32 and x.dtype != ms.float32
    if is_fused and not overwrite and x.shape[0]:
        ops.auto_generate.grouped_matmul_add_(x, output_grad, _ends(counts), accumulate_into)
        return accumulate_into
    pieces, start = [], 0
    for count in np.asarray(counts).tolist():
        rows = mint.transpose(mint.narrow(x, 0, start, count), 0, 1)
        product = (
            mint.matmul(rows, mint.narrow(output_grad, 0, start, count)) if count else mint.zeros(shape[1:], dtype=x.dtype)
        )
        pieces.append(product)
        start += count
    result = mint.stack(pieces)
    if accumulate_into is None:
        return result
    if overwrite:
        storage.write(accumulate_into, result)
    else:
        storage.add_into(accumulate_into, result)
    return accumulate_into


@autograd.no_grad()
def expert_order(routing_map):
    """See `ops.expert_order`."""
    chosen = mint.transpose(routing_map, 0, 1).astype(ms.int32)
    order = mint.narrow(mint.nonzero(chosen), 1, 1, 1).reshape(-1).astype(ms.int32)
    return order, mint.sum(chosen, dim=1).asnumpy().astype(np.int64)


def permute(x, order):
    """See `ops.permute`."""
    return mint.index_select(x, 0, order)


def unpermute(x, order, tokens, probs=None):
    """See `ops.unpermute`."""
    checks.check_unpermute(x, order, probs)
    rows = x.astype(ms.float32)
    if probs is not None:
        rows = rows * mint.unsqueeze(probs.astype(ms.float32), -1)
    total = mint.index_add(mint.zeros((tokens, x.shape[1]), dtype=ms.float32), 0, order.astype(ms.int32), rows)
    return total.astype(x.dtype)


def permute_probs(probs, order, counts):
    """See `ops.permute_probs`."""
    experts = Tensor(np.repeat(np.arange(len(counts)), counts), ms.int32)
    return mint.index_select(probs.reshape(-1), 0, order.astype(ms.int32) * probs.shape[1] + experts)


def top_k(x, k):
    """See `ops.top_k`."""
    checks.check_top_k(x, k)
    values, indices = mint.topk(x, k, -1)
    return values, indices.astype(ms.int32)


def gather_columns(x, indices):
    """See `ops.gather_columns`."""
    return mint.gather(x, -1, indices.astype(ms.int64))


def scatter_columns(values, indices, columns):
    """See `ops.scatter_columns`."""
    target = mint.zeros((*values.shape[:-1], columns), dtype=values.dtype)
    return mint.scatter(target, -1, indices.astype(ms.int64), values)


def softmax(x):
    """See `ops.softmax`."""
    return mint.nn.functional.softmax(x, dim=-1, dtype=ms.float32).astype(x.dtype)


def sigmoid(x):
    """See `ops.sigmoid`."""
    return mint.sigmoid(x.astype(ms.float32)).astype(x.dtype)


def log_sum_exp(x):
    """See `ops.log_sum_exp`."""
    return mint.logsumexp(x.astype(ms.float32), -1).astype(x.dtype)


def linear_summed_in_double(x, weight):
    """See `ops.linear_summed_in_double`."""
    return mint.nn.functional.linear(x.astype(ms.float32), weight.astype(ms.float32))
