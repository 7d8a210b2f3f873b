"""CPU form of attention to a key-value cache."""

import mindspore as ms
import numpy as np

from mindspeed_ms.core import storage
from mindspeed_ms.ops import checks
from mindspeed_ms.ops.cpu import threads
from mindspeed_ms.ops.cpu.arrays import empty, float32_of, tensor_of
from mindspeed_ms.ops.cpu.blas import sgemm_address
from mindspeed_ms.ops.cpu.kernels import cached_attention as kernels

_NO_SINKS = np.zeros(1, np.float32)
_KINDS = {ms.bfloat16: kernels.BFLOAT16, ms.float16: kernels.FLOAT16}


def cached_attention(
    query, key, value, key_cache, value_cache, slots, starts, lengths, scale=None, window=None, sinks=None, value_width=None
):
    """See `ops.cached_attention`."""
    q, new_keys, keys = float32_of(query), storage.read_array(key), storage.as_array(key_cache)
    has_values = value is not None
    new_values, values = (storage.read_array(value), storage.as_array(value_cache)) if has_values else (new_keys, keys)
    # arrays give their shapes quicker than Tensors
    checks.check_heads(q, new_keys, new_values, sinks)
    seen = checks.check_cache(q, new_keys, keys, values, slots, starts, lengths, window, value_width)
    kind = kernels.FLOAT32 if keys.dtype == np.float32 else _KINDS[key_cache.dtype]
    queries, batch, heads, size = q.shape
    groups = new_keys.shape[2]
    rows = slots, starts, lengths
    caches = keys.view(np.int16), values.view(np.int16)
    new_keys, new_values = (np.ascontiguousarray(new).view(np.int16) for new in (new_keys, new_values))
    work = 2 * (new_keys.size + new_values.size)
    threads.run(kernels.write_to_cache, queries * batch, work, new_keys, new_values, *caches, has_values, *rows)
    output = empty((queries, batch, heads, value_width or size))
    units, unit_rows = (groups, heads // groups) if queries == 1 else (heads, queries)
    threads.run(
        kernels.cached_attention,
        batch * units * -(-unit_rows // kernels.ROW_BLOCK),
        q.size * 2 * (seen if window is None else min(seen, window + queries)),
        sgemm_address(),
        q,
        *caches,
        kind,
        *rows,
        checks.default_scale(scale, size),
        kernels.UNLIMITED if window is None else window,
        sinks is not None,
        _NO_SINKS if sinks is None else float32_of(sinks),
        output,
    )
    return tensor_of(output.reshape(queries, batch, -1), query.dtype)
