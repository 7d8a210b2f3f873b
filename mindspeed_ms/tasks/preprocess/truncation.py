"""Turns of a conversation, as (source ids, target ids), made to fit a length.

`keep-last` leaves out the oldest turns and renders the rest anew, so that system and beginning stand where they belong; a
single turn that is still too long is cut, answer first to be kept. `oldest-first` is upstream's order: each turn from the
first on gets a share of what is left, and the last ones are lost.
"""

from mindspeed_ms.core.datasets.turns import balanced_lengths
from mindspeed_ms.tasks.preprocess.errors import Unusable


def fit(render, messages, limit, policy, favours_target=False):
    """Render a conversation in at most `limit` tokens.

    Args:
        render (Callable[[list[dict]], list[tuple[list[int], list[int]]]]): messages to turns.
        messages (list[dict]): questions and answers in turn.
        limit (Optional[int]): tokens; None: no limit.
        policy (str): one of settings.TRUNCATIONS.
        favours_target (bool): with oldest-first: the template's class cuts the longer part of a turn first.

    Returns:
        (list[tuple[list[int], list[int]]], bool): turns, and whether something is missing.

    Raises:
        Unusable: policy drop, and the conversation is longer.
    """
    turns = render(messages)
    if limit is None or _length(turns) <= limit:
        return turns, False
    if policy == "drop":
        raise Unusable("longer than --seq-length")
    if policy == "oldest-first":
        return _cut_each(turns, limit, favours_target), True
    rounds = len(turns)
    first = _first_kept(turns, limit)
    while first:
        turns = render(messages[2 * first :])
        if _length(turns) <= limit or first == rounds - 1:
            break
        first += 1
    return (turns if _length(turns) <= limit else [_cut(*turns[-1], limit)]), True


def _length(turns):
    return sum(len(source) + len(target) for source, target in turns)


def _first_kept(turns, limit):
    """First turn of the longest tail that may fit; at least the last turn is kept."""
    total, first = 0, len(turns)
    while first and total + _length([turns[first - 1]]) <= limit:
        first -= 1
        total += _length([turns[first]])
    return min(first, len(turns) - 1)


def _cut_each(turns, limit, favours_target):
    kept, left = [], limit
    for source, target in turns:
        if left <= 0:
            break
        turn = _cut(source, target, left) if favours_target else _cut_in_proportion(source, target, left)
        kept.append(turn)
        left -= _length([turn])
    return kept


def _cut(source, target, limit):
    lengths = balanced_lengths(len(source), len(target), limit)
    return source[: lengths[0]], target[: lengths[1]]


def _cut_in_proportion(source, target, limit):
    total = len(source) + len(target)
    most = max(limit * len(target) // total, 1) if total else 0
    return source[: limit - min(most, len(target))], target[:most]
