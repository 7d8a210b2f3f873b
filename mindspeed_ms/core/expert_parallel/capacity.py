"""Capacity of experts: which (token, expert) pairs are dropped. Source: Megatron core, `topk_softmax_with_capacity`."""

import math

import numpy as np

from mindspeed_ms.core.expert_parallel.tie_order import select_largest


def expert_capacity(tokens, topk, experts, factor):
    """Most tokens of one expert: `ceil(tokens * topk / experts * factor)`, never more than `tokens`."""
    return min(math.ceil(tokens * topk / experts * factor), tokens)


def within_capacity(gates, chosen, capacity, policy):
    """The chosen pairs that are kept.

    Args:
        gates (ndarray): probabilities `[tokens, experts]`.
        chosen (ndarray): bool `[tokens, experts]`.
        capacity (int): tokens that each expert takes.
        policy (str): "probs": the most probable tokens of each expert are kept; "position": those that torch's `topk` of
            `chosen` keeps on CPU, where Megatron leaves the order of equal elements to it (see `tie_order`).

    Returns:
        ndarray: bool `[tokens, experts]`.
    """
    kept = chosen.copy()
    for expert in np.flatnonzero(chosen.sum(axis=0) > capacity):
        if policy == "probs":
            rows = np.flatnonzero(chosen[:, expert])
            order = np.argsort(-gates[rows, expert], kind="stable")
            kept[rows[order[capacity:]], expert] = False
            continue
        indices = np.arange(len(chosen))
        if capacity:
            select_largest(chosen[:, expert].astype(np.int64), indices, capacity)
        kept[indices[capacity:], expert] = False
    return kept


def padded_to_capacity(kept, capacity):
    """`kept` and the first other tokens of each expert until it has `capacity` of them; their probabilities are zero."""
    padded = kept.copy()
    for expert in range(kept.shape[1]):
        missing = capacity - int(kept[:, expert].sum())
        padded[np.flatnonzero(~kept[:, expert])[:missing], expert] = True
    return padded
