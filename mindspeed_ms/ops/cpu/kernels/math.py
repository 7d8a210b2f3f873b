"""Elementary functions and row reductions in float32 that compile to vector code, accurate to about 1e-7 relative.

The polynomials are minimax fits of our own: exp(r) = 1 + r + r^2 q(r) on |r| <= ln(2)/2 (error 3e-9), and the normal
distribution's tail Phi(-x) = exp(-x^2/2) t p(t) with t = 1 / (1 + 0.3 x) (relative error 4e-9 for 0 <= x <= 14) and its
centre Phi(x) = 1/2 + x c(x^2) for |x| <= 1.5 (relative error 3e-9), where the tail would lose two bits.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mindspeed_ms.ops.cpu.compiler import inline, reduction

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)  # few bits, so that n * _LN2_HIGH is exact
_LN2_LOW = np.float32(-2.12194440e-4)
_EXP_OVERFLOW = np.float32(88.3)  # above, 2^n would be infinite before the product
_EXP_UNDERFLOW = np.float32(-87.33)
_ONE = np.float32(1)
_HALF = np.float32(0.5)
_ZERO = np.float32(0)
_E0, _E1, _E2, _E3, _E4 = (np.float32(c) for c in (0.4999999305, 0.1666651479, 0.04166845685, 0.008369419269, 0.001381314256))
_P0, _P1, _P2, _P3, _P4, _P5, _P6, _P7, _P8, _P9 = (
    np.float32(c)
    for c in (
        0.1196866345,
        0.1195728336,
        0.1102273869,
        0.0784252891,
        0.09605865879,
        -0.079248862,
        0.1915834949,
        -0.22806884,
        0.1123763318,
        -0.0206129293,
    )
)
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = (
    np.float32(c)
    for c in (0.3989422793, -0.06649033503, 0.009973241309, -0.001186488491, 0.0001143563885, -8.718302965e-06, 4.115557977e-07)
)
_CENTRE_END = np.float32(1.5)
_TAIL_SLOPE = np.float32(0.3)
_TAIL_END = np.float32(14.0)
_INVERSE_SQRT_2PI = np.float32(0.3989422804014327)


@intrinsic
def _float_of_bits(typing_context, bits):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


def _flip_negative(builder, bits):
    integer = ir.IntType(32)
    sign = builder.ashr(bits, ir.Constant(integer, 31))
    return builder.xor(bits, builder.and_(sign, ir.Constant(integer, 0x7FFFFFFF)))


@intrinsic
def _ordered_bits(typing_context, value):
    """Integer that orders like the float; positive NaN comes out largest."""

    def generate(context, builder, signature, arguments):
        return _flip_negative(builder, builder.bitcast(arguments[0], ir.IntType(32)))

    return types.int32(types.float32), generate


@intrinsic
def _float_of_ordered_bits(typing_context, bits):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(_flip_negative(builder, arguments[0]), ir.FloatType())

    return types.float32(types.int32), generate


@inline
def row_maximum(row):
    """Largest element of a row, compared as integers because the compiler makes no vectors of float maxima."""
    largest = _ordered_bits(row[0])
    for j in range(row.size):
        largest = max(largest, _ordered_bits(row[j]))
    return _float_of_ordered_bits(largest)


@reduction
def row_sum(row):
    """Sum of a row in double precision."""
    total = 0.0
    for j in range(row.size):
        total += np.float64(row[j])
    return total


@reduction
def row_dot(a, b):
    """Sum of products of two rows in double precision."""
    total = 0.0
    for j in range(a.size):
        total += np.float64(a[j]) * np.float64(b[j])
    return total


@inline
def exp(x):
    """Exponential e^x; 0 below -87.33, the value at 88.3 above that (NaN stays NaN)."""
    clamped = max(min(x, _EXP_OVERFLOW), _EXP_UNDERFLOW)  # in this order of arguments NaN passes
    n = np.floor(clamped * _LOG2_E + _HALF)
    r = (clamped - n * _LN2_HIGH) - n * _LN2_LOW
    q = (((_E4 * r + _E3) * r + _E2) * r + _E1) * r + _E0
    power = _float_of_bits(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))
    y = (q * r * r + r + _ONE) * power
    return _ZERO if x < _EXP_UNDERFLOW else y


@inline
def sigmoid(x):
    """Sigmoid 1 / (1 + e^-x)."""
    return _ONE / (_ONE + exp(-x))


@inline
def normal_distribution(x):
    """Normal distribution Phi(x) = (1 + erf(x / sqrt(2))) / 2 and its derivative."""
    magnitude = min(abs(x), _TAIL_END)
    density = exp(-_HALF * magnitude * magnitude)
    t = _ONE / (_ONE + _TAIL_SLOPE * magnitude)
    p = ((((((((_P9 * t + _P8) * t + _P7) * t + _P6) * t + _P5) * t + _P4) * t + _P3) * t + _P2) * t + _P1) * t + _P0
    tail = density * p * t
    u = magnitude * magnitude
    centre = (((((_C6 * u + _C5) * u + _C4) * u + _C3) * u + _C2) * u + _C1) * u + _C0
    centre = _HALF - magnitude * centre
    below = centre if magnitude < _CENTRE_END else tail
    return (below if x < _ZERO else _ONE - below), density * _INVERSE_SQRT_2PI
