"""Beam search, with or without sampling. Source of the rules: transformers' `generate(num_beams=...)`, early_stopping False."""

from dataclasses import dataclass

import numpy as np

from mindspeed_ms.inference.engine import check
from mindspeed_ms.inference.feed import Feed
from mindspeed_ms.inference.requests import Request
from mindspeed_ms.inference.sampling import RequestError, log_softmax, penalized, probabilities


@dataclass(frozen=True)
class Beam:
    """A sequence that beam search found.

    Attributes:
        token_ids (tuple[int, ...]): the answer, with its end token if it has one.
        score (float): sum of its log-probabilities / length ** length_penalty.
    """

    token_ids: tuple[int, ...]
    score: float


def beam_search(runner, prompt, params, num_beams, eos_ids=(), length_penalty=1.0):
    """The best answers that a search over `num_beams` beams finds. All ranks call it with equal arguments.

    A beam that continues another one reads from a slot of the cache what both share, and only feeds the rest.

    Args:
        runner (ModelRunner): with at least `num_beams` slots, none of them in use.
        prompt (sequence[int]): token ids.
        params (SamplingParams): max_new_tokens, repetition penalty, end tokens, n (answers returned). Temperature 0: the
            likeliest continuations of all beams; else they are drawn without replacement, after temperature, top-k and top-p.
        num_beams (int): beams.
        eos_ids (sequence[int]): end tokens.
        length_penalty (float): above 0 favours long answers.

    Returns:
        list[Beam], params.n of them, the best first

    Raises:
        RequestError: a prompt that does not fit, more beams than slots, more answers than beams, a parameter that is not used.
    """
    prompt = tuple(prompt)
    check_beams(params, num_beams, runner.slots)
    check(Request(prompt, params), runner, None)
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_ids))
    room = runner.max_sequence_length - len(prompt)
    longest = room if params.max_new_tokens is None else params.max_new_tokens
    cache = _SharedCache(runner)
    running, finished = [((), 0.0)], []  # (tokens, sum of log-probabilities); Beams, the best first
    for length in range(1, longest + 1):
        logits = cache.next_logits([prompt + tokens for tokens, _ in running])
        scored = [_continuations(beam, values, prompt, params) for beam, values in zip(running, logits)]
        # enough for num_beams unfinished ones, should all end tokens be among the best
        count = max(2, 1 + len(ends)) * num_beams
        candidates = [
            ((*running[beam][0], token), total) for beam, token, total in _choose(scored, count, params, len(prompt) + length)
        ]
        is_last = length == longest
        ended = [(tokens, total) for tokens, total in candidates[:num_beams] if is_last or tokens[-1] in ends]
        finished += [Beam(tokens, total / length**length_penalty) for tokens, total in ended]
        finished = sorted(finished, key=lambda beam: -beam.score)[:num_beams]
        running = [candidate for candidate in candidates if candidate[0][-1] not in ends][:num_beams]
        if not running or (len(finished) == num_beams and finished[-1].score >= running[0][1] / length**length_penalty):
            break
    return finished[: params.n]


def check_beams(params, num_beams, slots):
    """Raise RequestError if a search cannot be made with these parameters and this many cache slots."""
    if not isinstance(num_beams, int) or num_beams < 1:
        raise RequestError("num_beams", f"is {num_beams!r}: expected an integer >= 1.")
    if num_beams > slots:
        raise RequestError("num_beams", f"is {num_beams}, but the cache has {slots} slots: load it with as many.")
    if params.n > num_beams:
        raise RequestError("n", f"is {params.n}, but {num_beams} beams give at most as many answers: ask for more beams.")
    if params.max_new_tokens == 0:
        raise RequestError("max_new_tokens", "is 0: expected an integer > 0 for beam search.")
    for name in ("stop", "logprobs", "prompt_logprobs", "presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        if value not in ((), None, False, 0) or (name == "logprobs" and value is not None):
            raise RequestError(name, f"is {value!r}, which beam search does not use: leave it out.")


def _continuations(beam, logits, prompt, params):
    """Tokens that may follow a beam, int64 [k], and the sums of log-probabilities with them, float64 [k]."""
    tokens, total = beam
    values = penalized(log_softmax(logits), params, prompt, tokens)
    ids = np.arange(len(values))
    if not params.is_greedy:
        ids, _ = probabilities(values, params)
        values = values[ids] / params.temperature
    return ids, total + values


def _choose(scored, count, params, position):
    """The best `count` continuations, or drawn ones; the best first: list of (index of the beam, token, sum)."""
    beams = np.repeat(np.arange(len(scored)), [len(ids) for ids, _ in scored])
    ids, totals = (np.concatenate(parts) for parts in zip(*scored))
    keys = totals
    if not params.is_greedy:  # the largest of scores with Gumbel noise are a draw without replacement
        noise = np.random.Generator(np.random.Philox(key=[params.seed or 0, 0], counter=position)).random(len(totals))
        keys = totals - np.log(-np.log(np.clip(noise, 1e-300, 1 - 1e-16)))
    best = np.argsort(-keys, kind="stable")[:count]
    best = best[np.argsort(-totals[best], kind="stable")]
    return list(zip(beams[best].tolist(), ids[best].tolist(), totals[best].tolist()))


class _SharedCache:
    """Cache slots of beams: each beam takes over the slot with which it shares most tokens."""

    def __init__(self, runner):
        self._runner, self._held = runner, [() for _ in range(runner.slots)]

    def next_logits(self, sequences):
        """Logits (list[ndarray]) after each sequence (tuple[int, ...])."""
        free, feeds = set(range(len(self._held))), []
        for ids in sequences:
            slot = max(sorted(free), key=lambda number: _shared(self._held[number], ids))
            free.remove(slot)
            start = min(_shared(self._held[slot], ids), len(ids) - 1)
            if start and not self._runner.can_start(slot, start):
                start = 0
            feeds.append(Feed(slot, start, ids[start:]))
            self._held[slot] = ids
        return self._runner.forward(feeds)


def _shared(held, ids):
    """Number of tokens at the beginning that two sequences share."""
    for count, (one, other) in enumerate(zip(held, ids)):
        if one != other:
            return count
    return min(len(held), len(ids))
