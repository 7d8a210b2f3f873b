"""Ascend forms of vocabulary-parallel cross entropy: local pieces, in float32."""

import mindspore as ms
from mindspore import mint

from mindspeed_ms.core import autograd
from mindspeed_ms.ops import checks


def _shifted(logits, maximum):
    return logits.astype(ms.float32) - mint.unsqueeze(maximum, -1)


def _columns(target, vocab_start, vocab_end):
    """(column of each target [..., 1], 0 for other ranks' targets; whether it is another rank's)."""
    outside = mint.logical_or(target < vocab_start, target >= vocab_end)
    return mint.unsqueeze(mint.where(outside, mint.zeros_like(target), target - vocab_start), -1), outside


@autograd.no_grad()
def cross_entropy_local_max(logits):
    """See `ops.cross_entropy_local_max`."""
    return mint.max(logits.astype(ms.float32), -1)[0]


@autograd.no_grad()
def cross_entropy_local_sums(logits, maximum, target, vocab_start, vocab_end, label_smoothing=0.0):
    """See `ops.cross_entropy_local_sums`."""
    checks.check_vocabulary(logits, vocab_start, vocab_end)
    shifted = _shifted(logits, maximum)
    columns, outside = _columns(target, vocab_start, vocab_end)
    picked = mint.squeeze(mint.gather(shifted, -1, columns.astype(ms.int64)), -1)
    return (
        mint.sum(mint.exp(shifted), dim=-1),
        mint.where(outside, mint.zeros_like(picked), picked),
        mint.sum(shifted, dim=-1) if label_smoothing > 0 else None,
    )


@autograd.no_grad()
def cross_entropy_loss(sum_exp, target_logit, logit_sum=None, label_smoothing=0.0, vocab_size=None):
    """See `ops.cross_entropy_loss`."""
    logarithm = mint.log(sum_exp)
    loss = logarithm - target_logit
    if label_smoothing:
        share = label_smoothing * vocab_size / (vocab_size - 1)
        loss = loss * (1.0 - share) - (logit_sum / vocab_size - logarithm) * share
    return loss


@autograd.no_grad()
def cross_entropy_gradient(
    logits, maximum, sum_exp, target, vocab_start, vocab_end, grad_output, label_smoothing=0.0, vocab_size=None, in_place=False
):
    """See `ops.cross_entropy_gradient`; `in_place` is a permission that is not used here."""
    checks.check_vocabulary(logits, vocab_start, vocab_end, label_smoothing, vocab_size)
    spread = label_smoothing * vocab_size / (vocab_size - 1) if label_smoothing else 0.0
    softmax = mint.exp(_shifted(logits, maximum)) / mint.unsqueeze(sum_exp, -1)
    columns, outside = _columns(target, vocab_start, vocab_end)
    hits = mint.unsqueeze(mint.logical_not(outside), -1).astype(ms.float32) * (spread - 1.0)
    gradient = mint.scatter_add(softmax, -1, columns.astype(ms.int64), hits)
    if spread:
        gradient = gradient - spread / vocab_size
    return (gradient * mint.unsqueeze(grad_output, -1)).astype(logits.dtype)
