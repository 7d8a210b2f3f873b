"""Ascend forms of optimizer steps and gradient kernels on storage tensors."""

import math

import mindspore as ms
from mindspore import mint

from mindspeed_ms.core import autograd, storage


def _like(grad, parameter, grad_scale):
    values = grad.reshape(parameter.shape).astype(ms.float32)
    return values if grad_scale == 1.0 else values * grad_scale


@autograd.no_grad()
def adamw_step(parameter, exp_avg, exp_avg_sq, grad, *, learning_rate, beta1, beta2, eps, weight_decay, step, grad_scale=1.0):
    """See `ops.adamw_step`."""
    if step < 1:
        raise ValueError(f"adamw_step got step={step}: steps count from 1.")
    g = _like(grad, parameter, grad_scale)
    first = exp_avg.reshape(parameter.shape)
    first = first + (g - first) * (1.0 - beta1)
    second = exp_avg_sq.reshape(parameter.shape) * beta2 + mint.square(g) * (1.0 - beta2)
    denominator = mint.sqrt(second) / math.sqrt(1.0 - beta2**step) + eps
    kept = parameter * (1.0 - learning_rate * weight_decay)
    storage.write(exp_avg, first)
    storage.write(exp_avg_sq, second)
    storage.write(parameter, kept - first / denominator * (learning_rate / (1.0 - beta1**step)))


@autograd.no_grad()
def sgd_step(
    parameter, momentum_buffer, grad, *, learning_rate, momentum=0.0, weight_decay=0.0, first_step=False, grad_scale=1.0
):
    """See `ops.sgd_step`."""
    if momentum and momentum_buffer is None:
        raise ValueError(f"sgd_step got momentum={momentum} without a momentum buffer.")
    g = _like(grad, parameter, grad_scale)
    if weight_decay:
        g = g + parameter * weight_decay
    if momentum:
        g = g if first_step else momentum_buffer.reshape(parameter.shape) * momentum + g
        storage.write(momentum_buffer, g)
    storage.write(parameter, parameter - g * learning_rate)


@autograd.no_grad()
def sum_of_squares(tensor):
    """See `ops.sum_of_squares`; summed in float32 on the device."""
    return float(mint.sum(mint.square(tensor.astype(ms.float32))).asnumpy())


@autograd.no_grad()
def count_zeros(tensor):
    """See `ops.count_zeros`."""
    return int(mint.sum(mint.eq(tensor, 0).astype(ms.int64)).asnumpy())


@autograd.no_grad()
def scale_in_place(tensor, factor):
    """See `ops.scale_in_place`."""
    storage.write(tensor, tensor * float(factor))


@autograd.no_grad()
def add_into(destination, source):
    """See `ops.add_into`."""
    total = destination.astype(ms.float32) + source.reshape(destination.shape).astype(ms.float32)
    storage.write(destination, total.astype(destination.dtype))
