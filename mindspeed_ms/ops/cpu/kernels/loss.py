"""Cross entropy kernels over rows of logits [rows, v]."""

import numpy as np

from mindspeed_ms.ops.cpu.compiler import inline, kernel
from mindspeed_ms.ops.cpu.kernels.math import exp, row_maximum, row_sum

_BLOCK = 1024


@inline
def _exponentials(row, maximum, output):
    for j in range(row.size):
        output[j] = exp(row[j] - maximum)


@kernel
def local_maximum(start, stop, logits, maximum):
    for i in range(start, stop):
        maximum[i] = row_maximum(logits[i])


@kernel
def local_sums(start, stop, logits, maximum, target, vocab_start, smoothing, sum_exp, target_logit, logit_sum):
    """See `ops.cross_entropy_local_sums`; logit_sum is written only with `smoothing`."""
    scratch = np.empty(logits.shape[1], np.float32)
    for i in range(start, stop):
        shift = maximum[i]
        _exponentials(logits[i], shift, scratch)
        sum_exp[i] = np.float32(row_sum(scratch))
        column = target[i] - vocab_start
        target_logit[i] = logits[i, column] - shift if 0 <= column < logits.shape[1] else np.float32(0)
        if smoothing:
            logit_sum[i] = np.float32(row_sum(logits[i]) - np.float64(shift) * logits.shape[1])


@kernel
def gradient(start, stop, logits, maximum, sum_exp, target, vocab_start, grad_output, target_share, other_share, output):
    """Gradient (softmax - target_share * onehot - other_share) * grad_output; output may be `logits`."""
    other = np.float32(other_share)
    # memory of its own, small enough for the first cache: where output is `logits`, the compiler's vectors are not used
    scratch = np.empty(_BLOCK, np.float32)
    for i in range(start, stop):
        shift = maximum[i]
        factor = grad_output[i] / sum_exp[i]
        constant = other * grad_output[i]
        row = logits[i]
        for first in range(0, row.size, _BLOCK):
            part = row[first : first + _BLOCK]
            for j in range(part.size):
                scratch[j] = exp(part[j] - shift) * factor - constant
            target_part = output[i, first : first + _BLOCK]
            for j in range(part.size):
                target_part[j] = scratch[j]
        column = target[i] - vocab_start
        if 0 <= column < row.size:
            output[i, column] -= np.float32(target_share) * grad_output[i]
