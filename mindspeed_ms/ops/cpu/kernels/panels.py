"""Matrix product for many small matrices: both operands are copied into panels, their tiles kept in vector registers.

BLAS multiplies the few hundred rows of an expert at two thirds of its speed on large matrices: no cache holds the weight,
and BLAS waits for each part of it. Here the next part is fetched while a tile is computed.
"""

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mindspeed_ms.ops.cpu.compiler import inline
from mindspeed_ms.ops.cpu.kernels.blas import ITEM, address_of
from mindspeed_ms.ops.cpu.vectors import (
    HAS_MANY_REGISTERS,
    INT,
    LANES,
    LINE,
    NOTHING,
    NOWHERE,
    VECTOR,
    fetch,
    load_floats,
    masked_load,
    masked_store,
    masks,
    shuffle,
    spread,
)

_VECTORS = 2
ROWS = 12 if HAS_MANY_REGISTERS else 6
"""Rows of a tile: with its `COLUMNS` their sums fit into the registers."""
COLUMNS = _VECTORS * LANES
DEPTH = 256
"""Inner elements of a panel: a panel of `COLUMNS` stays in the first cache."""
_GROUP = 8
"""Panels that are fetched together: from each row of the matrix a kilobyte."""
_LINES = 4 * _GROUP * COLUMNS // LINE
_MOST_ROWS = 40 * ROWS
"""Rows whose panels stay in the second cache."""


