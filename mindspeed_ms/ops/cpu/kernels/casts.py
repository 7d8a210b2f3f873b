"""Casts of bfloat16 bits to float32 and back."""

import numpy as np
from numba import types
from numba.extending import intrinsic

from mindspeed_ms.ops.cpu.compiler import inline, kernel


@intrinsic
def _bits_of_float(typing_context, value):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), generate


@intrinsic
def float_of_bits(typing_context, bits):
    """float32 of uint32 bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), generate


@inline
def float_of_bfloat16(bits):
    """float32 of the int16 bits of a bfloat16."""
    return float_of_bits(np.uint32(np.uint32(np.uint16(bits)) << np.uint32(16)))


@kernel
def widen_bfloat16(start, stop, bits, values):
    """Cast bfloat16 (int16 bits [n]) to float32 [n]."""
    for i in range(start, stop):
        values[i] = float_of_bfloat16(bits[i])


@kernel
def narrow_to_bfloat16(start, stop, values, bits):
    """Cast float32 [n] to bfloat16 (int16 bits [n]), rounded to nearest even; NaN stays a quiet NaN."""
    for i in range(start, stop):
        wide = _bits_of_float(values[i])
        odd = np.uint32((wide >> np.uint32(16)) & np.uint32(1))
        rounded = np.uint32(np.uint32(wide + np.uint32(0x7FFF) + odd) >> np.uint32(16))
        quiet = np.uint32((wide >> np.uint32(16)) | np.uint32(0x40))
        is_nan = np.uint32(wide & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        bits[i] = np.int16(np.uint16(quiet if is_nan else rounded))
