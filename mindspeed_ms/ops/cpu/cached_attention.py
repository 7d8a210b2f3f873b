"""CPU form of attention to a key-value cache."""

import mindspore as ms
import numpy as np

from mindspeed_ms.core import storage
from mindspeed_ms.ops import checks
from mindspeed_ms.ops.cpu import threads
from mindspeed_ms.ops.cpu.arrays import empty, float32_of, tensor_of
from mindspeed_ms.ops.cpu.blas import sgemm_address
from mindspeed_ms.ops.cpu.kernels import cached_attention as kernels

_KINDS = {ms.float32: kernels.FLOAT32, ms.bfloat16: kernels.BFLOAT16, ms.float16: kernels.FLOAT16}


def cached_attention(query, key, value, key_cache, value_cache, slots, starts, lengths, scale=None, window=None):
    """See `ops.cached_attention`."""
    checks.check_heads(query, key, value)
    checks.check_cache(query, key, key_cache, value_cache, slots, starts, lengths, window)
    queries, batch, heads, size = query.shape
    groups = key.shape[2]
    rows = slots, starts, lengths
    caches = [storage.as_array(cache).view(np.int16) for cache in (key_cache, value_cache)]
    new = [np.ascontiguousarray(storage.read_array(tensor)).view(np.int16) for tensor in (key, value)]
    threads.run(kernels.write_to_cache, queries * batch, 2 * new[0].size, *new, *caches, *rows)
    q = float32_of(query)
    output = empty(q.shape)
    units, unit_rows = (groups, heads // groups) if queries == 1 else (heads, queries)
    seen = int((starts + lengths).max(initial=0))
    threads.run(
        kernels.cached_attention,
        batch * units * -(-unit_rows // kernels.ROW_BLOCK),
        q.size * 2 * (seen if window is None else min(seen, window + queries)),
        sgemm_address(),
        q,
        *caches,
        _KINDS[key_cache.dtype],
        *rows,
        checks.default_scale(scale, size),
        kernels.UNLIMITED if window is None else window,
        output,
    )
    return tensor_of(output.reshape(queries, batch, heads * size), query.dtype)
