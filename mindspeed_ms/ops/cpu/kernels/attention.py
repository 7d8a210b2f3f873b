"""Attention kernels in blocks of queries and keys with an online softmax; no [sq, sk] matrix is held.

Arrays are query [sq, b, n, d], key [sk, b, groups, d], value [sk, b, groups, dv]; query head h reads group h // (n /
groups). `maximum` and `inverse_sum` [b, n, sq] keep each query's softmax for the backward, which recomputes the
probabilities. With `has_sinks` each head has one more score, sinks[h], which takes part in the softmax and has no value.

Key j is visible to query i if i + lower <= j <= i + upper and, with a mask, mask[b or 0, i, j] == 0. Dropout keeps what
`keep` [b, n, sq, sk] says (mode 1) or what a hash of seed and position says (mode 2).
"""

import numpy as np

from mindspeed_ms.ops.cpu.compiler import inline, kernel, shared
from mindspeed_ms.ops.cpu.kernels.blas import address_of, multiply, multiply_transposed, place, transposed_multiply
from mindspeed_ms.ops.cpu.kernels.math import exp, row_dot, row_maximum, row_sum
from mindspeed_ms.ops.cpu.kernels.softmax import exponentials, fill, multiply_row, visible_range

QUERY_BLOCK = 64
KEY_BLOCK = 512
DROPOUT_NONE, DROPOUT_MASK, DROPOUT_SEED = 0, 1, 2

_ZERO = np.float32(0)
_ONE = np.float32(1)
_LOWEST = np.float32(-3.0e38)


@shared
def _fill_heads(array, first, last, b, head):
    """Set the vectors of one head at positions first to last of [s, b, n, d] to zero."""
    for i in range(first, last):
        fill(array[i, b, head], _ZERO)


@inline
def _kept_by_hash(seed, row, column, threshold):
    """Whether dropout keeps (row, column): a 64-bit mixing function (constants of the public-domain splitmix64)."""
    z = np.uint64(seed) + np.uint64(row) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(column) * np.uint64(0xD1342543DE82EF95)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(32)) < threshold


@shared
def _drop(row, dropout, keep_row, seed, position, first_key, keep_probability, gain):
    """Apply dropout to the probabilities of one query, or to their gradients."""
    if dropout == DROPOUT_MASK:
        for j in range(row.size):
            row[j] = row[j] * gain if keep_row[first_key + j] else _ZERO
    else:
        threshold = np.uint64(keep_probability * 4294967296.0)
        for j in range(row.size):
            row[j] = row[j] * gain if _kept_by_hash(seed, position, first_key + j, threshold) else _ZERO


@shared
def _hide(row, i, first_key, keys, lower, upper, has_mask, mask_row):
    """Set the scores of the invisible keys first_key, ... to the lowest number."""
    first, last = visible_range(i, keys, lower, upper)
    for j in range(row.size):
        key = first_key + j
        if key < first or key >= last:
            row[j] = _LOWEST
    if has_mask:
        for j in range(row.size):
            row[j] = _LOWEST if mask_row[first_key + j] else row[j]


@kernel
def attention_forward(
    start, stop, sgemm, query, key, value, scale, lower, upper, mask, has_mask,
    dropout, keep, seed, keep_probability, has_sinks, sinks, output, maximum, inverse_sum,
):  # fmt: skip
    """Attention of query blocks `start` to `stop`, counted over b, n, blocks; output [sq, b, n, dv]."""
    queries, batch, heads, size = query.shape
    keys, groups, value_size = key.shape[0], key.shape[2], value.shape[3]
    blocks = (queries + QUERY_BLOCK - 1) // QUERY_BLOCK
    q_step, k_step = batch * heads * size, batch * groups * size
    o_step, v_step = batch * heads * value_size, batch * groups * value_size
    gain = np.float32(1 / keep_probability)
    scores = np.empty(QUERY_BLOCK * KEY_BLOCK, np.float32)
    sums = np.empty(QUERY_BLOCK, np.float32)
    for task in range(start, stop):
        head = task // blocks % heads
        b = task // blocks // heads
        group = head // (heads // groups)
        first = task % blocks * QUERY_BLOCK
        rows = QUERY_BLOCK if first + QUERY_BLOCK < queries else queries - first
        largest = maximum[b, head, first:]
        for r in range(rows):
            largest[r] = sinks[head] if has_sinks else _LOWEST
            sums[r] = _ONE if has_sinks else _ZERO
        key_start = visible_range(first, keys, lower, upper)[0]
        key_stop = visible_range(first + rows - 1, keys, lower, upper)[1]
        if key_stop <= key_start:
            _fill_heads(output, first, first + rows, b, head)
        for k0 in range(key_start, key_stop, KEY_BLOCK):
            columns = KEY_BLOCK if k0 + KEY_BLOCK < key_stop else key_stop - k0
            multiply_transposed(
                sgemm,
                rows,
                columns,
                size,
                scale,
                place(query, first, b, head),
                q_step,
                place(key, k0, b, group),
                k_step,
                0.0,
                address_of(scores),
                KEY_BLOCK,
            )
            for r in range(rows):
                i = first + r
                row = scores[r * KEY_BLOCK : r * KEY_BLOCK + columns]
                _hide(row, i, k0, keys, lower, upper, has_mask, mask[b % mask.shape[0], i % mask.shape[1]])
                before, block_largest = largest[r], row_maximum(row)
                if before >= block_largest:
                    block_largest = before
                if block_largest == _LOWEST:
                    fill(row, _ZERO)
                    continue
                shrink = exp(before - block_largest)
                exponentials(row, block_largest)
                sums[r] = np.float32(sums[r] * shrink + row_sum(row))
                largest[r] = block_largest
                if dropout != DROPOUT_NONE:
                    _drop(
                        row,
                        dropout,
                        keep[b % keep.shape[0], head % keep.shape[1], i % keep.shape[2]],
                        seed,
                        (b * heads + head) * queries + i,
                        k0,
                        keep_probability,
                        gain,
                    )
                if k0 > key_start and shrink != _ONE:
                    multiply_row(output[i, b, head], shrink)
            multiply(
                sgemm,
                rows,
                value_size,
                columns,
                1.0,
                address_of(scores),
                KEY_BLOCK,
                place(value, k0, b, group),
                v_step,
                0.0 if k0 == key_start else 1.0,
                place(output, first, b, head),
                o_step,
            )
        for r in range(rows):
            inverse = _ONE / sums[r] if sums[r] > _ZERO else _ZERO
            inverse_sum[b, head, first + r] = inverse
            multiply_row(output[first + r, b, head], inverse)


