"""Losses of PPO and GRPO, of plain Tensors: one value per token; advantages (GAE, group) in numpy. Source: DeepSeekMath, TRL.

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


def clipped_value_loss(values, old_values, returns, clip_range):
    """Loss of values: `max((V - R)^2, (clip(V, Vold - c, Vold + c) - R)^2) / 2`, no gradient where the clipped one counts.

    Args:
        values, old_values, returns (Tensor): V, Vold, R `[b, s]`.
        clip_range (float): c.
    """
    with no_grad():
        value = detach(values)
        clipped = old_values + mint.clamp(value - old_values, -clip_range, clip_range)
        far = mint.square(clipped - returns)
        is_clipped = mint.gt(far, mint.square(value - returns)).astype(value.dtype)
    return (mint.square(values - returns) * (1.0 - is_clipped) + far * is_clipped) * 0.5


def generalized_advantages(rewards, values, mask, gamma, lam):
    """Advantages of tokens (GAE), and returns (advantages + values), float64 `[n, s]`; 0 where the mask is.

    Args:
        rewards, values, mask (ndarray): `[n, s]`; the tokens of an answer follow each other, behind its last the value is 0.
        gamma, lam (float): discount, and lambda.
    """
    mask = np.asarray(mask, np.float64)
    rewards, values = np.asarray(rewards, np.float64) * mask, np.asarray(values, np.float64) * mask
    advantages, later = np.zeros_like(values), np.zeros(len(values))
    for place in range(values.shape[1] - 1, -1, -1):
        following = values[:, place + 1] if place + 1 < values.shape[1] else 0.0
        later = (rewards[:, place] + gamma * following - values[:, place] + gamma * lam * later) * mask[:, place]
        advantages[:, place] = later
    return advantages, advantages + values


def whitened(advantages, mask):
    """Advantages less their mean over their deviation, both over all tokens that the mask counts; 0 elsewhere."""
    counted = advantages[np.asarray(mask) > 0]
    if not counted.size:
        return advantages
    return (advantages - counted.mean()) / np.sqrt(counted.var() + 1e-8) * mask
