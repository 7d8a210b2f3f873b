"""Additive check sum: the sums of the parts of a tensor that ranks read add up to the sum of the whole tensor.

Multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014): with words x_i and odd 64-bit
weights w_i, the sum of x_i * w_i modulo 2**64. Words are a tensor's elements, those of 8 bytes as two of 4. One wrong word
is always found; wrong words escape together with a chance of about 2**-32. It guards against accidents, not against intent.
"""

import functools

import numpy as np

from mindspeed_ms.core.compiled import compiled

_BLOCK = 4096  # weights of a table; the next block multiplies them by a weight of its own
_compiled = functools.partial(compiled, room="checkpoint", nogil=True)


@functools.partial(_compiled, inline="always")
def _weight(number):
    """Odd pseudo-random number: the output function of SplitMix64 at `number + 1`."""
    bits = (np.uint64(number) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (bits ^ (bits >> np.uint64(31))) | np.uint64(1)


@_compiled
def _table():
    table = np.empty(_BLOCK, np.uint64)
    for number in range(_BLOCK):
        table[number] = _weight(number)
    return table


@_compiled
def _sum_of_runs(words, runs, table):
    total = np.uint64(0)
    for run in range(runs.shape[0]):
        position, offset, left = runs[run, 0], runs[run, 1], runs[run, 2]
        while left > 0:
            within = position % _BLOCK
            count = min(left, _BLOCK - within)
            part = np.uint64(0)
            some, weights = words[offset : offset + count], table[within : within + count]
            for i in range(count):
                part += np.uint64(some[i]) * weights[i]
            total += part * _weight(position // _BLOCK)
            position += count
            offset += count
            left -= count
    return total


@_compiled
def copy_runs(source, target, runs, first):
    """Copy runs of bytes between 1-D uint8 arrays.

    Args:
        runs (numpy.ndarray): int64 [n, 3]: (position in the source plus `first`, position in the target, bytes).
    """
    for run in range(runs.shape[0]):
        position, offset, count = runs[run, 0] - first, runs[run, 1], runs[run, 2]
        target[offset : offset + count] = source[position : position + count]


@functools.cache
def _weights():
    return _table()


def sum_of_runs(data, itemsize, runs):
    """Check sum contribution of runs of elements of a tensor; contributions add up modulo 2**64.

    Args:
        data (bytes-like): contiguous, aligned to its words.
        itemsize (int): bytes of an element: 1, 2, 4 or 8.
        runs (list or array of (int, int, int)): (position in the tensor, position in `data`, elements).

    Returns:
        int: 0 <= sum < 2**64.
    """
    word = min(itemsize, 4)
    words = np.frombuffer(data, np.dtype(f"u{word}"))
    return int(_sum_of_runs(words, np.asarray(runs, np.int64).reshape(-1, 3) * (itemsize // word), _weights()))


def to_text(value):
    """Check sum as 16 hexadecimal digits."""
    return f"{value % 2**64:016x}"