@kernel
def attention_backward(
    start, stop, sgemm, output_grad, query, key, value, output, maximum, inverse_sum, scale, lower, upper, mask, has_mask,
    dropout, keep, seed, keep_probability, query_grad, key_grad, value_grad,
):  # fmt: skip
    """Gradients of attention for pairs (b, group) `start` to `stop`; no two pairs write the same gradient."""
    queries, batch, heads, size = query.shape
    keys, groups, value_size = key.shape[0], key.shape[2], value.shape[3]
    per_group = heads // groups
    q_step, k_step = batch * heads * size, batch * groups * size
    o_step, v_step = batch * heads * value_size, batch * groups * value_size
    gain = np.float32(1 / keep_probability)
    factor = np.float32(scale)
    probabilities = np.empty(QUERY_BLOCK * KEY_BLOCK, np.float32)
    grads = np.empty(QUERY_BLOCK * KEY_BLOCK, np.float32)
    p, g = address_of(probabilities), address_of(grads)
    for task in range(start, stop):
        b = task // groups
        group = task % groups
        _fill_heads(key_grad, 0, keys, b, group)
        _fill_heads(value_grad, 0, keys, b, group)
        for block in range(per_group * ((queries + QUERY_BLOCK - 1) // QUERY_BLOCK)):
            head = group * per_group + block % per_group
            first = block // per_group * QUERY_BLOCK
            rows = QUERY_BLOCK if first + QUERY_BLOCK < queries else queries - first
            q, do = place(query, first, b, head), place(output_grad, first, b, head)
            key_start = visible_range(first, keys, lower, upper)[0]
            key_stop = visible_range(first + rows - 1, keys, lower, upper)[1]
            if key_stop <= key_start:
                _fill_heads(query_grad, first, first + rows, b, head)
            for k0 in range(key_start, key_stop, KEY_BLOCK):
                columns = KEY_BLOCK if k0 + KEY_BLOCK < key_stop else key_stop - k0
                k, v = place(key, k0, b, group), place(value, k0, b, group)
                multiply_transposed(sgemm, rows, columns, size, scale, q, q_step, k, k_step, 0.0, p, KEY_BLOCK)
                multiply_transposed(sgemm, rows, columns, value_size, 1.0, do, o_step, v, v_step, 0.0, g, KEY_BLOCK)
                for r in range(rows):
                    i = first + r
                    row = probabilities[r * KEY_BLOCK : r * KEY_BLOCK + columns]
                    grad = grads[r * KEY_BLOCK : r * KEY_BLOCK + columns]
                    inverse = inverse_sum[b, head, i]
                    if inverse == _ZERO:
                        fill(row, _ZERO)
                        fill(grad, _ZERO)
                        continue
                    _hide(row, i, k0, keys, lower, upper, has_mask, mask[b % mask.shape[0], i % mask.shape[1]])
                    mean = np.float32(row_dot(output_grad[i, b, head], output[i, b, head]))
                    keep_row = keep[b % keep.shape[0], head % keep.shape[1], i % keep.shape[2]]
                    position = (b * heads + head) * queries + i
                    if dropout != DROPOUT_NONE:
                        _drop(grad, dropout, keep_row, seed, position, k0, keep_probability, gain)
                    exponentials(row, maximum[b, head, i])
                    for j in range(columns):
                        row[j] *= inverse
                        grad[j] = row[j] * (grad[j] - mean) * factor
                    if dropout != DROPOUT_NONE:
                        _drop(row, dropout, keep_row, seed, position, k0, keep_probability, gain)
                transposed_multiply(
                    sgemm,
                    columns,
                    value_size,
                    rows,
                    1.0,
                    p,
                    KEY_BLOCK,
                    do,
                    o_step,
                    1.0,
                    place(value_grad, k0, b, group),
                    v_step,
                )
                transposed_multiply(
                    sgemm, columns, size, rows, 1.0, g, KEY_BLOCK, q, q_step, 1.0, place(key_grad, k0, b, group), k_step
                )
                multiply(
                    sgemm,
                    rows,
                    size,
                    columns,
                    1.0,
                    g,
                    KEY_BLOCK,
                    k,
                    k_step,
                    0.0 if k0 == key_start else 1.0,
                    place(query_grad, first, b, head),
                    q_step,
                )
