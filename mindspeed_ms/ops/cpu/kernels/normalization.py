"""RMSNorm and LayerNorm kernels over rows x [rows, hidden]; sums are accumulated in double precision."""

import numpy as np

from mindspeed_ms.ops.cpu.compiler import kernel, reduction
from mindspeed_ms.ops.cpu.kernels.math import row_dot, row_sum


@reduction
def _centred_square_sum(row, mean):
    total = 0.0
    for j in range(row.size):
        total += (np.float64(row[j]) - mean) * (np.float64(row[j]) - mean)
    return total


@reduction
def _weighted_sums(output_grad, weight, x):
    """Sums of g and of g * x with g = output_grad * weight."""
    plain = 0.0
    with_x = 0.0
    for j in range(x.size):
        g = np.float64(output_grad[j] * weight[j])
        plain += g
        with_x += g * np.float64(x[j])
    return plain, with_x


@kernel
def rms_norm_forward(start, stop, x, weight, eps, y, inverse_rms):
    for i in range(start, stop):
        scale = np.float32(1 / np.sqrt(row_dot(x[i], x[i]) / x.shape[1] + eps))
        inverse_rms[i] = scale
        for j in range(x.shape[1]):
            y[i, j] = x[i, j] * scale * weight[j]


@kernel
def add_rms_norm(start, stop, x, bias, residual, weight, eps, sums, y):
    """sums = residual + x + bias, and its RMSNorm y."""
    for i in range(start, stop):
        row = sums[i]
        for j in range(x.shape[1]):
            row[j] = residual[i, j] + (x[i, j] + bias[j])
        scale = np.float32(1 / np.sqrt(row_dot(row, row) / x.shape[1] + eps))
        for j in range(x.shape[1]):
            y[i, j] = row[j] * scale * weight[j]


@kernel
def rms_norm_input_grad(start, stop, output_grad, x, weight, inverse_rms, input_grad):
    for i in range(start, stop):
        scale = inverse_rms[i]
        _, dot = _weighted_sums(output_grad[i], weight, x[i])
        slope = np.float32(dot * np.float64(scale) * np.float64(scale) / x.shape[1])
        for j in range(x.shape[1]):
            input_grad[i, j] = (output_grad[i, j] * weight[j] - x[i, j] * slope) * scale


@kernel
def rms_norm_weight_grad(start, stop, output_grad, x, inverse_rms, weight_grad):
    """Weight gradient of RMSNorm, columns `start` to `stop`."""
    total = np.zeros(stop - start, np.float64)
    for i in range(x.shape[0]):
        scale = inverse_rms[i]
        grads, values = output_grad[i, start:stop], x[i, start:stop]
        for j in range(total.size):
            total[j] += np.float64(grads[j] * (values[j] * scale))
    target = weight_grad[start:stop]
    for j in range(total.size):
        target[j] = np.float32(total[j])


@kernel
def layer_norm_forward(start, stop, x, gamma, beta, eps, y, means, inverse_deviations):
    for i in range(start, stop):
        mean = row_sum(x[i]) / x.shape[1]
        scale = np.float32(1 / np.sqrt(_centred_square_sum(x[i], mean) / x.shape[1] + eps))
        shift = np.float32(mean)
        means[i] = shift
        inverse_deviations[i] = scale
        for j in range(x.shape[1]):
            y[i, j] = (x[i, j] - shift) * scale * gamma[j] + beta[j]


@kernel
def layer_norm_input_grad(start, stop, output_grad, x, gamma, means, inverse_deviations, input_grad):
    for i in range(start, stop):
        scale = inverse_deviations[i]
        shift = means[i]
        plain, with_x = _weighted_sums(output_grad[i], gamma, x[i])
        mean_grad = np.float32(plain / x.shape[1])
        dot = (with_x - plain * np.float64(shift)) * np.float64(scale)
        slope = np.float32(dot * np.float64(scale) / x.shape[1])
        for j in range(x.shape[1]):
            input_grad[i, j] = (output_grad[i, j] * gamma[j] - mean_grad - (x[i, j] - shift) * slope) * scale


@kernel
def layer_norm_parameter_grads(start, stop, output_grad, x, means, inverse_deviations, gamma_grad, beta_grad):
    """Parameter gradients of LayerNorm (gamma, beta), columns `start` to `stop`."""
    gamma_total = np.zeros(stop - start, np.float64)
    beta_total = np.zeros(stop - start, np.float64)
    for i in range(x.shape[0]):
        scale = inverse_deviations[i]
        shift = means[i]
        grads, values = output_grad[i, start:stop], x[i, start:stop]
        for j in range(gamma_total.size):
            gamma_total[j] += np.float64(grads[j] * ((values[j] - shift) * scale))
            beta_total[j] += np.float64(grads[j])
    gamma_target, beta_target = gamma_grad[start:stop], beta_grad[start:stop]
    for j in range(gamma_total.size):
        gamma_target[j] = np.float32(gamma_total[j])
        beta_target[j] = np.float32(beta_total[j])
