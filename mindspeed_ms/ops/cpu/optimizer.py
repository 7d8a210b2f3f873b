"""CPU forms of optimizer steps and gradient kernels on storage tensors."""

import math

import mindspore as ms
import numpy as np

from mindspeed_ms.core import storage
from mindspeed_ms.ops.cpu import threads
from mindspeed_ms.ops.cpu.arrays import float32_of, tensor_of, zeros_vector
from mindspeed_ms.ops.cpu.kernels import optimizer as kernels
from mindspeed_ms.ops.cpu.kernels import reductions


def _flat_storage(tensor):
    if tensor.dtype != ms.float32:
        raise ValueError(f"an optimizer state of shape {tensor.shape} has dtype {tensor.dtype}: expected float32.")
    return storage.as_array(tensor).reshape(-1)


def _flat_values(tensor):
    return float32_of(tensor).reshape(-1)


def _check_sizes(parameter, *others):
    for other in others:
        if other.size != parameter.size:
            raise ValueError(
                f"an optimizer step got a parameter of {parameter.size} elements and a state or gradient of {other.size}."
            )


def adamw_step(parameter, exp_avg, exp_avg_sq, grad, *, learning_rate, beta1, beta2, eps, weight_decay, step, grad_scale=1.0):
    """See `ops.adamw_step`."""
    if step < 1:
        raise ValueError(f"adamw_step got step={step}: steps count from 1.")
    _check_sizes(parameter, exp_avg, exp_avg_sq, grad)
    threads.run(
        kernels.adamw,
        parameter.size,
        parameter.size,
        _flat_storage(parameter),
        _flat_storage(exp_avg),
        _flat_storage(exp_avg_sq),
        _flat_values(grad),
        float(grad_scale),
        float(beta1),
        float(beta2),
        float(eps),
        1.0 - learning_rate * weight_decay,
        learning_rate / (1.0 - beta1**step),
        math.sqrt(1.0 - beta2**step),
    )


def sgd_step(
    parameter, momentum_buffer, grad, *, learning_rate, momentum=0.0, weight_decay=0.0, first_step=False, grad_scale=1.0
):
    """See `ops.sgd_step`."""
    if momentum and momentum_buffer is None:
        raise ValueError(f"sgd_step got momentum={momentum} without a momentum buffer.")
    _check_sizes(parameter, grad, *([momentum_buffer] if momentum else []))
    buffer = _flat_storage(momentum_buffer) if momentum else zeros_vector(1)
    threads.run(
        kernels.sgd,
        parameter.size,
        parameter.size,
        _flat_storage(parameter),
        buffer,
        _flat_values(grad),
        float(grad_scale),
        float(learning_rate),
        float(momentum),
        float(weight_decay),
        bool(first_step),
    )


def sum_of_squares(tensor):
    """See `ops.sum_of_squares`."""
    values = _flat_values(tensor)
    sums = np.zeros(-(-values.size // reductions.BLOCK), np.float64)
    threads.run(reductions.square_sums, sums.size, values.size, values, sums)
    return float(sums.sum())


def count_zeros(tensor):
    """See `ops.count_zeros`."""
    values = _flat_values(tensor)
    return int(values.size - np.count_nonzero(values))


def scale_in_place(tensor, factor):
    """See `ops.scale_in_place`."""
    if tensor.dtype == ms.float32:
        values = storage.as_array(tensor).reshape(-1)
        threads.run(kernels.scale, values.size, values.size, values, float(factor))
    else:
        storage.write(tensor, tensor_of(float32_of(tensor) * np.float32(factor), tensor.dtype))


def add_into(destination, source):
    """See `ops.add_into`."""
    _check_sizes(destination, source)
    if destination.dtype == ms.float32:
        values = storage.as_array(destination).reshape(-1)
        threads.run(kernels.add, values.size, values.size, values, _flat_values(source))
    else:
        total = float32_of(destination) + float32_of(source).reshape(destination.shape)
        storage.write(destination, tensor_of(total, destination.dtype))
