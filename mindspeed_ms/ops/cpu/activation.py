"""CPU forms of activations, with the bias before them, as one autograd Function."""

from mindspeed_ms.core.autograd import Function
from mindspeed_ms.ops import checks
from mindspeed_ms.ops.cpu import threads
from mindspeed_ms.ops.cpu.arrays import column_sums, empty, float32_of, rows_of, tensor_of, zeros_vector
from mindspeed_ms.ops.cpu.kernels import activation as kernels

_KERNELS = {
    "gelu_tanh": (kernels.gelu_tanh_forward, kernels.gelu_tanh_backward),
    "gelu_erf": (kernels.gelu_erf_forward, kernels.gelu_erf_backward),
    "silu": (kernels.silu_forward, kernels.silu_backward),
    "relu": (kernels.relu_forward, kernels.relu_backward),
    "squared_relu": (kernels.squared_relu_forward, kernels.squared_relu_backward),
    "swiglu": (kernels.swiglu_forward, kernels.swiglu_backward),
    "clamped_swiglu": (kernels.clamped_swiglu_forward, kernels.clamped_swiglu_backward),
}
_WORK_PER_ELEMENT = 2


class _BiasActivation(Function):
    @staticmethod
    def forward(ctx, x, bias, name, clamp):
        values = rows_of(float32_of(x))
        width = x.shape[-1] // 2 if name in checks.HALVING else x.shape[-1]
        y = empty((*x.shape[:-1], width))
        work = _WORK_PER_ELEMENT * values.size
        threads.run(_KERNELS[name][0], len(values), work, values, _bias_values(bias, x), rows_of(y), *clamp)
        ctx.save_for_backward(x, bias) if bias is not None else ctx.save_for_backward(x)
        ctx.name, ctx.clamp = name, clamp
        return tensor_of(y, x.dtype)

    @staticmethod
    def backward(ctx, output_grad):
        x, bias = ctx.saved_tensors if len(ctx.saved_tensors) == 2 else (ctx.saved_tensors[0], None)
        values, g = rows_of(float32_of(x)), rows_of(float32_of(output_grad))
        result = empty(x.shape)
        threads.run(
            _KERNELS[ctx.name][1],
            len(values),
            _WORK_PER_ELEMENT * values.size,
            g,
            values,
            _bias_values(bias, x),
            rows_of(result),
            *ctx.clamp,
        )
        bias_grad = None
        if bias is not None and ctx.needs_input_grad[1]:
            bias_grad = tensor_of(column_sums(rows_of(result)), bias.dtype)
        return tensor_of(result, x.dtype), bias_grad, None, None


def _bias_values(bias, x):
    return zeros_vector(x.shape[-1]) if bias is None else float32_of(bias)


def bias_activation(x, bias, name, fused=True, limit=7.0, alpha=1.702):
    """See `ops.bias_activation`."""
    del fused
    checks.check_bias_activation(x, bias, name)
    return _BiasActivation.apply(x, bias, name, (float(limit), float(alpha)) if name == "clamped_swiglu" else ())
