"""Activations of rows x [rows, n] plus bias [n], forward and backward (`input_grad` from `output_grad`)."""

import numpy as np

from mindspeed_ms.ops.cpu.compiler import inline, kernel
from mindspeed_ms.ops.cpu.kernels.math import normal_distribution, sigmoid

_ZERO = np.float32(0)
_ONE = np.float32(1)
_TWO = np.float32(2)
# gelu's tanh form is x * sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x^3): no cancellation for negative x
_GELU_SLOPE = np.float32(2 * 0.7978845608028654)
_GELU_CUBIC = np.float32(0.044715)
_GELU_CUBIC_SLOPE = np.float32(3 * 0.044715)


@inline
def _gelu_tanh_gate(x):
    return sigmoid(_GELU_SLOPE * (x + _GELU_CUBIC * x * x * x))


@kernel
def gelu_tanh_forward(start, stop, x, bias, y):
    for i in range(start, stop):
        for j in range(x.shape[1]):
            value = x[i, j] + bias[j]
            y[i, j] = value * _gelu_tanh_gate(value)


@kernel
def gelu_tanh_backward(start, stop, output_grad, x, bias, input_grad):
    for i in range(start, stop):
        for j in range(x.shape[1]):
            value = x[i, j] + bias[j]
            gate = _gelu_tanh_gate(value)
            slope = _GELU_SLOPE * (_ONE + _GELU_CUBIC_SLOPE * value * value)
            input_grad[i, j] = output_grad[i, j] * (gate + value * gate * (_ONE - gate) * slope)


@kernel
def gelu_erf_forward(start, stop, x, bias, y):
    for i in range(start, stop):
        for j in range(x.shape[1]):
            value = x[i, j] + bias[j]
            gate, _ = normal_distribution(value)
            y[i, j] = value * gate


@kernel
def gelu_erf_backward(start, stop, output_grad, x, bias, input_grad):
    for i in range(start, stop):
        for j in range(x.shape[1]):
            value = x[i, j] + bias[j]
            gate, density = normal_distribution(value)
            input_grad[i, j] = output_grad[i, j] * (gate + value * density)


@kernel
def silu_forward(start, stop, x, bias, y):
    for i in range(start, stop):
        for j in range(x.shape[1]):
            value = x[i, j] + bias[j]
            y[i, j] = value * sigmoid(value)


@kernel
def silu_backward(start, stop, output_grad, x, bias, input_grad):
    for i in range(start, stop):
        for j in range(x.shape[1]):
            value = x[i, j] + bias[j]
            gate = sigmoid(value)
            input_grad[i, j] = output_grad[i, j] * gate * (_ONE + value * (_ONE - gate))


@kernel
def relu_forward(start, stop, x, bias, y):
    for i in range(start, stop):
        for j in range(x.shape[1]):
            value = x[i, j] + bias[j]
            y[i, j] = max(value, _ZERO)


@kernel
def relu_backward(start, stop, output_grad, x, bias, input_grad):
    for i in range(start, stop):
        for j in range(x.shape[1]):
            input_grad[i, j] = output_grad[i, j] if x[i, j] + bias[j] > _ZERO else _ZERO


@kernel
def squared_relu_forward(start, stop, x, bias, y):
    for i in range(start, stop):
        for j in range(x.shape[1]):
            value = x[i, j] + bias[j]
            y[i, j] = _ZERO if value < _ZERO else value * value


@kernel
def squared_relu_backward(start, stop, output_grad, x, bias, input_grad):
    for i in range(start, stop):
        for j in range(x.shape[1]):
            value = x[i, j] + bias[j]
            input_grad[i, j] = output_grad[i, j] * (_TWO * value) if value > _ZERO else _ZERO


@kernel
def swiglu_forward(start, stop, x, bias, y):
    """SwiGLU of x [rows, 2n] = [gate; up]: y [rows, n]."""
    n = y.shape[1]
    for i in range(start, stop):
        gates, ups = x[i, :n], x[i, n:]
        for j in range(n):
            gate = gates[j] + bias[j]
            y[i, j] = gate * sigmoid(gate) * (ups[j] + bias[n + j])


@kernel
def swiglu_backward(start, stop, output_grad, x, bias, input_grad):
    n = output_grad.shape[1]
    for i in range(start, stop):
        gates, ups = x[i, :n], x[i, n:]
        gate_grads, up_grads = input_grad[i, :n], input_grad[i, n:]
        for j in range(n):
            gate = gates[j] + bias[j]
            share = sigmoid(gate)
            gate_grads[j] = output_grad[i, j] * (ups[j] + bias[n + j]) * share * (_ONE + gate * (_ONE - share))
            up_grads[j] = output_grad[i, j] * gate * share


@kernel
def clamped_swiglu_forward(start, stop, x, bias, y, limit, alpha):
    """SwiGLU of x [rows, 2n] = [gate; up] with both clamped: gate * sigmoid(alpha * gate) * (up + 1)."""
    n = y.shape[1]
    most, slope = np.float32(limit), np.float32(alpha)
    for i in range(start, stop):
        gates, ups = x[i, :n], x[i, n:]
        for j in range(n):
            gate, up = min(gates[j] + bias[j], most), max(min(ups[j] + bias[n + j], most), -most)
            y[i, j] = gate * sigmoid(slope * gate) * (up + _ONE)


@kernel
def clamped_swiglu_backward(start, stop, output_grad, x, bias, input_grad, limit, alpha):
    n = output_grad.shape[1]
    most, slope = np.float32(limit), np.float32(alpha)
    for i in range(start, stop):
        gates, ups = x[i, :n], x[i, n:]
        gate_grads, up_grads = input_grad[i, :n], input_grad[i, n:]
        for j in range(n):
            raw_gate, raw_up = gates[j] + bias[j], ups[j] + bias[n + j]
            gate, up = min(raw_gate, most), max(min(raw_up, most), -most)
            share = sigmoid(slope * gate)
            gate_grad = output_grad[i, j] * (up + _ONE) * share * (_ONE + slope * gate * (_ONE - share))
            gate_grads[j] = gate_grad if raw_gate <= most else _ZERO
            up_grads[j] = output_grad[i, j] * gate * share if -most <= raw_up <= most else _ZERO
