"""Matrix product kernels: one thread's share of a linear layer; matrices are C-contiguous float32."""

from mindspeed_ms.ops.cpu.compiler import kernel
from mindspeed_ms.ops.cpu.kernels.blas import address_of, multiply, multiply_transposed, transposed_multiply


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
