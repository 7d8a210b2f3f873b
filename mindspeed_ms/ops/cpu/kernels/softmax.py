"""Masked softmax kernels over rows of scores [b * n * sq, sk].

Row r belongs to query i = r % sq; its visible keys are i + lower <= j <= i + upper and, with a mask, mask[b or 0, i, j]
== 0.
"""

import numpy as np

from mindspeed_ms.ops.cpu.compiler import inline, kernel
from mindspeed_ms.ops.cpu.kernels.math import exp, row_dot, row_maximum, row_sum

_ZERO = np.float32(0)
_BLOCKED = np.float32(-3.0e38)


@inline
def fill(row, number):
    """Set every element of a row to one value."""
    for j in range(row.size):
        row[j] = number


@inline
def exponentials(row, shift):
    """exp(row - shift) in place."""
    for j in range(row.size):
        row[j] = exp(row[j] - shift)


@inline
def multiply_row(row, factor):
    """Multiply every element of a row by one number."""
    for j in range(row.size):
        row[j] *= factor


@inline
def visible_range(i, keys, lower, upper):
    """First visible key of query i, and the one after the last."""
    first, last = i + lower, i + upper + 1
    first = first if first > 0 else 0
    first = first if first < keys else keys
    last = last if last < keys else keys
    return first, last if last > first else first


@inline
def _scale_row(source, mask, has_mask, scale, target):
    if has_mask:
        for j in range(source.size):
            target[j] = _BLOCKED if mask[j] else source[j] * scale
    else:
        for j in range(source.size):
            target[j] = source[j] * scale


@kernel
def softmax_forward(start, stop, scores, heads, queries, mask, has_mask, scale, lower, upper, output):
    """Masked softmax; `output` may be `scores`; mask is uint8 [b or 1, sq, sk]."""
    keys = scores.shape[1]
    factor = np.float32(scale)
    for r in range(start, stop):
        i = r % queries
        b = r // (queries * heads) if mask.shape[0] > 1 else 0
        first, last = visible_range(i, keys, lower, upper)
        row = output[r, first:last]
        fill(output[r, :first], _ZERO)
        fill(output[r, last:], _ZERO)
        if first == last:
            continue
        _scale_row(scores[r, first:last], mask[b, i % mask.shape[1], first:last], has_mask, factor, row)
        largest = row_maximum(row)
        if largest <= _BLOCKED:
            fill(row, _ZERO)
            continue
        for j in range(row.size):
            row[j] = exp(row[j] - largest)
        inverse = np.float32(1 / row_sum(row))
        for j in range(row.size):
            row[j] *= inverse


@kernel
def softmax_backward(start, stop, output_grad, probabilities, queries, scale, lower, upper, input_grad):
    """Gradient of the scores of a masked softmax; `input_grad` may be `output_grad`."""
    keys = probabilities.shape[1]
    factor = np.float32(scale)
    for r in range(start, stop):
        first, last = visible_range(r % queries, keys, lower, upper)
        p = probabilities[r, first:last]
        g = output_grad[r, first:last]
        dot = np.float32(row_dot(p, g))
        d = input_grad[r, first:last]
        for j in range(p.size):
            d[j] = p[j] * (g[j] - dot) * factor
        fill(input_grad[r, :first], _ZERO)
        fill(input_grad[r, last:], _ZERO)
