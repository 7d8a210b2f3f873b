"""Attention in blocks of queries and keys with an online softmax; no [sq, sk] matrix is ever held.

Arrays are query [sq, b, n, d], key and value [sk, b, groups, d]; query head h reads group h // (n / groups). `maximum`
and `inverse_sum` [b, n, sq] keep each query's softmax for the backward, which recomputes the probabilities.

Key j is visible to query i if i + lower <= j <= i + upper and, with a mask, mask[b or 0, i, j] == 0. Dropout keeps what
`keep` [b, n, sq, sk] says (mode 1) or what a hash of seed and position says (mode 2).
"""
import numpy as np

from mindspeed_ms.ops.cpu.compiler import inline, kernel, shared
from mindspeed_ms.ops.cpu.kernels.blas import address_of, multiply, multiply_transposed, transposed_multiply
from mindspeed_ms.ops.cpu.kernels.math import exp, row_dot, row_maximum, row_sum
from mindspeed_ms.ops.cpu.kernels.softmax import fill, visible_range

QUERY_BLOCK = 64
KEY_BLOCK = 512
DROPOUT_NONE, DROPOUT_MASK, DROPOUT_SEED = 0, 1, 2

_ZERO = np.float32(0)
_ONE = np.float32(1)
_LOWEST = np.float32(-3.0e38)


@shared
def _fill_heads(array, first, last, b, head):
    """Zero the vectors of one head at positions first to last of [s, b, n, d]."""
    for i in range(first, last):
        fill(array[i, b, head], _ZERO)


@inline
def _kept_by_hash(seed, row, column, threshold):
    """Whether (row, column) survives: a mixing function of 64 bits (constants of the public-domain splitmix64)."""
    z = (
        np.uint64(seed)
        + np.uint64(row) * np.uint64(0x9E3779B97F4A7C15)
        + np.uint64(column) * np.uint64(0xD1342543DE82EF95)
    )
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.uint32((z ^ (z >> np.uint64(31))) >> np.uint64(32)) < threshold


@shared
def _drop(row, dropout, keep_row, seed, position, first_key, threshold, scale):
    """Apply dropout to the probabilities (or their gradients) of one query."""
    if dropout == DROPOUT_MASK:
        for j in range(row.size):
            row[j] = row[j] * scale if keep_row[first_key + j] else _ZERO
    elif dropout == DROPOUT_SEED:
        for j in range(row.size):
            row[j] = row[j] * scale if _kept_by_hash(seed, position, first_key + j, threshold) else _ZERO


@shared
def _hide(row, i, first_key, keys, lower, upper, has_mask, mask_row):
    """Set the scores of the invisible keys first_key, ... to the lowest number."""
    first, last = visible_range(i, keys, lower, upper)
    before = min(max(first - first_key, 0), row.size)
    after = min(max(last - first_key, before), row.size)
    fill(row[:before], _LOWEST)
    fill(row[after:], _LOWEST)
    if has_mask:
        for j in range(before, after):
            row[j] = _LOWEST if mask_row[first_key + j] else row[j]


@kernel
def attention_forward(start, stop, sgemm, query, key, value, scale, lower, upper, mask, has_mask,
                      dropout, keep, seed, keep_probability, output, maximum, inverse_sum):
    """Query blocks `start` to `stop`, counted over b, n, blocks; output [sq, b, n, d]."""
    queries, batch, heads, size = query.shape
    keys, groups = key.shape[0], key.shape[2]
    blocks = (queries + QUERY_BLOCK - 1) // QUERY_BLOCK
    q_step, k_step = batch * heads * size, batch * groups * size
    threshold = np.uint32(min(keep_probability * 4294967296.0, 4294967295.0))
    gain = np.float32(1 / keep_probability)
    scores = np.empty((QUERY_BLOCK, KEY_BLOCK), np.float32)
    sums = np.empty(QUERY_BLOCK, np.float64)
    for task in range(start, stop):
        head = task // blocks % heads
        b = task // blocks // heads
        group = head // (heads // groups)
        first = task % blocks * QUERY_BLOCK
        rows = min(QUERY_BLOCK, queries - first)
        q, o = address_of(query[first:, b, head]), address_of(output[first:, b, head])
        largest = maximum[b, head, first:first + rows]
        fill(largest, _LOWEST)
        fill(sums, 0.0)
        key_start = visible_range(first, keys, lower, upper)[0]
        key_stop = max(visible_range(first + rows - 1, keys, lower, upper)[1], key_start)
        if key_stop == key_start:
            _fill_heads(output, first, first + rows, b, head)
        for k0 in range(key_start, key_stop, KEY_BLOCK):
            columns = min(KEY_BLOCK, key_stop - k0)
            multiply_transposed(sgemm, rows, columns, size, scale, q, q_step,
                                address_of(key[k0:, b, group]), k_step, 0.0, address_of(scores), KEY_BLOCK)
            for r in range(rows):
                row = scores[r, :columns]
                _hide(
                    row,
                    first + r,
                    k0,
                    keys,
                    lower,
                    upper,
                    has_mask,
                    mask[b % mask.shape[0], (first + r) % mask.shape[1]],
                )
                new_largest = max(largest[r], row_maximum(row))
                if new_largest == _LOWEST:
                    fill(row, _ZERO)
                    continue
                shrink = exp(largest[r] - new_largest)
                for j in range(columns):
                    row[j] = exp(row[j] - new_largest)
                sums[r] = sums[r] * shrink + row_sum(row)
                largest[r] = new_largest
                _drop(row, dropout, keep[b % keep.shape[0], head % keep.shape[1], (first + r) % keep.shape[2]], seed,
                      (b * heads + head) * queries + first + r, k0, threshold, gain)
                if k0 > key_start and shrink != _ONE:
                    for j in range(size):
                        output[first + r, b, head, j] *= shrink
            multiply(sgemm, rows, size, columns, 1.0, address_of(scores), KEY_BLOCK,
                     address_of(value[k0:, b, group]), k_step, 0.0 if k0 == key_start else 1.0, o, q_step)
        for r in range(rows):
            inverse = np.float32(1 / sums[r]) if sums[r] > 0 else _ZERO
            inverse_sum[b, head, first + r] = inverse
            for j in range(size):
                output[first + r, b, head, j] *= inverse


