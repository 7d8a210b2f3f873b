"""Matrix product kernels: one thread's share of a linear layer; matrices are C-contiguous float32."""

import numpy as np

from mindspeed_ms.ops.cpu.compiler import kernel, reduction
from mindspeed_ms.ops.cpu.kernels.blas import address_of, multiply, multiply_transposed, transposed_multiply
from mindspeed_ms.ops.cpu.kernels.casts import float_of_bfloat16


@kernel
def linear_columns(start, stop, sgemm, x, weight, y):
    """Linear product, columns `start` to `stop` of y [tokens, out] = x [tokens, in] weight [out, in]^T."""
    multiply_transposed(
        sgemm,
        x.shape[0],
        stop - start,
        x.shape[1],
        1.0,
        address_of(x),
        x.shape[1],
        address_of(weight[start:]),
        weight.shape[1],
        0.0,
        address_of(y[:, start:]),
        y.shape[1],
    )


@kernel
def linear_rows(start, stop, sgemm, x, weight, y):
    """Linear product, rows `start` to `stop`; see `linear_columns`."""
    multiply_transposed(
        sgemm,
        stop - start,
        weight.shape[0],
        x.shape[1],
        1.0,
        address_of(x[start:]),
        x.shape[1],
        address_of(weight),
        weight.shape[1],
        0.0,
        address_of(y[start:]),
        y.shape[1],
    )


@kernel
def add_linear_rows(start, stop, sgemm, x, weight, y):
    """Rows `start` to `stop` of y [tokens, out] += x [tokens, in] weight [out, in]^T."""
    multiply_transposed(
        sgemm,
        stop - start,
        weight.shape[0],
        x.shape[1],
        1.0,
        address_of(x[start:]),
        x.shape[1],
        address_of(weight),
        weight.shape[1],
        1.0,
        address_of(y[start:]),
        y.shape[1],
    )


FEW_ROWS = 8
"""Up to so many tokens `linear_few` is faster than BLAS, which copies the weight into another order first."""
COLUMNS = 4
"""Columns of y that `linear_few` computes together."""


@reduction
def _four_dots(x, w0, w1, w2, w3):
    a = b = c = d = np.float32(0)
    for k in range(x.size):
        a += x[k] * w0[k]
        b += x[k] * w1[k]
        c += x[k] * w2[k]
        d += x[k] * w3[k]
    return a, b, c, d


@reduction
def _four_dots_of_bits(x, w0, w1, w2, w3):
    """As `_four_dots`, with rows of bfloat16 bits (int16)."""
    a = b = c = d = np.float32(0)
    for k in range(x.size):
        a += x[k] * float_of_bfloat16(w0[k])
        b += x[k] * float_of_bfloat16(w1[k])
        c += x[k] * float_of_bfloat16(w2[k])
        d += x[k] * float_of_bfloat16(w3[k])
    return a, b, c, d


@kernel
def linear_few(start, stop, x, weight, y):
    """Linear product of few tokens; `start` and `stop` count groups of COLUMNS columns of y [tokens, out].

    Each weight is read from memory once, and each element of y is summed in the same order whatever the number of tokens.
    """
    last = weight.shape[0] - 1
    for group in range(start, stop):
        j = group * COLUMNS
        w0, w1, w2, w3 = weight[j], weight[min(j + 1, last)], weight[min(j + 2, last)], weight[min(j + 3, last)]
        for i in range(x.shape[0]):
            a, b, c, d = _four_dots(x[i], w0, w1, w2, w3)
            y[i, j] = a
            y[i, min(j + 1, last)] = b
            y[i, min(j + 2, last)] = c
            y[i, min(j + 3, last)] = d


@kernel
def linear_few_bfloat16(start, stop, x, bits, y):
    """`linear_few` with a weight of bfloat16 bits (int16 [out, in])."""
    last = bits.shape[0] - 1
    for group in range(start, stop):
        j = group * COLUMNS
        w0, w1, w2, w3 = bits[j], bits[min(j + 1, last)], bits[min(j + 2, last)], bits[min(j + 3, last)]
        for i in range(x.shape[0]):
            a, b, c, d = _four_dots_of_bits(x[i], w0, w1, w2, w3)
            y[i, j] = a
            y[i, min(j + 1, last)] = b
            y[i, min(j + 2, last)] = c
            y[i, min(j + 3, last)] = d


@kernel
def weight_grad_rows(start, stop, sgemm, output_grad, x, keep, weight_grad):
    """Rows `start` to `stop` of weight_grad [out, in] = keep * weight_grad + output_grad [tokens, out]^T x [tokens,
    in].
    """
    transposed_multiply(
        sgemm,
        stop - start,
        x.shape[1],
        x.shape[0],
        1.0,
        address_of(output_grad[:, start:]),
        output_grad.shape[1],
        address_of(x),
        x.shape[1],
        keep,
        address_of(weight_grad[start:]),
        weight_grad.shape[1],
    )


@kernel
def input_grad_columns(start, stop, sgemm, output_grad, weight, input_grad):
    """Input gradient, columns `start` to `stop` of [tokens, in] = output_grad [tokens, out] weight [out, in]."""
    multiply(
        sgemm,
        output_grad.shape[0],
        stop - start,
        weight.shape[0],
        1.0,
        address_of(output_grad),
        output_grad.shape[1],
        address_of(weight[:, start:]),
        weight.shape[1],
        0.0,
        address_of(input_grad[:, start:]),
        input_grad.shape[1],
    )


@kernel
def input_grad_rows(start, stop, sgemm, output_grad, weight, input_grad):
    """Input gradient, rows `start` to `stop`; see `input_grad_columns`."""
    multiply(
        sgemm,
        stop - start,
        weight.shape[1],
        weight.shape[0],
        1.0,
        address_of(output_grad[start:]),
        output_grad.shape[1],
        address_of(weight),
        weight.shape[1],
        0.0,
        address_of(input_grad[start:]),
        input_grad.shape[1],
    )
