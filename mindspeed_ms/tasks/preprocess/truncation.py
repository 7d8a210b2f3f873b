"""Truncation of conversations to a length; turns are (source ids, target ids).

`keep-last` leaves out the oldest turns and renders the rest anew, so that system message and beginning stay in
place. The kept tail begins with a user's question where that fits: results of tools without their call say little, and some
templates refuse them. A single turn that is still too long loses the end of its question's text, and of its answer where that
is long too; the template's text around them stays. `oldest-first` is upstream's order: each turn from the first on gets a
share of the remaining tokens, its ids are cut at their ends, and the last turns are lost.
"""

from mindspeed_ms.core.datasets.turns import balanced_lengths
from mindspeed_ms.tasks.preprocess.errors import BadRecord, Unusable
from mindspeed_ms.tasks.preprocess.messages import USER, round_begins

CUT = "conversations cut to --seq-length"
QUESTION_CUT = "questions that lost the end of their text to --seq-length"
ANSWER_CUT = "answers that lost their end to --seq-length"
FILLS = "pairs whose longer answer fills --seq-length by itself"


def fit(render, messages, limit, policy, favours_target=False):
    """Render a conversation in at most `limit` tokens.

    Args:
        render (Callable[[list[dict]], list[tuple[list[int], list[int]]]]): messages to turns.
        messages (list[dict]): rounds of questions and answers.
        limit (Optional[int]): tokens; None: no limit.
        policy (str): one of settings.TRUNCATIONS.
        favours_target (bool): with oldest-first: the template's class cuts the longer part of a turn first.

    Returns:
        (list[tuple[list[int], list[int]]], tuple[str]): turns, and the parts cut off, in words for the report.

    Raises:
        Unusable: policy drop, and the conversation is longer; or nothing of an answer fits beside the template's text; or the
            template refuses the rest.
    """
    turns = render(messages)
    if limit is None or _length(turns) <= limit:
        return turns, ()
    if policy == "drop":
        raise Unusable("longer than --seq-length")
    if policy == "oldest-first":
        return _cut_each(turns, limit, favours_target), (CUT,)
    begins = round_begins(messages)
    try:
        for first in _tails(messages, begins, _first_kept(turns, limit)):
            turns = render(messages[begins[first] :])
            if _length(turns) <= limit:
                return turns, (CUT,)
        last = messages[begins[-1] :]
        source, target, what = cut_question(render, last, render(last)[-1], limit)
    except BadRecord as error:  # the whole conversation was none
        raise Unusable("longer than --seq-length, and the template refuses its end alone", error.text) from error
    return [(source, target)], (CUT, *what)


def _tails(messages, begins, first):
    """Candidate first rounds of the kept tail, in order of preference: user rounds before tool results."""
    return sorted(range(first, len(begins)), key=lambda number: messages[begins[number]]["role"] != USER)


def cut_question(render, messages, turn, limit):
    """Cut one turn to `limit` tokens; the template's text around the contents stays.

    Args:
        render (Callable): see fit.
        messages (list[dict]): a question, or several results of tools, and the answer.
        turn (tuple[list[int], list[int]]): their rendered ids, too long.
        limit (int): tokens.

    Returns:
        (list[int], list[int], list[str]): source, target, and names of the parts cut off.

    Raises:
        Unusable: the template's text and the first character of the question leave no room for an answer.
    """
    (*questions, answer), (source, target) = messages, turn
    length = sum(len(question["content"]) for question in questions)

    def with_text(size):
        return render([*_shortened(questions, size), answer])[0][0]

    shortest = with_text(1)
    room, most = limit - len(shortest), len(source) - len(shortest)
    if room < 1:
        raise Unusable("all labels masked: system message and template fill --seq-length")
    kept_target = max(balanced_lengths(most, len(target), room)[1], min(len(target), 1))
    kept = min(most, room - kept_target)
    what = [QUESTION_CUT] if kept < most else []
    if what:
        source = _longest(with_text, shortest, source, length, len(shortest) + kept)
    return source, target[:kept_target], what + [ANSWER_CUT] * (kept_target < len(target))


def _shortened(questions, size):
    """Questions cut to `size` characters of text together, from the first on; each keeps at least one."""
    shortened = []
    for question in questions:
        text = question["content"][: max(size, 1)]
        shortened.append({**question, "content": text})
        size -= len(text)
    return shortened


def _longest(with_text, shortest, longest, size, limit):
    """Source with the most text that fits in `limit` tokens: a search between one character and `size`, which is too many."""
    low, high, best, too_many, halve = 1, size, shortest, len(longest), False
    while high - low > 1 and len(best) < limit:
        share = 0.5 if halve else (limit - len(best)) / max(too_many - len(best), 1)
        middle = min(max(low + int((high - low) * share), low + 1), high - 1)
        tried = with_text(middle)
        if len(tried) <= limit:
            low, best = middle, tried
        else:
            high, too_many = middle, len(tried)
        halve = not halve  # text is not equally dense: a guess alone may come nearer from one side only
    return best


def _length(turns):
    return sum(len(source) + len(target) for source, target in turns)


def _first_kept(turns, limit):
    """Number of the first turn of the longest tail that may fit; at least the last turn is kept."""
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
