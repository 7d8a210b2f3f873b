"""Kernels that move or combine elements: embedding, qkv split, rotary, dropout, residuals. Movers take any element type."""
import numpy as np

from mindspeed_ms.ops.cpu.compiler import kernel

_ZERO = np.float32(0)


@kernel
def gather_rows(start, stop, weight, ids, vocab_start, output):
    """output [n, h] = rows of weight [rows, h] for ids [n]; zero rows for ids of other ranks."""
    for i in range(start, stop):
        row = ids[i] - vocab_start
        if 0 <= row < weight.shape[0]:
            output[i] = weight[row]
        else:
            output[i] = 0


@kernel
def scatter_rows(start, stop, output_grad, ids, vocab_start, weight_grad):
    """Columns `start` to `stop` of weight_grad [rows, h]: zero, then those of output_grad [n, h] in the order of the ids."""
    weight_grad[:, start:stop] = _ZERO
    for i in range(ids.size):
        row = ids[i] - vocab_start
        if 0 <= row < weight_grad.shape[0]:
            for j in range(start, stop):
                weight_grad[row, j] += output_grad[i, j]


@kernel
def split_query_key_value(start, stop, mixed, query, key, value):
    """mixed [tokens, groups, queries + 2, d] -> query [tokens, groups, queries, d], key and value [tokens, groups, d]."""
    queries = query.shape[2]
    for token in range(start, stop):
        for group in range(mixed.shape[1]):
            query[token, group] = mixed[token, group, :queries]
            key[token, group] = mixed[token, group, queries]
            value[token, group] = mixed[token, group, queries + 1]


@kernel
def join_query_key_value(start, stop, query, key, value, mixed):
    """The inverse of `split_query_key_value`."""
    queries = query.shape[2]
    for token in range(start, stop):
        for group in range(mixed.shape[1]):
            mixed[token, group, :queries] = query[token, group]
            mixed[token, group, queries] = key[token, group]
            mixed[token, group, queries + 1] = value[token, group]


@kernel
def rotary_halves(start, stop, t, cos, sin, backward, output):
    """Rotate pairs (j, j + rot/2) of t [s, b, n, d] by cos and sin [s, b or 1, rot]; rows are the s * b tokens."""
    batch, heads, size = t.shape[1], t.shape[2], t.shape[3]
    rot = cos.shape[2]
    half = rot // 2
    for token in range(start, stop):
        s = token // batch
        b = token % batch
        angle = b if cos.shape[1] > 1 else 0
        cos1, cos2 = cos[s, angle, :half], cos[s, angle, half:]
        sin1, sin2 = sin[s, angle, :half], sin[s, angle, half:]
        for head in range(heads):
            x1, x2 = t[s, b, head, :half], t[s, b, head, half:rot]
            y1, y2 = output[s, b, head, :half], output[s, b, head, half:rot]
            if backward:
                for j in range(half):
                    y1[j] = x1[j] * cos1[j] + x2[j] * sin2[j]
                    y2[j] = x2[j] * cos2[j] - x1[j] * sin1[j]
            else:
                for j in range(half):
                    y1[j] = x1[j] * cos1[j] - x2[j] * sin1[j]
                    y2[j] = x2[j] * cos2[j] + x1[j] * sin2[j]
            for j in range(rot, size):
                output[s, b, head, j] = t[s, b, head, j]


@kernel
def rotary_interleaved(start, stop, t, cos, sin, backward, output):
    """Like `rotary_halves` for pairs (2j, 2j + 1)."""
    batch, heads, size = t.shape[1], t.shape[2], t.shape[3]
    rot = cos.shape[2]
    for token in range(start, stop):
        s = token // batch
        b = token % batch
        angle = b if cos.shape[1] > 1 else 0
        for head in range(heads):
            for j in range(0, rot, 2):
                x1, x2 = t[s, b, head, j], t[s, b, head, j + 1]
                c1, c2 = cos[s, angle, j], cos[s, angle, j + 1]
                s1, s2 = sin[s, angle, j], sin[s, angle, j + 1]
                if backward:
                    s1, s2 = -s2, -s1
                output[s, b, head, j] = x1 * c1 - x2 * s1
                output[s, b, head, j + 1] = x2 * c2 + x1 * s2
            for j in range(rot, size):
                output[s, b, head, j] = t[s, b, head, j]


@kernel
def masked_scale(start, stop, x, keep, scale, output):
    """output = x * scale where keep [n] (uint8) is set, else 0."""
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
    """output = residual + x + bias for rows x [rows, n]."""
    for i in range(start, stop):
        for j in range(x.shape[1]):
            output[i, j] = residual[i, j] + (x[i, j] + bias[j])


@kernel
def bias_dropout_add_residual(start, stop, x, bias, residual, keep, scale, output):
    """output = residual + (x + bias) * scale where keep [rows, n] (uint8) is set, else residual."""
    for i in range(start, stop):
        for j in range(x.shape[1]):
            output[i, j] = residual[i, j] + ((x[i, j] + bias[j]) * scale if keep[i, j] else _ZERO)


@kernel
def swap_leading(start, stop, source, destination):
    """destination [b, s, n] = source [s, b, n] with the leading dimensions swapped; rows are destination's b * s."""
    outer = destination.shape[1]
    for row in range(start, stop):
        destination[row // outer, row % outer] = source[row % outer, row // outer]
