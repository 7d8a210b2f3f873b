"""CPU forms of dropout and residual additions."""

import numpy as np

from mindspeed_ms.core.autograd import Function
from mindspeed_ms.ops import checks
from mindspeed_ms.ops.cpu import threads
from mindspeed_ms.ops.cpu.arrays import bytes_of, column_sums, empty, float32_of, rows_of, tensor_of, zeros_vector
from mindspeed_ms.ops.cpu.kernels import movement


def _masked(values, keep, p):
    result = empty(values.shape)
    threads.run(
        movement.masked_scale, values.size, values.size, values.reshape(-1), keep.reshape(-1), _gain(p), result.reshape(-1)
    )
    return result


def _gain(p):
    return np.float32(1 / (1 - p))


class _Dropout(Function):
    @staticmethod
    def forward(ctx, x, p, keep_mask):
        ctx.p, ctx.keep = p, bytes_of(keep_mask)
        return tensor_of(_masked(float32_of(x), ctx.keep, p), x.dtype)

    @staticmethod
    def backward(ctx, output_grad):
        return tensor_of(_masked(float32_of(output_grad), ctx.keep, ctx.p), output_grad.dtype), None, None


def dropout(x, p, keep_mask):
    """See `ops.dropout`."""
    checks.check_dropout(p, keep_mask, x)
    return x if p == 0 else _Dropout.apply(x, float(p), keep_mask)


class _BiasDropoutAdd(Function):
    @staticmethod
    def forward(ctx, x, bias, residual, p, keep_mask):
        ctx.p = p
        ctx.keep = bytes_of(keep_mask) if p > 0 else None
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        values, base = rows_of(float32_of(x)), rows_of(float32_of(residual))
        shift = zeros_vector(x.shape[-1]) if bias is None else float32_of(bias)
        output = empty(x.shape)
        if p > 0:
            threads.run(
                movement.bias_dropout_add_residual,
                len(values),
                values.size,
                values,
                shift,
                base,
                rows_of(ctx.keep),
                _gain(p),
                rows_of(output),
            )
        else:
            threads.run(movement.bias_add_residual, len(values), values.size, values, shift, base, rows_of(output))
        return tensor_of(output, residual.dtype)

    @staticmethod
    def backward(ctx, output_grad):
        x_dtype, bias_dtype = ctx.dtypes
        g = float32_of(output_grad)
        through = _masked(g, ctx.keep, ctx.p) if ctx.p > 0 else g
        x_grad = output_grad if through is g and x_dtype == output_grad.dtype else tensor_of(through, x_dtype)
        bias_grad = None
        if bias_dtype is not None and ctx.needs_input_grad[1]:
            bias_grad = tensor_of(column_sums(rows_of(through)), bias_dtype)
        return x_grad, bias_grad, output_grad, None, None


def bias_dropout_add(x, bias, residual, p=0.0, keep_mask=None):
    """See `ops.bias_dropout_add`."""
    checks.check_dropout(p, keep_mask, x)
    checks.check_residual(x, residual)
    return _BiasDropoutAdd.apply(x, bias, residual, float(p), keep_mask)
