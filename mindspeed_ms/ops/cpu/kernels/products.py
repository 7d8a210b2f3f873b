"""Matrix product kernels: one thread's share of a linear layer; matrices are C-contiguous float32."""

from mindspeed_ms.ops.cpu.compiler import kernel
from mindspeed_ms.ops.cpu.kernels.blas import ITEM, address_of, multiply, multiply_transposed, transposed_multiply
from mindspeed_ms.ops.cpu.kernels.dots import COLUMNS, ROWS, dots_of_row, dots_of_rows
from mindspeed_ms.ops.cpu.vectors import prefetch


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
def linear_rows(start, stop, sgemm, x, weight, keep, y):
    """Linear product, rows `start` to `stop`, added to `keep` times what y holds; see `linear_columns`."""
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
        keep,
        address_of(y[start:]),
        y.shape[1],
    )


FEW_ROWS = 128
"""Up to so many tokens `linear_few` is faster than BLAS, which copies the weight into another order first."""


def _linear_few(start, stop, x, weight, y):
    """Linear product of few tokens; `start` and `stop` count groups of COLUMNS columns of y [tokens, out].

    Each weight, float32 or the bits of bfloat16 (int16), is read from memory once, and each element of y is summed in the same
    order whatever the number of tokens.
    """
    tokens, size = x.shape
    x_step, y_step, group_bytes = ITEM * size, ITEM * y.shape[1], COLUMNS * weight.itemsize * size
    share = group_bytes * ROWS // max(tokens, 1)
    for group in range(start, stop):
        first = group * COLUMNS
        count, following, column = min(COLUMNS, weight.shape[0] - first), address_of(weight[first:]), address_of(y[:, first:])
        following += group_bytes
        i = 0
        while i + ROWS <= tokens:
            prefetch(following + i // ROWS * share, share)
            dots_of_rows(address_of(x) + i * x_step, x_step, weight, first, count, column + i * y_step, y_step)
            i += ROWS
        while i < tokens:
            dots_of_row(address_of(x) + i * x_step, x_step, weight, first, count, column + i * y_step, y_step)
            i += 1


linear_few, linear_few_bfloat16 = kernel(_linear_few), kernel(_linear_few)  # one for each kind of weight


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
def input_grad_rows(start, stop, sgemm, output_grad, weight, keep, input_grad):
    """Input gradient, rows `start` to `stop`, added to `keep` times what it holds; see `input_grad_columns`."""
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
        keep,
        address_of(input_grad[start:]),
        input_grad.shape[1],
    )
