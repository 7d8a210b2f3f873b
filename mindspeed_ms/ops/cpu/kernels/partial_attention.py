"""Kernels of attention to a part of the keys, with softmax statistics that let several parts be merged.

Arrays are query [sq, b, n, d], key [sk, b, groups, d], value [sk, b, groups, dv], output [sq, b, n, dv]; `maximum` and
`sums` [b, n, sq] are the largest score of each query and the sum of exponentials relative to it (lowest number and 0 where
no key is visible). Keys first_keys[b or 0, i] to stop_keys[b or 0, i] - 1 are visible to query i unless, with a mask,
mask[b or 0, i, j] != 0. Blocks of keys that no query of a block sees are not computed.
"""

import numpy as np

from mindspeed_ms.ops.cpu.compiler import inline, kernel, shared
from mindspeed_ms.ops.cpu.kernels.blas import address_of, multiply, multiply_transposed, place, transposed_multiply
from mindspeed_ms.ops.cpu.kernels.math import exp, row_dot, row_maximum, row_sum
from mindspeed_ms.ops.cpu.kernels.softmax import exponentials, fill, multiply_row

QUERY_BLOCK = 64
KEY_BLOCK = 512
LOWEST = np.float32(-3.0e38)

_ZERO = np.float32(0)
_ONE = np.float32(1)


@inline
def _mix_rows(target, old_weight, source, new_weight):
    for j in range(target.size):
        target[j] = target[j] * old_weight + source[j] * new_weight


@shared
def _hide(row, mask_row):
    for j in range(row.size):
        row[j] = LOWEST if mask_row[j] else row[j]


@shared
def _key_span(first_keys, stop_keys, first, rows):
    """First key that one of the queries `first`, ... sees, and the one after the last."""
    start, stop = first_keys[first], stop_keys[first]
    for i in range(first, first + rows):
        if stop_keys[i] > first_keys[i]:
            if stop <= start:
                start, stop = first_keys[i], stop_keys[i]
            start = min(start, first_keys[i])
            stop = max(stop, stop_keys[i])
    return np.int64(start), np.int64(stop)


@inline
def _within(first_key, stop_key, block, columns):
    """Part of a row of scores of keys `block`, ... that is visible: (start, stop) in the row."""
    low, high = np.int64(first_key) - block, np.int64(stop_key) - block
    low = low if low > 0 else 0
    low = low if low < columns else columns
    high = high if high < columns else columns
    return low, high if high > low else low


@shared
def _merge(output, maximum, total, part, part_maximum, part_total, merges):
    """Write the finished row `part` to `output`, or merge it with what is there; returns the new statistics."""
    if part_total <= _ZERO:
        if not merges:
            fill(output, _ZERO)
            return LOWEST, _ZERO
        return maximum, total
    if not merges or total <= _ZERO:
        inverse = _ONE / part_total
        for j in range(output.size):
            output[j] = part[j] * inverse
        return part_maximum, part_total
    largest = max(maximum, part_maximum)
    old, new = total * exp(maximum - largest), exp(part_maximum - largest)
    both = old + part_total * new
    _mix_rows(output, old / both, part, new / both)
    return largest, both


@kernel
def partial_attention_forward(
    start, stop, sgemm, query, key, value, scale, first_keys, stop_keys, mask, has_mask, merges, output, maximum, sums
):  # fmt: skip
    """Attention of query blocks `start` to `stop`, counted over b, n, blocks; `merges`: with the output that is there."""
    queries, batch, heads, size = query.shape
    groups, width = key.shape[2], value.shape[3]
    blocks = (queries + QUERY_BLOCK - 1) // QUERY_BLOCK
    q_step, k_step, v_step = batch * heads * size, batch * groups * size, batch * groups * width
    scores = np.empty(QUERY_BLOCK * KEY_BLOCK, np.float32)
    part = np.empty((QUERY_BLOCK, width), np.float32)
    part_sums = np.empty(QUERY_BLOCK, np.float32)
    largest = np.empty(QUERY_BLOCK, np.float32)
    for task in range(start, stop):
        head = task // blocks % heads
        b = task // blocks // heads
        group = head // (heads // groups)
        first = task % blocks * QUERY_BLOCK
        rows = QUERY_BLOCK if first + QUERY_BLOCK < queries else queries - first
        firsts, stops = first_keys[b % first_keys.shape[0]], stop_keys[b % stop_keys.shape[0]]
        key_start, key_stop = _key_span(firsts, stops, first, rows)
        for r in range(rows):
            largest[r] = LOWEST
            part_sums[r] = _ZERO
        for k0 in range(key_start, key_stop, KEY_BLOCK):
            columns = KEY_BLOCK if k0 + KEY_BLOCK < key_stop else key_stop - k0
            multiply_transposed(
                sgemm, rows, columns, size, scale, place(query, first, b, head), q_step, place(key, k0, b, group), k_step,
                0.0, address_of(scores), KEY_BLOCK,
            )  # fmt: skip
            for r in range(rows):
                i = first + r
                low, high = _within(firsts[i], stops[i], k0, columns)
                whole = scores[r * KEY_BLOCK : r * KEY_BLOCK + columns]
                row = whole[low:high]
                fill(whole[:low], _ZERO)
                fill(whole[high:], _ZERO)
                if low == high:
                    continue
                if has_mask:
                    _hide(row, mask[b % mask.shape[0], i % mask.shape[1], k0 + low : k0 + high])
                before, block_largest = largest[r], row_maximum(row)
                if before >= block_largest:
                    block_largest = before
                if block_largest == LOWEST:
                    fill(row, _ZERO)
                    continue
                shrink = exp(before - block_largest)
                exponentials(row, block_largest)
                part_sums[r] = np.float32(part_sums[r] * shrink + row_sum(row))
                largest[r] = block_largest
                if k0 > key_start and shrink != _ONE:
                    multiply_row(part[r], shrink)
            multiply(
                sgemm, rows, width, columns, 1.0, address_of(scores), KEY_BLOCK, place(value, k0, b, group), v_step,
                0.0 if k0 == key_start else 1.0, address_of(part), width,
            )  # fmt: skip
        for r in range(rows):
            i = first + r
            maximum[b, head, i], sums[b, head, i] = _merge(
                output[i, b, head], maximum[b, head, i], sums[b, head, i], part[r], largest[r], part_sums[r], merges
            )


