"""Turns of a stored conversation, found by its labels, and truncation of too long conversations."""

import numpy as np

IGNORE_INDEX = -100


def balanced_lengths(source, target, limit):
    """Lengths (int, int) of a question and an answer cut to `limit` tokens; a part shorter than half of it is not cut.

    Source of the rule: LlamaFactory.
    """
    if 2 * target < limit:
        most = limit
    elif 2 * source < limit:
        most = limit - source
    else:
        most = limit * target // max(source + target, 1)
    target = min(most, target)
    return min(max(limit - target, 0), source), target


def turns(labels):
    """Bounds of the turns: list of (begin, begin of the answer, end).

    Args:
        labels (np.ndarray): `[n]`, IGNORE_INDEX where nothing is learnt.
    """
    learnt = np.concatenate([[False], labels != IGNORE_INDEX, [False]])
    steps = np.diff(learnt.astype(np.int8))
    bounds, start = [], 0
    for middle, end in zip(np.flatnonzero(steps == 1).tolist(), np.flatnonzero(steps == -1).tolist()):
        bounds.append((start, middle, end))
        start = end
    if start < len(labels):
        bounds.append((start, len(labels), len(labels)))
    return bounds


def kept_positions(labels, limit):
    """Indices `[m]` of the tokens that remain when a conversation is cut to `limit` tokens.

    Source of the order: MindSpeed-LLM, which gives each turn from the first on the remaining tokens; question and answer are
    cut at their ends by `balanced_lengths`.
    """
    kept, left = [], limit
    for start, middle, end in turns(labels):
        if left <= 0:
            break
        source, target = balanced_lengths(middle - start, end - middle, left)
        kept += [np.arange(start, start + source), np.arange(middle, middle + target)]
        left -= source + target
    return np.concatenate(kept) if kept else np.empty(0, np.int64)
