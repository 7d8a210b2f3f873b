"""Optimizer kernels over flat float32 arrays [n], in place."""

import numpy as np

from mindspeed_ms.ops.cpu.compiler import kernel


@kernel
def adamw(start, stop, parameter, exp_avg, exp_avg_sq, grad, grad_scale, beta1, beta2, eps, decay, step_size, root_scale):
    """AdamW update; decay = 1 - lr * weight_decay, step_size = lr / (1 - beta1^t), root_scale = sqrt(1 - beta2^t)."""
    gain = np.float32(grad_scale)
    rest1 = np.float32(1 - beta1)
    keep2 = np.float32(beta2)
    rest2 = np.float32(1 - beta2)
    epsilon = np.float32(eps)
    shrink = np.float32(decay)
    rate = np.float32(step_size)
    root = np.float32(root_scale)
    for i in range(start, stop):
        g = grad[i] * gain
        m = exp_avg[i] + (g - exp_avg[i]) * rest1
        v = exp_avg_sq[i] * keep2 + g * g * rest2
        exp_avg[i] = m
        exp_avg_sq[i] = v
        parameter[i] = parameter[i] * shrink - rate * (m / (np.sqrt(v) / root + epsilon))


@kernel
def sgd(start, stop, parameter, momentum_buffer, grad, grad_scale, learning_rate, momentum, weight_decay, first_step):
    """SGD update; without momentum the buffer is not touched (it may be any array)."""
    gain = np.float32(grad_scale)
    rate = np.float32(learning_rate)
    keep = np.float32(momentum)
    decay = np.float32(weight_decay)
    for i in range(start, stop):
        g = grad[i] * gain + decay * parameter[i]
        if momentum != 0:
            g = g if first_step else momentum_buffer[i] * keep + g
            momentum_buffer[i] = g
        parameter[i] -= rate * g


@kernel
def scale(start, stop, values, factor):
    gain = np.float32(factor)
    for i in range(start, stop):
        values[i] *= gain


@kernel
def add(start, stop, destination, source):
    for i in range(start, stop):
        destination[i] += source[i]
