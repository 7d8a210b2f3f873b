"""Vectors of the processor that kernels are compiled on, for tiles that are written in its terms."""

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_FEATURES = llvm.get_host_cpu_features()
LANES = 16 if _FEATURES.get("avx512f") else 8 if _FEATURES.get("avx") else 4
"""float32 numbers of a vector."""
HAS_MANY_REGISTERS = bool(_FEATURES.get("avx512f")) or not _FEATURES.get("avx")
"""32 vector registers (AVX-512, NEON), else 16."""
LINE = 64
"""Bytes of a cache line."""
INT, FLOAT = ir.IntType(64), ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)


def load_floats(builder, place, width, is_bits=False):
    """`width` elements at an address as float32; `is_bits`: they are bfloat16."""
    element, wide, real = ir.IntType(16) if is_bits else FLOAT, ir.IntType(32), FLOAT
    if width > 1:
        element, wide, real = (ir.VectorType(kind, width) for kind in (element, wide, real))
    values = builder.load(builder.inttoptr(place, element.as_pointer()), align=2 if is_bits else 4)
    if not is_bits:
        return values
    shift = wide(16) if width == 1 else ir.Constant(wide, [16] * width)
    return builder.bitcast(builder.shl(builder.zext(values, wide), shift), real)


def fetch(builder, address, cache=1, writes=False):
    """Have the line at an address loaded into the first or second cache, to be written with `writes`."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, byte), number(int(writes)), number(4 - cache), number(1)])


@intrinsic
def prefetch(typing_context, address, size):
    """Have `size` bytes from an address on loaded into the second cache; any address may be given."""

    def generate(context, builder, signature, arguments):
        with cgutils.for_range_slice(builder, INT(0), arguments[1], INT(LINE)) as (offset, _):
            fetch(builder, builder.add(arguments[0], offset), 2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
