"""CPU forms of vocabulary-parallel cross entropy: local pieces."""

import mindspore as ms
import numpy as np

from mindspeed_ms.core import autograd, storage
from mindspeed_ms.ops import checks
from mindspeed_ms.ops.cpu import threads
from mindspeed_ms.ops.cpu.arrays import empty, float32_of, integers_of, rows_of, tensor_of
from mindspeed_ms.ops.cpu.kernels import loss as kernels

_WORK_PER_ELEMENT = 2


@autograd.no_grad()
def cross_entropy_local_max(logits):
    """See `ops.cross_entropy_local_max`."""
    values = rows_of(float32_of(logits))
    maximum = empty(logits.shape[:-1])
    threads.run(kernels.local_maximum, len(values), values.size, values, maximum.reshape(-1))
    return storage.from_array(maximum)


@autograd.no_grad()
def cross_entropy_local_sums(logits, maximum, target, vocab_start, vocab_end, label_smoothing=0.0):
    """See `ops.cross_entropy_local_sums`."""
    checks.check_vocabulary(logits, vocab_start, vocab_end)
    values = rows_of(float32_of(logits))
    smoothing = label_smoothing > 0
    sum_exp, target_logit = empty(logits.shape[:-1]), empty(logits.shape[:-1])
    logit_sum = empty(logits.shape[:-1]) if smoothing else empty((1,))
    threads.run(
        kernels.local_sums,
        len(values),
        _WORK_PER_ELEMENT * values.size,
        values,
        _flat(maximum),
        integers_of(target).reshape(-1),
        int(vocab_start),
        smoothing,
        sum_exp.reshape(-1),
        target_logit.reshape(-1),
        logit_sum.reshape(-1),
    )
    return (storage.from_array(sum_exp), storage.from_array(target_logit), storage.from_array(logit_sum) if smoothing else None)


def cross_entropy_loss(sum_exp, target_logit, logit_sum=None, label_smoothing=0.0, vocab_size=None):
    """See `ops.cross_entropy_loss`."""
    logarithm = np.log(float32_of(sum_exp), dtype=np.float64)
    loss = logarithm - float32_of(target_logit)
    if label_smoothing:
        share = label_smoothing * vocab_size / (vocab_size - 1)
        loss = (1 - share) * loss - share * (float32_of(logit_sum) / vocab_size - logarithm)
    return storage.from_array(loss.astype(np.float32))


@autograd.no_grad()
def cross_entropy_gradient(
    logits, maximum, sum_exp, target, vocab_start, vocab_end, grad_output, label_smoothing=0.0, vocab_size=None, in_place=False
):
    """See `ops.cross_entropy_gradient`."""
    checks.check_vocabulary(logits, vocab_start, vocab_end, label_smoothing, vocab_size)
    values = rows_of(float32_of(logits))
    spread = label_smoothing * vocab_size / (vocab_size - 1) if label_smoothing else 0.0
    other_share = spread / vocab_size if label_smoothing else 0.0
    output = values if in_place and logits.dtype == ms.float32 else empty(values.shape)
    threads.run(
        kernels.gradient,
        len(values),
        _WORK_PER_ELEMENT * values.size,
        values,
        _flat(maximum),
        _flat(sum_exp),
        integers_of(target).reshape(-1),
        int(vocab_start),
        _flat(grad_output),
        1.0 - spread,
        other_share,
        output,
    )
    return tensor_of(output.reshape(logits.shape), logits.dtype)


def _flat(tensor):
    return float32_of(tensor).reshape(-1)
