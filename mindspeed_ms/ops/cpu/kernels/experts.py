"""Kernels of a mixture of experts: one thread's share of products grouped by expert, weighted rows, the largest elements.

The rows of expert e are `starts[e]` to `starts[e + 1]`. A product's tile is one expert's rows and one of `parts` equal
ranges of columns; tile t belongs to expert t // parts.
"""

import numpy as np

from mindspeed_ms.ops.cpu.compiler import inline, kernel
from mindspeed_ms.ops.cpu.kernels.math import row_dot
from mindspeed_ms.ops.cpu.kernels.panels import add_product

_ZERO = np.float32(0)
FEW_ROWS = 4
"""Up to so many rows a loop over the weight is faster than a product that copies it into panels first."""


@inline
def _range_of(tile, parts, columns):
    part = tile % parts
    return part * columns // parts, (part + 1) * columns // parts


@kernel
def grouped_forward(start, stop, x, weight, starts, parts, y):
    """Tiles of y [rows, out] = x [rows, in] weight [experts, in, out]."""
    for tile in range(start, stop):
        expert = tile // parts
        first, last = starts[expert], starts[expert + 1]
        left, right = _range_of(tile, parts, weight.shape[2])
        if last == first:
            continue
        if last - first <= FEW_ROWS:
            for i in range(first, last):
                target = y[i, left:right]
                for j in range(target.size):
                    target[j] = _ZERO
            for k in range(x.shape[1]):
                row = weight[expert, k, left:right]
                for i in range(first, last):
                    target, factor = y[i, left:right], x[i, k]
                    for j in range(target.size):
                        target[j] += factor * row[j]
            continue
        add_product(x[first:last], weight[expert, :, left:right], y[first:last, left:right], False, False)


@kernel
def grouped_input_grad(start, stop, output_grad, weight, starts, parts, input_grad):
    """Tiles of input_grad [rows, in] = output_grad [rows, out] weight [experts, in, out]^T."""
    for tile in range(start, stop):
        expert = tile // parts
        first, last = starts[expert], starts[expert + 1]
        left, right = _range_of(tile, parts, weight.shape[1])
        if last == first:
            continue
        add_product(output_grad[first:last], weight[expert, left:right], input_grad[first:last, left:right], False, True)


@kernel
def grouped_weight_grad(start, stop, output_grad, x, starts, parts, keep, weight_grad):
    """Tiles of weight_grad [experts, in, out] (+)= x [rows, in]^T output_grad [rows, out], added if `keep`."""
    for tile in range(start, stop):
        expert = tile // parts
        first, last = starts[expert], starts[expert + 1]
        left, right = _range_of(tile, parts, weight_grad.shape[1])
        if last == first:
            if not keep:
                weight_grad[expert, left:right] = _ZERO
            continue
        add_product(x[first:last, left:right].T, output_grad[first:last], weight_grad[expert, left:right], keep, False)


@kernel
def scatter_weighted_rows(start, stop, x, order, probs, output):
    """Columns `start` to `stop` of output [tokens, h]: zero, then x [rows, h] times probs [rows] in the order of the rows."""
    for token in range(output.shape[0]):
        target = output[token, start:stop]
        for j in range(target.size):
            target[j] = _ZERO
    for i in range(order.size):
        target, source, factor = output[order[i], start:stop], x[i, start:stop], probs[i]
        for j in range(target.size):
            target[j] += source[j] * factor


@kernel
def gather_weighted_rows(start, stop, output_grad, order, probs, x_grad):
    """Rows of x_grad [rows, h] = output_grad [tokens, h] of their token, times probs [rows]."""
    for i in range(start, stop):
        source, target, factor = output_grad[order[i]], x_grad[i], probs[i]
        for j in range(target.size):
            target[j] = source[j] * factor


@kernel
def dots_of_rows(start, stop, output_grad, order, x, probs_grad):
    """Gradients of probs [rows]: dot of each row of x [rows, h] with output_grad [tokens, h] of its token."""
    for i in range(start, stop):
        probs_grad[i] = row_dot(output_grad[order[i]], x[i])


@kernel
def largest(start, stop, x, values, indices):
    """The k largest elements of rows of x [rows, n], descending, the lower index first: values and indices [rows, k]."""
    k = values.shape[1]
    for i in range(start, stop):
        row, best, places = x[i], values[i], indices[i]
        for j in range(row.size):
            value = row[j]
            if j >= k and not value > best[k - 1]:
                continue
            place = min(j, k - 1)
            while place > 0 and value > best[place - 1]:
                best[place] = best[place - 1]
                places[place] = places[place - 1]
                place -= 1
            best[place] = value
            places[place] = j
