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
NOTHING = ir.Constant(VECTOR, [0.0] * LANES)
_BITS = ir.VectorType(ir.IntType(1), LANES)
NOWHERE = ir.Constant(_BITS, [0] * LANES)
"""Mask of no lane."""


def load_floats(builder, place, width, is_bits=False):
    """`width` elements at an address as float32: a number if it is 1, else a vector; `is_bits`: they are bfloat16."""
    element = ir.IntType(16) if is_bits else FLOAT
    kind = ir.VectorType(element, width) if width > 1 else element
    values = builder.load(builder.inttoptr(place, kind.as_pointer()), align=2 if is_bits else 4)
    return _widened(builder, values) if is_bits else values


def _widened(builder, bits):
    """float32 vector of a vector of bfloat16 bits."""
    wide = ir.VectorType(ir.IntType(32), bits.type.count)
    shift = ir.Constant(wide, [16] * bits.type.count)
    return builder.bitcast(builder.shl(builder.zext(bits, wide), shift), ir.VectorType(FLOAT, bits.type.count))


def masks(builder, width, vectors=1):
    """Masks of the vectors of a row of which the first `width` elements exist."""
    lanes, wanted = ir.VectorType(INT, LANES), spread(builder, width)
    places = [ir.Constant(lanes, [LANES * v + lane for lane in range(LANES)]) for v in range(vectors)]
    return [builder.icmp_signed("<", place, wanted) for place in places]


def spread(builder, value):
    """Vector of one value."""
    nothing = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    return shuffle(builder, builder.insert_element(nothing, value, ir.IntType(32)(0)), nothing, [0] * LANES)


def shuffle(builder, first, second, lanes):
    """Vector of the lanes with these numbers of two vectors, one behind the other."""
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))


def masked_load(builder, place, mask, is_bits=False):
    """Elements of the mask at an address as a float32 vector, 0 elsewhere; `is_bits`: they are bfloat16."""
    element, name = (ir.IntType(16), "i16") if is_bits else (FLOAT, "f32")
    vector = ir.VectorType(element, LANES)
    kind = ir.FunctionType(vector, [vector.as_pointer(), ir.IntType(32), _BITS, vector])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.v{LANES}{name}.p0")
    place, align = builder.inttoptr(place, vector.as_pointer()), ir.IntType(32)(2 if is_bits else 4)
    values = builder.call(function, [place, align, mask, ir.Constant(vector, [0] * LANES)])
    return _widened(builder, values) if is_bits else values


def masked_store(builder, values, place, mask):
    """Write the elements of the mask to an address."""
    pointer, number = VECTOR.as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [VECTOR, pointer, number, _BITS])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.store.v{LANES}f32.p0")
    builder.call(function, [values, builder.inttoptr(place, pointer), number(4), mask])


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
