"""Tile of dot products of some rows with some others in vector registers, each summed in one order whatever the tile is."""

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_FEATURES = llvm.get_host_cpu_features()
_HAS_WIDE_VECTORS = bool(_FEATURES.get("avx512f"))
_LANES = 16 if _HAS_WIDE_VECTORS else 8 if _FEATURES.get("avx") else 4
COLUMNS = 6 if _HAS_WIDE_VECTORS or not _FEATURES.get("avx") else 4
"""Rows of the second matrix in a tile: with `ROWS` of the first their sums fit into the registers."""
ROWS = 4 if _HAS_WIDE_VECTORS or not _FEATURES.get("avx") else 2
_INT, _FLOAT = ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, _LANES)


def _load(builder, address, offset, width, is_bits):
    """`width` elements from the row at an address on, as float32; `is_bits`: bfloat16."""
    half = ir.IntType(16)
    element = half if is_bits else _FLOAT
    kind, wide, real = (element, ir.IntType(32), _FLOAT)
    if width > 1:
        kind, wide, real = (ir.VectorType(part, width) for part in (element, ir.IntType(32), _FLOAT))
    place = builder.add(address, builder.mul(offset, _INT(2 if is_bits else 4)))
    values = builder.load(builder.inttoptr(place, kind.as_pointer()), align=2 if is_bits else 4)
    if not is_bits:
        return values
    shift = wide(16) if width == 1 else ir.Constant(wide, [16] * width)
    return builder.bitcast(builder.shl(builder.zext(values, wide), shift), real)


def _add_products(builder, sums, rows, columns, offset, width, is_bits):
    """Add the products of `width` elements of each row and column to their sums."""
    others = [_load(builder, address, offset, width, is_bits) for address in columns]
    for number, address in enumerate(rows):
        values = _load(builder, address, offset, width, False)
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
            last = builder.sub(count, _INT(1))
            # the sums of columns that are not there are those of the last one
            numbers = [builder.select(builder.icmp_signed("<", _INT(j), count), _INT(j), last) for j in range(COLUMNS)]
            row_places = [builder.add(x, builder.mul(x_step, _INT(i))) for i in range(rows)]
            column_places = [builder.add(weight, builder.mul(weight_step, number)) for number in numbers]
            sums = _sums(builder, row_places, column_places, size, is_bits)
            for place, total in enumerate(sums):
                row, column = divmod(place, COLUMNS)
                offset = builder.add(builder.mul(y_step, _INT(row)), builder.mul(numbers[column], _INT(4)))
                builder.store(builder.load(total), builder.inttoptr(builder.add(y, offset), _FLOAT.as_pointer()))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return dots


def _sums(builder, rows, columns, size, is_bits):
    """Places with the dot products of all rows with all columns, given by their addresses."""
    sums = [cgutils.alloca_once(builder, _VECTOR) for _ in range(len(rows) * len(columns))]
    for sum_ in sums:
        builder.store(ir.Constant(_VECTOR, [0.0] * _LANES), sum_)
    whole = builder.sub(size, builder.urem(size, _INT(_LANES)))
    with cgutils.for_range_slice(builder, _INT(0), whole, _INT(_LANES)) as (offset, _):
        _add_products(builder, sums, rows, columns, offset, _LANES, is_bits)
    kind = ir.FunctionType(_FLOAT, [_FLOAT, _VECTOR])
    reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{_LANES}f32")
    totals = [cgutils.alloca_once(builder, _FLOAT) for _ in sums]
    for sum_, total in zip(sums, totals):
        builder.store(builder.call(reduce, [_FLOAT(-0.0), builder.load(sum_)], fastmath=("reassoc",)), total)
    with cgutils.for_range_slice(builder, whole, size, _INT(1)) as (offset, _):
        _add_products(builder, totals, rows, columns, offset, 1, is_bits)
    return totals


dots_of_rows, dots_of_row = _tile(ROWS, False), _tile(1, False)
bit_dots_of_rows, bit_dots_of_row = _tile(ROWS, True), _tile(1, True)
"""The same where the weight is bfloat16 bits."""
