"""Reduction kernels with double-precision accumulators; the result does not depend on the number of threads."""

import numpy as np

from mindspeed_ms.ops.cpu.compiler import kernel
from mindspeed_ms.ops.cpu.kernels.math import row_dot

BLOCK = 65536
"""Elements that one partial sum covers."""


@kernel
def column_sums(start, stop, x, sums):
    """Sums over the rows of columns `start` to `stop` of x [rows, n]."""
    total = np.zeros(stop - start, np.float64)
    for i in range(x.shape[0]):
        values = x[i, start:stop]
        for j in range(total.size):
            total[j] += np.float64(values[j])
    target = sums[start:stop]
    for j in range(total.size):
        target[j] = np.float32(total[j])


@kernel
def square_sums(start, stop, values, sums):
    """Sum of squares of each block of BLOCK elements of values [n]; sums [blocks] is float64."""
    for block in range(start, stop):
        part = values[block * BLOCK : (block + 1) * BLOCK]
        sums[block] = row_dot(part, part)