@kernel
def attention_backward(
    start,
    stop,
    sgemm,
    output_grad,
    query,
    key,
    value,
    output,
    maximum,
    inverse_sum,
    scale,
    lower,
    upper,
    mask,
    has_mask,
    dropout,
    keep,
    seed,
    keep_probability,
    query_grad,
    key_grad,
    value_grad,
):
    """Pairs (b, group) `start` to `stop`: no two of them write the same gradient."""
    queries, batch, heads, size = query.shape
    keys, groups = key.shape[0], key.shape[2]
    per_group = heads // groups
    q_step, k_step = batch * heads * size, batch * groups * size
    threshold = np.uint32(min(keep_probability * 4294967296.0, 4294967295.0))
    gain = np.float32(1 / keep_probability)
    factor = np.float32(scale)
    probabilities = np.empty((QUERY_BLOCK, KEY_BLOCK), np.float32)
    grads = np.empty((QUERY_BLOCK, KEY_BLOCK), np.float32)
    p, g = address_of(probabilities), address_of(grads)
    for task in range(start, stop):
        b = task // groups
        group = task % groups
        _fill_heads(key_grad, 0, keys, b, group)
        _fill_heads(value_grad, 0, keys, b, group)
        for head in range(group * per_group, (group + 1) * per_group):
            for first in range(0, queries, QUERY_BLOCK):
                rows = min(QUERY_BLOCK, queries - first)
                q, dq = address_of(query[first:, b, head]), address_of(query_grad[first:, b, head])
                do = address_of(output_grad[first:, b, head])
                key_start = visible_range(first, keys, lower, upper)[0]
                key_stop = max(visible_range(first + rows - 1, keys, lower, upper)[1], key_start)
                if key_stop == key_start:
                    _fill_heads(query_grad, first, first + rows, b, head)
                for k0 in range(key_start, key_stop, KEY_BLOCK):
                    columns = min(KEY_BLOCK, key_stop - k0)
                    k, v = address_of(key[k0:, b, group]), address_of(value[k0:, b, group])
                    multiply_transposed(sgemm, rows, columns, size, scale, q, q_step, k, k_step, 0.0, p, KEY_BLOCK)
                    multiply_transposed(sgemm, rows, columns, size, 1.0, do, q_step, v, k_step, 0.0, g, KEY_BLOCK)
                    for r in range(rows):
                        i = first + r
                        row, grad = probabilities[r, :columns], grads[r, :columns]
                        inverse = inverse_sum[b, head, i]
                        if inverse == _ZERO:
                            fill(row, _ZERO)
                            fill(grad, _ZERO)
                            continue
                        _hide(row, i, k0, keys, lower, upper, has_mask, mask[b % mask.shape[0], i % mask.shape[1]])
                        keep_row = keep[b % keep.shape[0], head % keep.shape[1], i % keep.shape[2]]
                        position = (b * heads + head) * queries + i
                        largest = maximum[b, head, i]
                        mean = np.float32(row_dot(output_grad[i, b, head], output[i, b, head]))
                        _drop(grad, dropout, keep_row, seed, position, k0, threshold, gain)
                        for j in range(columns):
                            row[j] = exp(row[j] - largest) * inverse
                            grad[j] = row[j] * (grad[j] - mean) * factor
                        _drop(row, dropout, keep_row, seed, position, k0, threshold, gain)
                    transposed_multiply(sgemm, columns, size, rows, 1.0, p, KEY_BLOCK, do, q_step, 1.0,
                                        address_of(value_grad[k0:, b, group]), k_step)
                    transposed_multiply(sgemm, columns, size, rows, 1.0, g, KEY_BLOCK, q, q_step, 1.0,
                                        address_of(key_grad[k0:, b, group]), k_step)
                    multiply(sgemm, rows, size, columns, 1.0, g, KEY_BLOCK, k, k_step, 0.0 if k0 == key_start else 1.0,
                             dq, q_step)
