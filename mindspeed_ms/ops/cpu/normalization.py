"""CPU forms of LayerNorm and RMSNorm as autograd Functions."""

from mindspeed_ms.core import storage
from mindspeed_ms.core.autograd import Function
from mindspeed_ms.ops import checks
from mindspeed_ms.ops.cpu import threads
from mindspeed_ms.ops.cpu.arrays import empty, float32_of, rows_of, tensor_of, zeros_vector
from mindspeed_ms.ops.cpu.kernels import normalization as kernels


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, eps, with_inverse):
        values = rows_of(float32_of(x))
        y, inverse_rms = empty(x.shape), empty(len(values))
        threads.run(
            kernels.rms_norm_forward, len(values), values.size, values, float32_of(weight), float(eps), rows_of(y), inverse_rms
        )
        ctx.save_for_backward(x, weight)
        ctx.inverse_rms = inverse_rms
        ctx.set_materialize_grads(False)
        result = tensor_of(y, x.dtype)
        return (result, storage.from_array(inverse_rms.reshape(*x.shape[:-1], 1))) if with_inverse else result

    @staticmethod
    def backward(ctx, output_grad, *_):
        if output_grad is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        g, values = rows_of(float32_of(output_grad)), rows_of(float32_of(x))
        input_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            result = empty(x.shape)
            threads.run(
                kernels.rms_norm_input_grad, len(g), 2 * g.size, g, values, float32_of(weight), ctx.inverse_rms, rows_of(result)
            )
            input_grad = tensor_of(result, x.dtype)
        if ctx.needs_input_grad[1]:
            result = empty(weight.shape)
            threads.run(kernels.rms_norm_weight_grad, result.size, g.size, g, values, ctx.inverse_rms, result)
            weight_grad = tensor_of(result, weight.dtype)
        return input_grad, weight_grad, None, None


class _LayerNorm(Function):
    @staticmethod
    def forward(ctx, x, gamma, beta, eps):
        values = rows_of(float32_of(x))
        y, means, inverse_deviations = empty(x.shape), empty(len(values)), empty(len(values))
        threads.run(
            kernels.layer_norm_forward,
            len(values),
            2 * values.size,
            values,
            float32_of(gamma),
            float32_of(beta),
            float(eps),
            rows_of(y),
            means,
            inverse_deviations,
        )
        ctx.save_for_backward(x, gamma)
        ctx.statistics = means, inverse_deviations
        ctx.beta_dtype = beta.dtype
        return tensor_of(y, x.dtype)

    @staticmethod
    def backward(ctx, output_grad):
        x, gamma = ctx.saved_tensors
        g, values = rows_of(float32_of(output_grad)), rows_of(float32_of(x))
        input_grad = gamma_grad = beta_grad = None
        if ctx.needs_input_grad[0]:
            result = empty(x.shape)
            threads.run(
                kernels.layer_norm_input_grad,
                len(g),
                2 * g.size,
                g,
                values,
                float32_of(gamma),
                *ctx.statistics,
                rows_of(result),
            )
            input_grad = tensor_of(result, x.dtype)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            gamma_result, beta_result = empty(gamma.shape), empty(gamma.shape)
            threads.run(
                kernels.layer_norm_parameter_grads,
                gamma_result.size,
                2 * g.size,
                g,
                values,
                *ctx.statistics,
                gamma_result,
                beta_result,
            )
            gamma_grad = tensor_of(gamma_result, gamma.dtype)
            beta_grad = tensor_of(beta_result, ctx.beta_dtype)
        return input_grad, gamma_grad, beta_grad, None


def rms_norm(x, weight, eps=1e-6):
    """See `ops.rms_norm`."""
    _check_size(x, weight)
    return _RMSNorm.apply(x, weight, eps, False)


def add_rms_norm(x, bias, residual, weight, eps=1e-6):
    """See `ops.add_rms_norm`."""
    checks.check_residual(x, residual)
    _check_size(residual, weight)
    values, base = rows_of(float32_of(x)), rows_of(float32_of(residual))
    shift = zeros_vector(x.shape[-1]) if bias is None else float32_of(bias)
    total, y = empty(x.shape), empty(x.shape)
    sums, rows = rows_of(total), rows_of(y)
    threads.run(
        kernels.add_rms_norm, len(values), 2 * values.size, values, shift, base, float32_of(weight), float(eps), sums, rows
    )
    return tensor_of(total, residual.dtype), tensor_of(y, residual.dtype)


def rms_norm_with_inverse(x, weight, eps=1e-6):
    """`rms_norm` and the inverse root mean square [..., 1], float32, without a gradient."""
    _check_size(x, weight)
    return _RMSNorm.apply(x, weight, eps, True)


def layer_norm(x, gamma, beta, eps=1e-5):
    """See `ops.layer_norm`."""
    _check_size(x, gamma)
    _check_size(x, beta)
    return _LayerNorm.apply(x, gamma, beta, eps)


def _check_size(x, parameter):
    if parameter.shape != (x.shape[-1],):
        raise ValueError(
            f"a normalisation got an input of shape {x.shape} and a parameter of shape {parameter.shape}: "
            f"expected ({x.shape[-1]},)."
        )
