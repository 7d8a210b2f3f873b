"""Sums with double-precision accumulators, cut so that the result does not depend on the number of threads."""
import numpy as np

from mindspeed_ms.ops.cpu.compiler import kernel, reduction

BLOCK = 65536
"""Elements that one partial sum covers."""


@kernel
def column_sums(start, stop, x, sums):
    """Sums over the rows of columns `start` to `stop` of x [rows, n]."""
    total = np.zeros(stop - start, np.float64)
    for i in range(x.shape[0]):
        for j in range(stop - start):
            total[j] += np.float64(x[i, start + j])
    for j in range(stop - start):
        sums[start + j] = np.float32(total[j])


@reduction
def _square_sum(values):
    total = 0.0
    for i in range(values.size):
        total += np.float64(values[i]) * np.float64(values[i])
    return total


@kernel
def square_sums(start, stop, values, sums):
    """Sum of squares of each block of BLOCK elements of values [n]; sums [blocks] is float64."""
    for block in range(start, stop):
        sums[block] = _square_sum(values[block * BLOCK:(block + 1) * BLOCK])
