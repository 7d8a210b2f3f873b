"""Losses of policies, of plain Tensors: one value per token; advantages in numpy. Source of the forms: DeepSeekMath, TRL.

The ratio of a token is its probability over the one that it was drawn with (the old one).
"""

import numpy as np
from mindspore import mint

from mindspeed_ms.core.autograd import detach, no_grad

_FARTHEST = 20.0  # of a log-probability ratio: beyond it exp would overflow where the mask is 0
_EPSILON = 1e-4


def clipped_surrogate(log_probs, old_log_probs, advantages, clip_ratio):
    """Clipped surrogate of tokens: `max(-A ratio, -A clip(ratio, 1 - c, 1 + c))`, no gradient where the clipped one counts.

    Args:
        log_probs, old_log_probs (Tensor): of the tokens `[b, s]`.
        advantages (Tensor): A `[b, s]`, or `[b, 1]`.
        clip_ratio (float): c.

    Returns:
        (losses `[b, s]`, 1.0 where the clipped ratio counts `[b, s]`)
    """
    ratio = mint.expm1(_bounded(log_probs - old_log_probs)) + 1.0  # exp of CPU is wrong by 4e-6
    with no_grad():
        value = detach(ratio)
        clipped = mint.clamp(value, 1.0 - clip_ratio, 1.0 + clip_ratio)
        is_clipped = mint.gt(clipped * -advantages, value * -advantages)
        is_clipped = is_clipped.astype(value.dtype)
    return -advantages * (ratio * (1.0 - is_clipped) + clipped * is_clipped), is_clipped


def divergence(log_probs, reference_log_probs):
    """Estimate of the Kullback-Leibler divergence from the reference at each token, never negative: with d = log-probability
    of the reference less the policy's, `exp(d) - d - 1` (k3)."""
    distance = _bounded(reference_log_probs - log_probs)
    return mint.expm1(distance) - distance


def _bounded(values):
    return mint.clamp(values, -_FARTHEST, _FARTHEST)


def group_advantages(rewards, group):
    """Advantages of answers: `(r - mean) / (std + 1e-4)` in their group; 0 where all rewards of a group are equal.

    Args:
        rewards (ndarray): `[n]`, those of a group follow each other.
        group (int): answers to a prompt, at least 2; the deviation is that of a sample (divided by group - 1), as TRL's.

    Returns:
        ndarray: float64 `[n]`
    """
    groups = np.asarray(rewards, np.float64).reshape(-1, group)
    centred = groups - groups.mean(1, keepdims=True)
    centred[np.ptp(groups, axis=1) == 0] = 0.0
    return (centred / (groups.std(1, ddof=1, keepdims=True) + _EPSILON)).reshape(-1)