@kernel
def partial_attention_backward(
    start, stop, sgemm, output_grad, query, key, value, output, maximum, sums, scale, first_keys, stop_keys, mask, has_mask,
    query_grad, key_grad, value_grad,
):  # fmt: skip
    """Add the gradients of pairs (b, group) `start` to `stop` to what is there; no two pairs write the same gradient."""
    queries, batch, heads, size = query.shape
    groups, width = key.shape[2], value.shape[3]
    per_group = heads // groups
    q_step, k_step, v_step, o_step = (
        batch * heads * size,
        batch * groups * size,
        batch * groups * width,
        batch * heads * width,
    )
    factor = np.float32(scale)
    probabilities = np.empty(QUERY_BLOCK * KEY_BLOCK, np.float32)
    grads = np.empty(QUERY_BLOCK * KEY_BLOCK, np.float32)
    means = np.empty(QUERY_BLOCK, np.float32)
    p, g = address_of(probabilities), address_of(grads)
    for task in range(start, stop):
        b = task // groups
        group = task % groups
        firsts, stops = first_keys[b % first_keys.shape[0]], stop_keys[b % stop_keys.shape[0]]
        for block in range(per_group * ((queries + QUERY_BLOCK - 1) // QUERY_BLOCK)):
            head = group * per_group + block % per_group
            first = block // per_group * QUERY_BLOCK
            rows = QUERY_BLOCK if first + QUERY_BLOCK < queries else queries - first
            key_start, key_stop = _key_span(firsts, stops, first, rows)
            if key_stop <= key_start:
                continue
            q, do = place(query, first, b, head), place(output_grad, first, b, head)
            for r in range(rows):
                means[r] = np.float32(row_dot(output_grad[first + r, b, head], output[first + r, b, head]))
            for k0 in range(key_start, key_stop, KEY_BLOCK):
                columns = KEY_BLOCK if k0 + KEY_BLOCK < key_stop else key_stop - k0
                k, v = place(key, k0, b, group), place(value, k0, b, group)
                multiply_transposed(sgemm, rows, columns, size, scale, q, q_step, k, k_step, 0.0, p, KEY_BLOCK)
                multiply_transposed(sgemm, rows, columns, width, 1.0, do, o_step, v, v_step, 0.0, g, KEY_BLOCK)
                for r in range(rows):
                    i = first + r
                    low, high = _within(firsts[i], stops[i], k0, columns)
                    if sums[b, head, i] <= _ZERO:
                        high = low
                    whole = probabilities[r * KEY_BLOCK : r * KEY_BLOCK + columns]
                    whole_grad = grads[r * KEY_BLOCK : r * KEY_BLOCK + columns]
                    fill(whole[:low], _ZERO)
                    fill(whole[high:], _ZERO)
                    fill(whole_grad[:low], _ZERO)
                    fill(whole_grad[high:], _ZERO)
                    if low == high:
                        continue
                    row, grad = whole[low:high], whole_grad[low:high]
                    if has_mask:
                        _hide(row, mask[b % mask.shape[0], i % mask.shape[1], k0 + low : k0 + high])
                    inverse, mean = _ONE / sums[b, head, i], means[r]
                    exponentials(row, maximum[b, head, i])
                    for j in range(row.size):
                        row[j] *= inverse
                        grad[j] = row[j] * (grad[j] - mean) * factor
                transposed_multiply(
                    sgemm, columns, width, rows, 1.0, p, KEY_BLOCK, do, o_step, 1.0, place(value_grad, k0, b, group), v_step
                )
                transposed_multiply(
                    sgemm, columns, size, rows, 1.0, g, KEY_BLOCK, q, q_step, 1.0, place(key_grad, k0, b, group), k_step
                )
                multiply(
                    sgemm, rows, size, columns, 1.0, g, KEY_BLOCK, k, k_step, 1.0, place(query_grad, first, b, head), q_step
                )
