"""Tile of dot products of some rows with some others in vector registers, each summed in one order whatever the tile is."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mindspeed_ms.ops.cpu.vectors import FLOAT, HAS_MANY_REGISTERS, INT, LANES, VECTOR, load_floats

COLUMNS = 6 if HAS_MANY_REGISTERS else 4
"""Rows of the weight in a tile: with `ROWS` of the input their sums fit into the registers."""
ROWS = 4 if HAS_MANY_REGISTERS else 2


def _add_products(builder, sums, rows, columns, offset, width, is_bits):
    """Add the products of `width` elements of each row and column to their sums."""
    start, column_start = builder.mul(offset, INT(4)), builder.mul(offset, INT(2 if is_bits else 4))
    others = [load_floats(builder, builder.add(address, column_start), width, is_bits) for address in columns]
    for number, address in enumerate(rows):
        values = load_floats(builder, builder.add(address, start), width)
        for sum_, other in zip(sums[number * len(columns) :], others):
            product = builder.fmul(values, other, flags=("contract",))
            builder.store(builder.fadd(builder.load(sum_), product, flags=("contract",)), sum_)


def _tile(rows, is_bits):
    @intrinsic
    def dots(typing_context, x, x_step, weight, weight_step, size, y, y_step, count):
        """y[i, j] = x[i] . weight[j] for `rows` rows and `count` (at most COLUMNS) columns.

        Args:
            x, weight, y: addresses of the first element.
            x_step, weight_step, y_step: bytes from row to row.
            size: elements of a row of x and weight.
        """

        def generate(context, builder, signature, arguments):
            x, x_step, weight, weight_step, size, y, y_step, count = arguments
            last = builder.sub(count, INT(1))
            # the sums of columns that are not there are those of the last one
            numbers = [builder.select(builder.icmp_signed("<", INT(j), count), INT(j), last) for j in range(COLUMNS)]
            row_places = [builder.add(x, builder.mul(x_step, INT(i))) for i in range(rows)]
            column_places = [builder.add(weight, builder.mul(weight_step, number)) for number in numbers]
            sums = _sums(builder, row_places, column_places, size, is_bits)
            for place, total in enumerate(sums):
                row, column = divmod(place, COLUMNS)
                offset = builder.add(builder.mul(y_step, INT(row)), builder.mul(numbers[column], INT(4)))
                builder.store(builder.load(total), builder.inttoptr(builder.add(y, offset), FLOAT.as_pointer()))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return dots


def _sums(builder, rows, columns, size, is_bits):
    """Places with the dot products of all rows with all columns, given by their addresses."""
    sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(len(rows) * len(columns))]
    for sum_ in sums:
        builder.store(ir.Constant(VECTOR, [0.0] * LANES), sum_)
    whole = builder.sub(size, builder.urem(size, INT(LANES)))
    with cgutils.for_range_slice(builder, INT(0), whole, INT(LANES)) as (offset, _):
        _add_products(builder, sums, rows, columns, offset, LANES, is_bits)
    kind = ir.FunctionType(FLOAT, [FLOAT, VECTOR])
    reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{LANES}f32")
    totals = [cgutils.alloca_once(builder, FLOAT) for _ in sums]
    for sum_, total in zip(sums, totals):
        builder.store(builder.call(reduce, [FLOAT(-0.0), builder.load(sum_)], fastmath=("reassoc",)), total)
    with cgutils.for_range_slice(builder, whole, size, INT(1)) as (offset, _):
        _add_products(builder, totals, rows, columns, offset, 1, is_bits)
    return totals


dots_of_rows, dots_of_row = _tile(ROWS, False), _tile(1, False)
bit_dots_of_rows, bit_dots_of_row = _tile(ROWS, True), _tile(1, True)
"""The same where the weight is bfloat16 bits."""
