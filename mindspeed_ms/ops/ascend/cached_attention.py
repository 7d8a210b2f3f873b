"""Ascend form of attention to a key-value cache: indexed writes and reads, and attention under a mask."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint

from mindspeed_ms.core import storage
from mindspeed_ms.ops import checks
from mindspeed_ms.ops.ascend.attention import core_attention


def cached_attention(
    query, key, value, key_cache, value_cache, slots, starts, lengths, scale=None, window=None, sinks=None, value_width=None
):
    """See `ops.cached_attention`."""
    checks.check_heads(query, key, key if value is None else value, sinks)
    values = key_cache if value is None else value_cache
    checks.check_cache(query, key, key_cache, values, slots, starts, lengths, window, value_width)
    queries, batch, groups, size = key.shape
    capacity = key_cache.shape[2]
    tokens, places = _places_of_new_tokens(queries, slots, starts, lengths, groups, capacity)
    ends = starts.astype(np.int64) + lengths
    kept = max(1, min(capacity, int(ends.max(initial=1))))
    read = Tensor(_flat(slots[:, None], np.arange(groups)[None, :], groups), ms.int64)
    mask = Tensor(_hidden(queries, starts, ends, kept, capacity, window), ms.bool_)
    rows = []
    for new, cache in ((key, key_cache), (value, value_cache))[: 1 if value is None else 2]:
        if tokens.size:
            source = mint.index_select(new.reshape(queries * batch * groups, size), 0, Tensor(tokens, ms.int64))
            storage.write_rows(cache, places, source)
        held = mint.index_select(cache.view(-1, capacity, size), 0, read.reshape(-1))
        held = mint.narrow(held, 1, 0, kept).reshape(batch, groups, kept, size)
        rows.append(mint.permute(held, (2, 0, 1, 3)))
    if value is None:
        rows.append(mint.narrow(rows[0], -1, 0, value_width))
    return core_attention(query, rows[0], rows[1], mask, scale=scale, sinks=sinks)


def _flat(slots, groups, count):
    return slots.astype(np.int64) * count + groups


def _places_of_new_tokens(queries, slots, starts, lengths, groups, capacity):
    """Rows of keys [s * b * groups, d] that are no padding, and where they go in caches [slots * groups * capacity, d]."""
    i, b = np.nonzero(np.arange(queries)[:, None] < lengths[None, :])
    i, b, group = (array[..., None] if array.ndim == 1 else array for array in (i, b, np.arange(groups)[None, :]))
    tokens = (i * len(slots) + b) * groups + group
    places = _flat(slots[b], group, groups) * capacity + (starts[b].astype(np.int64) + i) % capacity
    return tokens.reshape(-1), places.reshape(-1)


def _hidden(queries, starts, ends, kept, capacity, window):
    """Mask bool [b, 1, s, kept]: True where the position that a place holds is not visible to a query."""
    place, newest = np.arange(kept)[None, :], ends[:, None] - 1
    held = newest - (newest - place) % capacity  # position at each place, negative: none yet
    query = starts[:, None, None] + np.arange(queries)[None, :, None]
    held = held[:, None, :]
    hidden = (held < 0) | (held > query)
    if window is not None:
        hidden |= held <= query - window
    return hidden[:, None]
