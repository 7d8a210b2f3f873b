"""Kernels of attention to a key-value cache [slots, groups, capacity, d], for one new token per row or many.

Caches are passed as int16 views [slots, groups, capacity, d * item / 2], whatever their dtype: only addresses are taken of
them. Half precisions are widened block by block. Position p of a slot lies at place p % capacity.
"""

import numpy as np

from mindspeed_ms.ops.cpu.compiler import inline, kernel, shared
from mindspeed_ms.ops.cpu.kernels.blas import ITEM, address_of, multiply, multiply_transposed
from mindspeed_ms.ops.cpu.kernels.casts import float_of_bfloat16, float_of_bits
from mindspeed_ms.ops.cpu.kernels.math import exp, row_maximum, row_sum
from mindspeed_ms.ops.cpu.kernels.softmax import fill

ROW_BLOCK = 64
KEY_BLOCK = 512
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
UNLIMITED = 1 << 40

_ZERO = np.float32(0)
_ONE = np.float32(1)
_LOWEST = np.float32(-3.0e38)
_FLOAT16_SCALE = np.float32(2.0**112)


@inline
def _widened(bits, kind):
    """float32 of the int16 bits of a bfloat16 or float16."""
    if kind == BFLOAT16:
        return float_of_bfloat16(bits)
    wide = np.uint32(np.uint16(bits))
    rest = np.uint32(wide & np.uint32(0x7FFF))
    sign = np.uint32(np.uint32(wide & np.uint32(0x8000)) << np.uint32(16))
    if rest >= np.uint32(0x7C00):  # infinite or no number
        return float_of_bits(np.uint32(sign | np.uint32(0x7F800000) | np.uint32(np.uint32(rest << np.uint32(13)))))
    magnitude = float_of_bits(np.uint32(rest << np.uint32(13))) * _FLOAT16_SCALE
    return -magnitude if sign else magnitude


@kernel
def write_to_cache(start, stop, keys, values, key_cache, value_cache, has_values, slots, starts, lengths):
    """Copy new keys and values, int16 views [s, b, groups, w], of the tokens `start` to `stop` (counted over s, b).

    Without `has_values` both values are other names of the keys.
    """
    batch, groups = keys.shape[1], keys.shape[2]
    capacity = key_cache.shape[2]
    for token in range(start, stop):
        i, b = token // batch, token % batch
        if i < lengths[b]:
            slot, place = slots[b], (starts[b] + i) % capacity
            for group in range(groups):
                for j in range(keys.shape[3]):
                    key_cache[slot, group, place, j] = keys[i, b, group, j]
                if has_values:
                    for j in range(values.shape[3]):
                        value_cache[slot, group, place, j] = values[i, b, group, j]


@shared
def _widen_rows(cache, slot, group, place, count, kind, wide):
    size = cache.shape[3]
    for j in range(count):
        bits = cache[slot, group, place + j]
        for k in range(size):
            wide[j * size + k] = _widened(bits[k], kind)


@inline
def _block_address(cache, slot, group, place, count, kind, wide):
    """Address of the float32 vectors at places `place`, ...: the cache's own, or those of `wide`."""
    if kind == FLOAT32:
        vector = (slot * cache.shape[1] + group) * cache.shape[2] + place
        return address_of(cache) + vector * cache.shape[3] * 2
    _widen_rows(cache, slot, group, place, count, kind, wide)
    return address_of(wide)


@kernel
def cached_attention(
    start, stop, sgemm, query, key_cache, value_cache, kind, slots, starts, lengths, scale, window, has_sinks, sinks, output
):  # fmt: skip
    """Attention of row blocks `start` to `stop`; query and output are float32 [s, b, n, d].

    An output narrower than the cached vectors takes their first elements as values; `sinks` as in `attention_forward`.

    With one token per row (s = 1) the rows of a block are the query heads of a group, which share its keys; else they are
    positions of one head.
    """
    queries, batch, heads, size = query.shape
    groups, capacity, value_size = key_cache.shape[1], key_cache.shape[2], output.shape[3]
    per_group = heads // groups
    is_step = queries == 1
    units, unit_rows = (groups, per_group) if is_step else (heads, queries)
    row_step = size if is_step else batch * heads * size
    blocks = (unit_rows + ROW_BLOCK - 1) // ROW_BLOCK
    scores = np.empty(ROW_BLOCK * KEY_BLOCK, np.float32)
    sums = np.empty(ROW_BLOCK, np.float32)
    largest = np.empty(ROW_BLOCK, np.float32)
    total = np.empty((ROW_BLOCK, value_size), np.float32)
    wide = np.empty(1 if kind == FLOAT32 else KEY_BLOCK * size, np.float32)
    for task in range(start, stop):
        first = task % blocks * ROW_BLOCK
        unit = task // blocks % units
        b = task // blocks // units
        rows = min(ROW_BLOCK, unit_rows - first)
        head = unit * per_group + first if is_step else unit
        group = unit if is_step else unit // per_group
        i = 0 if is_step else first
        real = min(rows, max(0, lengths[b] * per_group if is_step else lengths[b] - i))
        slot = slots[b]
        position = starts[b] + i  # of row 0
        key_stop = position + (1 if is_step else real)
        k0 = max(0, position - window + 1)
        for r in range(rows):
            sums[r] = _ONE if has_sinks else _ZERO
            largest[r] = _LOWEST
            if has_sinks:
                largest[r] = sinks[head + r] if is_step else sinks[head]
            fill(total[r], _ZERO)
        while real > 0 and k0 < key_stop:
            place = k0 % capacity
            columns = min(KEY_BLOCK, key_stop - k0, capacity - place)
            place_of_query = address_of(query) + ITEM * (((i * batch + b) * heads + head) * size)
            keys = _block_address(key_cache, slot, group, place, columns, kind, wide)
            multiply_transposed(
                sgemm, real, columns, size, scale, place_of_query, row_step, keys, size, 0.0, address_of(scores), KEY_BLOCK
            )
            for r in range(real):
                row = scores[r * KEY_BLOCK : r * KEY_BLOCK + columns]
                p = position if is_step else position + r
                seen_start, seen_stop = max(0, p - window + 1 - k0), min(columns, max(0, p + 1 - k0))
                fill(row[:seen_start], _ZERO)
                fill(row[seen_stop:], _ZERO)
                if seen_start >= seen_stop:
                    continue
                row = row[seen_start:seen_stop]
                before, block_largest = largest[r], row_maximum(row)
                if before >= block_largest:
                    block_largest = before
                shrink = exp(before - block_largest)
                for j in range(row.size):
                    row[j] = exp(row[j] - block_largest)
                sums[r] = np.float32(sums[r] * shrink + row_sum(row))
                largest[r] = block_largest
                if shrink != _ONE:
                    for j in range(value_size):
                        total[r, j] *= shrink
            values = _block_address(value_cache, slot, group, place, columns, kind, wide)
            multiply(
                sgemm,
                real,
                value_size,
                columns,
                1.0,
                address_of(scores),
                KEY_BLOCK,
                values,
                size,
                1.0,
                address_of(total),
                value_size,
            )
            k0 += columns
        for r in range(rows):
            inverse = _ONE / sums[r] if sums[r] > _ZERO else _ZERO
            target = output[0, b, head + r] if is_step else output[i + r, b, head]
            for j in range(value_size):
                target[j] = total[r, j] * inverse
