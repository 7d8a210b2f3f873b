"""Movement kernels: embedding, qkv split, rotary, dropout, residuals. Kernels that only move take any element type."""

import numpy as np

from mindspeed_ms.ops.cpu.compiler import inline, kernel

_ZERO = np.float32(0)


@inline
def _copy(source, target):
    for j in range(target.size):
        target[j] = source[j]


@kernel
def gather_rows(start, stop, weight, ids, vocab_start, output):
    """Embedding lookup: output [n, h] = rows of weight [rows, h] for ids [n]; zero rows for ids of other ranks."""
    for i in range(start, stop):
        row = ids[i] - vocab_start
        if 0 <= row < weight.shape[0]:
            for j in range(weight.shape[1]):
                output[i, j] = weight[row, j]
        else:
            for j in range(weight.shape[1]):
                output[i, j] = 0


@kernel
def scatter_rows(start, stop, output_grad, ids, vocab_start, weight_grad):
    """Columns `start` to `stop` of weight_grad [rows, h]: zero, then those of output_grad [n, h] in the order of the
    ids.
    """
    for row in range(weight_grad.shape[0]):
        target = weight_grad[row, start:stop]
        for j in range(target.size):
            target[j] = _ZERO
    for i in range(ids.size):
        row = ids[i] - vocab_start
        if 0 <= row < weight_grad.shape[0]:
            target, source = weight_grad[row, start:stop], output_grad[i, start:stop]
            for j in range(target.size):
                target[j] += source[j]


@kernel
def split_query_key_value(start, stop, mixed, query, key, value):
    """mixed [tokens, groups, (queries + 2) * d] -> query [tokens, groups, queries * d], key and value [tokens,
    groups, d].
    """
    wide, size = query.shape[2], key.shape[2]
    for token in range(start, stop):
        for group in range(mixed.shape[1]):
            source = mixed[token, group]
            _copy(source[:wide], query[token, group])
            _copy(source[wide : wide + size], key[token, group])
            _copy(source[wide + size :], value[token, group])


@kernel
def join_query_key_value(start, stop, query, key, value, mixed):
    """The inverse of `split_query_key_value`."""
    wide, size = query.shape[2], key.shape[2]
    for token in range(start, stop):
        for group in range(mixed.shape[1]):
            target = mixed[token, group]
            _copy(query[token, group], target[:wide])
            _copy(key[token, group], target[wide : wide + size])
            _copy(value[token, group], target[wide + size :])


@inline
def _rotate(x, c, z, interleaved, y):
    """Rotate heads x [n, d] into y by cos c and sin z [rot]: pairs (2j, 2j + 1), or (j, j + rot/2)."""
    rot = c.size
    half = rot // 2
    for head in range(x.shape[0]):
        if interleaved:
            for j in range(0, rot, 2):
                y[head, j] = x[head, j] * c[j] - x[head, j + 1] * z[j]
                y[head, j + 1] = x[head, j + 1] * c[j + 1] + x[head, j] * z[j + 1]
        else:
            for j in range(half):
                y[head, j] = x[head, j] * c[j] - x[head, half + j] * z[j]
            for j in range(half):
                y[head, half + j] = x[head, half + j] * c[half + j] + x[head, j] * z[half + j]
        for j in range(rot, x.shape[1]):
            y[head, j] = x[head, j]


@kernel
def rotary(start, stop, t, cos, sin, interleaved, output):
    """Rotate the heads of t [s, b, n, d] by cos and sin [s, b or 1, rot]; rows are the s * b tokens."""
    batch = t.shape[1]
    for token in range(start, stop):
        s, b = token // batch, token % batch
        angle = b if cos.shape[1] > 1 else 0
        _rotate(t[s, b], cos[s, angle], sin[s, angle], interleaved, output[s, b])


@kernel
def split_and_rotate(start, stop, mixed, cos, sin, interleaved, query, key, value):
    """`split_query_key_value` of mixed [s, b, groups, queries + 2, d], then `rotary` of query [s, b, groups, queries, d] and
    key [s, b, groups, 1, d].
    """
    batch, groups, queries = mixed.shape[1], mixed.shape[2], mixed.shape[3] - 2
    for token in range(start, stop):
        s, b = token // batch, token % batch
        angle = b if cos.shape[1] > 1 else 0
        c, z = cos[s, angle], sin[s, angle]
        for group in range(groups):
            heads = mixed[s, b, group]
            _rotate(heads[:queries], c, z, interleaved, query[s, b, group])
            _rotate(heads[queries : queries + 1], c, z, interleaved, key[s, b, group])
            _copy(heads[queries + 1], value[s, b, group])


@kernel
def join_and_rotate(start, stop, query, key, value, cos, sin, interleaved, mixed):
    """The inverse of `split_and_rotate`, for the sin of the inverse rotation."""
    batch, groups, queries = mixed.shape[1], mixed.shape[2], mixed.shape[3] - 2
    for token in range(start, stop):
        s, b = token // batch, token % batch
        angle = b if cos.shape[1] > 1 else 0
        c, z = cos[s, angle], sin[s, angle]
        for group in range(groups):
            heads = mixed[s, b, group]
            _rotate(query[s, b, group], c, z, interleaved, heads[:queries])
            _rotate(key[s, b, group], c, z, interleaved, heads[queries : queries + 1])
            _copy(value[s, b, group], heads[queries + 1])


@kernel
def masked_scale(start, stop, x, keep, scale, output):
    """Dropout: output = x * scale where keep [n] (uint8) is set, else 0."""
    for i in range(start, stop):
        output[i] = x[i] * scale if keep[i] else _ZERO


@kernel
def add_bias(start, stop, x, bias):
    """Add bias [n] to rows of x [rows, n] in place."""
    for i in range(start, stop):
        for j in range(x.shape[1]):
            x[i, j] += bias[j]


@kernel
def bias_add_residual(start, stop, x, bias, residual, output):
    """Residual addition: output = residual + x + bias for rows x [rows, n]."""
    for i in range(start, stop):
        for j in range(x.shape[1]):
            output[i, j] = residual[i, j] + (x[i, j] + bias[j])


@kernel
def bias_dropout_add_residual(start, stop, x, bias, residual, keep, scale, output):
    """Residual addition: output = residual + (x + bias) * scale where keep [rows, n] (uint8) is set, else residual."""
    for i in range(start, stop):
        for j in range(x.shape[1]):
            output[i, j] = residual[i, j] + ((x[i, j] + bias[j]) * scale if keep[i, j] else _ZERO)