@intrinsic
def _tile(typing_context, a, b, depth, c, c_step, rows, width, adds, c_next, ahead, ahead_step, lines, number, tiles):
    """c[i, j] (+)= sum over k of a[k, i] b[k, j] for `rows` (at most ROWS) and `width` (at most COLUMNS).

    Meanwhile the next tile of c is brought into the first cache, and a share of the next group of b into the second: the
    processor does not foresee rows that are far apart, and many loads at once hold up all others.

    Args:
        a, b, c: addresses; a [depth, ROWS] and b [depth, COLUMNS] are contiguous.
        c_step: bytes from row to row.
        adds: 1 to add to c, 0 to overwrite it.
        c_next: address of the next tile.
        ahead, ahead_step, lines: first row of the next group, bytes from row to row, and lines of a row that are used.
        number, tiles: number of this tile in its group, and tiles of the group.
    """

    def generate(context, builder, signature, arguments):
        a, b, depth, c, c_step, rows, width, adds, c_next, ahead, ahead_step, row_lines, number, tiles = arguments
        columns = masks(builder, width, _VECTORS)
        sums = [cgutils.alloca_once_value(builder, NOTHING) for _ in range(ROWS * _VECTORS)]

        def add_products(k):
            values, others = (builder.add(base, builder.mul(k, INT(4 * n))) for base, n in ((a, ROWS), (b, COLUMNS)))
            vectors = [load_floats(builder, builder.add(others, INT(4 * LANES * v)), LANES) for v in range(_VECTORS)]
            for i in range(ROWS):
                value = spread(builder, load_floats(builder, builder.add(values, INT(4 * i)), 1))
                for v, vector in enumerate(vectors):
                    sum_ = sums[i * _VECTORS + v]
                    product = builder.fmul(value, vector, flags=("contract",))
                    builder.store(builder.fadd(builder.load(sum_), product, flags=("contract",)), sum_)

        def share(total, part, parts):
            return builder.udiv(builder.mul(total, part), parts)

        lines, parts = builder.mul(depth, INT(_LINES)), builder.mul(tiles, INT(ROWS))
        with cgutils.for_range_slice(builder, INT(0), INT(ROWS), INT(1)) as (row, _):
            place, after = builder.add(c_next, builder.mul(row, c_step)), builder.add(row, INT(1))
            for line in range(-(-4 * COLUMNS // LINE) + 1):
                fetch(builder, builder.add(place, INT(LINE * line)), writes=True)
            part = builder.add(builder.mul(number, INT(ROWS)), row)
            first, last = share(lines, part, parts), share(lines, builder.add(part, INT(1)), parts)
            with cgutils.for_range_slice(builder, first, last, INT(1)) as (line, _):
                place = builder.mul(builder.udiv(line, row_lines), ahead_step)
                place = builder.add(place, builder.mul(builder.urem(line, row_lines), INT(LINE)))
                fetch(builder, builder.add(ahead, place), 2)
            begin, end = share(depth, row, INT(ROWS)), share(depth, after, INT(ROWS))
            with cgutils.for_range_slice(builder, begin, end, INT(1)) as (k, _):
                add_products(k)
        keeps = builder.icmp_signed("!=", adds, INT(0))
        for i in range(ROWS):
            row, exists = builder.add(c, builder.mul(INT(i), c_step)), builder.icmp_signed("<", INT(i), rows)
            for v, mask in enumerate(columns):
                place = builder.add(row, INT(4 * LANES * v))
                mask = builder.select(exists, mask, NOWHERE)
                before = masked_load(builder, place, builder.select(keeps, mask, NOWHERE))
                masked_store(builder, builder.fadd(builder.load(sums[i * _VECTORS + v]), before), place, mask)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 14), generate


def _column_copy(size):
    """Intrinsic: panel [depth, size] = `width` columns and zeros; addresses, `step` bytes from row to row of the source.

    The panel has room for whole vectors after its end.
    """
    vectors = -(-size // LANES)

    @intrinsic
    def copy(typing_context, source, step, depth, width, panel):
        def generate(context, builder, signature, arguments):
            source, step, depth, width, panel = arguments
            columns = masks(builder, width, vectors)
            with cgutils.for_range_slice(builder, INT(0), depth, INT(1)) as (k, _):
                row = builder.add(source, builder.mul(k, step))
                place = builder.add(panel, builder.mul(k, INT(4 * size)))
                for v, mask in enumerate(columns):  # what a vector writes too much the next row overwrites
                    target = builder.inttoptr(builder.add(place, INT(4 * LANES * v)), VECTOR.as_pointer())
                    builder.store(masked_load(builder, builder.add(row, INT(4 * LANES * v)), mask), target, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return copy


def _transposed(builder, rows):
    """Rows of a square of vectors -> its columns: each step interleaves the first half of the vectors with the second."""
    half = LANES // 2
    places = [[lane // 2 + start + lane % 2 * LANES for lane in range(LANES)] for start in (0, half)]
    for _ in range(LANES.bit_length() - 1):
        rows = [shuffle(builder, rows[i], rows[i + half], place) for i in range(half) for place in places]
    return rows


def _row_copy(size):
    """Intrinsic: panel [depth, size] = columns from `width` rows of `depth` elements; addresses, `step` bytes from row to row.

    The panel has room for `LANES` more rows; columns that are not there hold anything.
    """

    @intrinsic
    def copy(typing_context, source, step, depth, width, panel):
        def generate(context, builder, signature, arguments):
            source, step, depth, width, panel = arguments
            last = builder.sub(width, INT(1))
            with cgutils.for_range_slice(builder, INT(0), depth, INT(LANES)) as (k, _):
                (mask,) = masks(builder, builder.sub(depth, k))
                squares = []
                for start in range(0, size, LANES):
                    rows = []
                    for j in range(start, start + LANES):
                        if j >= size:
                            rows.append(NOTHING)
                            continue
                        row = builder.select(builder.icmp_signed("<", INT(j), width), INT(j), last)
                        place = builder.add(builder.add(source, builder.mul(row, step)), builder.mul(k, INT(4)))
                        rows.append(masked_load(builder, place, mask))
                    squares.append(_transposed(builder, rows))
                for i in range(LANES):  # what a vector writes too much the next row overwrites
                    place = builder.add(panel, builder.mul(builder.add(k, INT(i)), INT(4 * size)))
                    for v, columns in enumerate(squares):
                        target = builder.inttoptr(builder.add(place, INT(4 * LANES * v)), VECTOR.as_pointer())
                        builder.store(columns[i], target, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return copy


_copy_columns, _copy_rows = _column_copy(COLUMNS), _row_copy(COLUMNS)
_copy_columns_of_tile, _copy_rows_of_tile = _column_copy(ROWS), _row_copy(ROWS)


@inline
def add_product(a, b, c, adds, is_transposed):
    """c [m, n] = a [m, k] b [k, n], or a b^T with b [n, k] if `is_transposed`; added to c if `adds`.

    Rows or columns of `a` are contiguous, and rows of b and c.
    """
    m, size, n = a.shape[0], a.shape[1], c.shape[1]
    most = min(_MOST_ROWS, (m + ROWS - 1) // ROWS * ROWS)
    depth = min(DEPTH, (size + LANES - 1) // LANES * LANES)
    tiles = np.empty(most * depth + LANES * (ROWS + 1), np.float32)
    panel = np.empty((depth + 1) * COLUMNS, np.float32)
    for first in range(0, m, most):
        rows = min(most, m - first)
        for start in range(0, size, DEPTH):
            length = min(DEPTH, size - start)
            for i in range(0, rows, ROWS):
                place, source = address_of(tiles) + ITEM * i * length, address_of(a[first + i :, start:])
                if a.strides[1] == ITEM:
                    _copy_rows_of_tile(source, a.strides[0], length, min(ROWS, rows - i), place)
                else:
                    _copy_columns_of_tile(source, a.strides[1], length, min(ROWS, rows - i), place)
            tiles_of_group = _GROUP * ((rows + ROWS - 1) // ROWS)
            lines = max(ITEM * length // LINE, 1) if is_transposed else _LINES
            for group in range(0, n, _GROUP * COLUMNS):
                following, number = group + _GROUP * COLUMNS, 0
                if following < n:
                    ahead = address_of(b[following:, start:] if is_transposed else b[start:, following:])
                else:
                    ahead = address_of(b[:, start + DEPTH :] if is_transposed else b[start + DEPTH :])
                for j in range(group, min(n, following), COLUMNS):
                    width = min(COLUMNS, n - j)
                    if is_transposed:
                        _copy_rows(address_of(b[j:, start:]), b.strides[0], length, width, address_of(panel))
                    else:
                        _copy_columns(address_of(b[start:, j:]), b.strides[0], length, width, address_of(panel))
                    for i in range(0, rows, ROWS):
                        is_last = i + ROWS >= rows
                        _tile(
                            address_of(tiles) + ITEM * i * length,
                            address_of(panel),
                            length,
                            address_of(c[first + i :, j:]),
                            c.strides[0],
                            min(ROWS, rows - i),
                            width,
                            1 if adds or start else 0,
                            address_of(c[first:, j + COLUMNS :] if is_last else c[first + i + ROWS :, j:]),
                            ahead,
                            b.strides[0],
                            lines,
                            number,
                            tiles_of_group,
                        )
                        number += 1
