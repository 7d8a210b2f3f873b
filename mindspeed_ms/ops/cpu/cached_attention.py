"""CPU form of attention to a key-value cache."""

import mindspore as ms
import numpy as np

from mindspeed_ms.core import storage
from mindspeed_ms.ops import checks
from mindspeed_ms.ops.cpu import threads
from mindspeed_ms.ops.cpu.arrays import empty, float32_of, tensor_of
from mindspeed_ms.ops.cpu.blas import sgemm_address
from mindspeed_ms.ops.cpu.kernels import cached_attention as kernels

_KINDS = {ms.bfloat16: kernels.BFLOAT16, ms.float16: kernels.FLOAT16}


def cached_attention(query, key, value, key_cache, value_cache, slots, starts, lengths, scale=None, window=None):
    """See `ops.cached_attention`."""
    q, new_keys, new_values = float32_of(query), storage.read_array(key), storage.read_array(value)
    keys, values = storage.as_array(key_cache), storage.as_array(value_cache)
    # arrays give their shapes quicker than Tensors
    checks.check_heads(q, new_keys, new_values)
    seen = checks.check_cache(q, new_keys, keys, values, slots, starts, lengths, window)
    kind = kernels.FLOAT32 if keys.dtype == np.float32 else _KINDS[key_cache.dtype]
    queries, batch, heads, size = q.shape
    groups = new_keys.shape[2]
    rows = slots, starts, lengths
    caches = keys.view(np.int16), values.view(np.int16)
    new = np.ascontiguousarray(new_keys).view(np.int16), np.ascontiguousarray(new_values).view(np.int16)
    threads.run(kernels.write_to_cache, queries * batch, 2 * new[0].size, *new, *caches, *rows)
    output = empty(q.shape)
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
        output,
    )
    return tensor_of(output.reshape(queries, batch, heads * size), query.dtype)
