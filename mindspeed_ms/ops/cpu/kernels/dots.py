"""Tile of dot products of some rows with some others in vector registers, each summed in one order whatever the tile is."""

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mindspeed_ms.ops.cpu.vectors import (
    HAS_MANY_REGISTERS,
    INT,
    LANES,
    NOTHING,
    load_floats,
    masked_load,
    masked_store,
    masks,
    shuffle,
)

COLUMNS = 6 if HAS_MANY_REGISTERS else 4
"""Rows of the weight in a tile: with `ROWS` of the input their sums fit into the registers."""
ROWS = 4 if HAS_MANY_REGISTERS else 2


def _tile(rows):
    @intrinsic
    def dots(typing_context, x, x_step, weight, first, count, y, y_step):
        """y[i, j] = x[i] . weight[first + j] for `rows` rows and `count` (at most COLUMNS) columns.

        Args:
            x, y: addresses of the first element of the rows.
            x_step, y_step: bytes from row to row.
            weight: array [out, in], float32, or int16 with the bits of bfloat16.
        """
        is_bits = weight.dtype == types.int16

        def generate(context, builder, signature, arguments):
            x, x_step, weight, first, count, y, y_step = arguments
            matrix = context.make_array(signature.args[2])(context, builder, weight)
            step, size = builder.extract_value(matrix.strides, 0), builder.extract_value(matrix.shape, 1)
            column = builder.add(builder.ptrtoint(matrix.data, INT), builder.mul(first, step))
            last = builder.sub(count, INT(1))
            # the sums of columns that are not there are those of the last one
            numbers = [builder.select(builder.icmp_signed("<", INT(j), count), INT(j), last) for j in range(COLUMNS)]
            row_places = [builder.add(x, builder.mul(x_step, INT(i))) for i in range(rows)]
            column_places = [builder.add(column, builder.mul(step, number)) for number in numbers]
            totals = _lane_sums(builder, _sums(builder, row_places, column_places, size, is_bits))
            parts = range(0, COLUMNS, LANES)
            exists = masks(builder, count, len(parts))
            for row in range(rows):
                place = builder.add(y, builder.mul(y_step, INT(row)))
                for start, mask in zip(parts, exists):
                    lanes = [row * COLUMNS + start + lane for lane in range(min(LANES, COLUMNS - start))]
                    masked_store(builder, _gathered(builder, totals, lanes), builder.add(place, INT(4 * start)), mask)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, weight, *[types.int64] * 4), generate

    return dots


def _sums(builder, rows, columns, size, is_bits):
    """Vectors whose elements add up to the dot products of all rows with all columns, given by their addresses."""
    sums = [cgutils.alloca_once_value(builder, NOTHING) for _ in range(len(rows) * len(columns))]

    def add_products(offset, load):
        start, column_start = builder.mul(offset, INT(4)), builder.mul(offset, INT(2 if is_bits else 4))
        others = [load(builder.add(address, column_start), is_bits) for address in columns]
        for number, address in enumerate(rows):
            values = load(builder.add(address, start), False)
            for sum_, other in zip(sums[number * len(columns) :], others):
                product = builder.fmul(values, other, flags=("contract",))
                builder.store(builder.fadd(builder.load(sum_), product, flags=("contract",)), sum_)

    rest = builder.urem(size, INT(LANES))
    whole = builder.sub(size, rest)
    with cgutils.for_range_slice(builder, INT(0), whole, INT(LANES)) as (offset, _):
        add_products(offset, lambda place, is_bits: load_floats(builder, place, LANES, is_bits))
    with builder.if_then(builder.icmp_signed(">", rest, INT(0)), likely=False):
        (mask,) = masks(builder, rest)
        add_products(whole, lambda place, is_bits: masked_load(builder, place, mask, is_bits))
    return [builder.load(sum_) for sum_ in sums]


def _lane_sums(builder, vectors):
    """Vectors that hold the sum of the lanes of each vector, in their order: pairs are folded into one again and again."""
    width = LANES
    while width > 1:
        half, folded = width // 2, []
        first = [lane for start in range(0, 2 * LANES, width) for lane in range(start, start + half)]
        second = [lane + half for lane in first]
        for number in range(0, len(vectors), 2):
            a, b = vectors[number], vectors[min(number + 1, len(vectors) - 1)]
            folded.append(builder.fadd(shuffle(builder, a, b, first), shuffle(builder, a, b, second)))
        vectors, width = folded, half
    return vectors


def _gathered(builder, vectors, lanes):
    """Vector of some of the lanes of the row of vectors, which at most two of them hold."""
    first, last = lanes[0] // LANES, lanes[-1] // LANES
    lanes = [lane - first * LANES for lane in lanes]
    return shuffle(builder, vectors[first], vectors[last], lanes + [0] * (LANES - len(lanes)))


dots_of_rows, dots_of_row = _tile(ROWS), _tile(1)
