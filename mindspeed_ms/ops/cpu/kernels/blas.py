"""Matrix products inside kernels: SciPy's BLAS, called through its address, on matrices with any row distance.

SciPy publishes its BLAS to compiled code (`scipy.linalg.cython_blas`), and MindSpore requires SciPy. The address is an
argument of the kernel, because machine code kept on disk must not contain addresses of this process.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mindspeed_ms.ops.cpu.compiler import inline

_NO = 78  # "N"
_YES = 84  # "T"
ITEM = 4
"""Bytes of an element, for arithmetic with addresses."""


@intrinsic
def address_of(typing_context, array):
    """Address of an array's first element."""

    def generate(context, builder, signature, arguments):
        structure = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.ptrtoint(structure.data, ir.IntType(64))

    return types.int64(array), generate


@inline
def place(array, i, b, head):
    """Address of the vector array[i, b, head] of a contiguous array [s, b, n, d]."""
    return address_of(array) + ITEM * (((i * array.shape[1] + b) * array.shape[2] + head) * array.shape[3])


@intrinsic
def _sgemm(typing_context, function, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
    """Fortran sgemm at the address `function`; matrices are addresses."""
    signature = types.void(
        types.int64,
        types.int64,
        types.int64,
        types.int64,
        types.int64,
        types.int64,
        types.float32,
        types.int64,
        types.int64,
        types.int64,
        types.int64,
        types.float32,
        types.int64,
        types.int64,
    )

    def generate(context, builder, signature, arguments):
        function, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc = arguments
        char, integer, real = ir.IntType(8), ir.IntType(32), ir.FloatType()

        def reference(value, kind):
            slot = cgutils.alloca_once(builder, kind)
            builder.store(builder.trunc(value, kind) if isinstance(kind, ir.IntType) else value, slot)
            return slot

        def matrix(address):
            return builder.inttoptr(address, real.as_pointer())

        values = [
            reference(trans_a, char),
            reference(trans_b, char),
            reference(m, integer),
            reference(n, integer),
            reference(k, integer),
            reference(alpha, real),
            matrix(a),
            reference(lda, integer),
            matrix(b),
            reference(ldb, integer),
            reference(beta, real),
            matrix(c),
            reference(ldc, integer),
        ]
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        builder.call(builder.inttoptr(function, kind.as_pointer()), values)
        return context.get_dummy_value()

    return signature, generate


# Row-major C[m, n] is Fortran's C^T[n, m] = op(B)^T op(A)^T, so the operands change places.


@inline
def multiply(sgemm, m, n, k, alpha, a, a_step, b, b_step, beta, c, c_step):
    """C[m, n] = alpha A[m, k] B[k, n] + beta C; matrices are addresses of row-major float32 with the distance of
    rows.
    """
    _sgemm(sgemm, _NO, _NO, n, m, k, np.float32(alpha), b, b_step, a, a_step, np.float32(beta), c, c_step)


@inline
def multiply_transposed(sgemm, m, n, k, alpha, a, a_step, b, b_step, beta, c, c_step):
    """C[m, n] = alpha A[m, k] B^T + beta C with B[n, k]."""
    _sgemm(sgemm, _YES, _NO, n, m, k, np.float32(alpha), b, b_step, a, a_step, np.float32(beta), c, c_step)


@inline
def transposed_multiply(sgemm, m, n, k, alpha, a, a_step, b, b_step, beta, c, c_step):
    """C[m, n] = alpha A^T B[k, n] + beta C with A[k, m]."""
    _sgemm(sgemm, _NO, _YES, n, m, k, np.float32(alpha), b, b_step, a, a_step, np.float32(beta), c, c_step)
