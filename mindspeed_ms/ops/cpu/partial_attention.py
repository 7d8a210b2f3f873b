"""CPU forms of attention to a part of the keys."""

import numpy as np

from mindspeed_ms.core import autograd, storage
from mindspeed_ms.ops import checks
from mindspeed_ms.ops.cpu import threads
from mindspeed_ms.ops.cpu.arrays import bytes_of, empty, float32_of
from mindspeed_ms.ops.cpu.blas import sgemm_address
from mindspeed_ms.ops.cpu.kernels import partial_attention as kernels

_NO_MASK = np.zeros((1, 1, 1), np.uint8)


def _mask_array(mask):
    return _NO_MASK if mask is None else bytes_of(mask).reshape(-1, *mask.shape[-2:])


def _work(first_keys, stop_keys, query):
    """Element operations: four per visible pair and head."""
    pairs = int(np.maximum(stop_keys - first_keys, 0).sum(dtype=np.int64))
    return 4 * pairs * query.shape[2] * (query.shape[1] // len(first_keys))


@autograd.no_grad()
def attention_with_statistics(query, key, value, first_keys, stop_keys, mask=None, scale=None, before=None):
    """See `ops.attention_with_statistics`."""
    checks.check_partial_attention(query, key, value, first_keys, stop_keys, mask)
    q, k, v = float32_of(query), float32_of(key), float32_of(value)
    queries, batch, heads, size = q.shape
    if before is None:
        result = empty((queries, batch, heads, v.shape[3])), empty((batch, heads, queries)), empty((batch, heads, queries))
    else:
        result = tuple(float32_of(part) for part in before)
    threads.run(
        kernels.partial_attention_forward,
        batch * heads * -(-queries // kernels.QUERY_BLOCK),
        _work(first_keys, stop_keys, query),
        sgemm_address(),
        q,
        k,
        v,
        checks.default_scale(scale, size),
        first_keys,
        stop_keys,
        _mask_array(mask),
        mask is not None,
        before is not None,
        *result,
    )
    return tuple(storage.from_array(part) for part in result)


@autograd.no_grad()
def attention_with_statistics_gradient(
    output_grad, query, key, value, output, maximum, total, first_keys, stop_keys, mask=None, scale=None, before=None
):
    """See `ops.attention_with_statistics_gradient`."""
    checks.check_partial_attention(query, key, value, first_keys, stop_keys, mask)
    q, k, v = float32_of(query), float32_of(key), float32_of(value)
    if before is None:
        grads = tuple(np.zeros(part.shape, np.float32) for part in (q, k, v))
    else:
        grads = tuple(float32_of(part) for part in before)
    threads.run(
        kernels.partial_attention_backward,
        k.shape[1] * k.shape[2],
        2 * _work(first_keys, stop_keys, query),
        sgemm_address(),
        float32_of(output_grad),
        q,
        k,
        v,
        float32_of(output),
        float32_of(maximum),
        float32_of(total),
        checks.default_scale(scale, q.shape[3]),
        first_keys,
        stop_keys,
        _mask_array(mask),
        mask is not None,
        *grads,
    )
    return tuple(storage.from_array(grad) for grad in grads)
