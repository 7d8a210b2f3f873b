"""Engine: generates for many requests at once (continuous batching over the slots of the key-value cache)."""

import os
from collections import deque
from dataclasses import replace

from mindspeed_ms.inference.answer import Answer
from mindspeed_ms.inference.feed import Feed
from mindspeed_ms.inference.requests import CANCELLED, LENGTH, STOP, Completion, Event, Request, TokenScore, Usage
from mindspeed_ms.inference.sampling import RequestError, SamplingParams

__all__ = ["CANCELLED", "LENGTH", "STOP", "Completion", "Engine", "Event", "Request", "TokenScore", "Usage"]

PREFILL_CHUNK = 512
"""Tokens of a prompt that enter in one step, so that other answers go on meanwhile."""


class Engine:
    """Generates for many requests at once.

    Each answer of a request (params.n) takes a slot; answers that find none wait, first come first served. A step feeds either
    prompts, at most PREFILL_CHUNK tokens of each, or one token of each running answer; the two take turns. All ranks call the
    same methods in the same order (`inference.ranks` sees to it), and compute the same tokens.

    Args:
        runner (ModelRunner): the model, with `slots` slots of its cache.
        tokenizer (Optional[Tokenizer]): turns tokens into text; without one events have no text and prompts are ids.
        eos_ids (sequence[int]): tokens that end an answer.
    """

    def __init__(self, runner, tokenizer=None, eos_ids=()):
        self.runner, self.tokenizer, self.eos_ids = runner, tokenizer, frozenset(eos_ids)
        self._waiting, self._running = deque(), {}  # answers; slot -> answer
        self._free = list(range(runner.slots))[::-1]
        self._prompt_logprobs = {}  # by request id, of requests that run or wait
        self._cancelled, self._next_id = set(), 0
        self._last_was_prompt = False

    @property
    def has_work(self):
        """Whether a request waits or runs (bool): `step` has something to do."""
        return bool(self._waiting or self._running)

    def check(self, request):
        """Raise RequestError if a request cannot be served: empty or too long prompt, id out of the vocabulary, ..."""
        check(request, self.runner, self.tokenizer)

    def add(self, request):
        """Add a request; returns its id (int). Ids count from 0.

        Raises:
            RequestError: see `check`.
        """
        self.check(request)
        request = seeded(request)
        number, self._next_id = self._next_id, self._next_id + 1
        for sample in range(request.params.n):
            self._waiting.append(Answer(number, sample, request, self.tokenizer, self.eos_ids, self.runner.max_sequence_length))
        return number

    def cancel(self, request_id):
        """End a request; its answers get events with finish reason "cancelled" at the next step. An ended one is ignored."""
        self._cancelled.add(request_id)

    def step(self):
        """Run the model once, for prompts or for one token of each running answer; returns list[Event].

        An error ends all requests, without events; the engine can be used again.
        """
        try:
            return self._step()
        except BaseException:
            self._abort()
            raise

    def _step(self):
        events = self._end_cancelled()
        self._admit()
        self._score_prompts()
        prompts = [(slot, answer) for slot, answer in self._running.items() if answer.is_prompt]
        others = [(slot, answer) for slot, answer in self._running.items() if not answer.is_prompt]
        self._last_was_prompt = bool(prompts) and not (self._last_was_prompt and others)
        return events + self._feed(prompts if self._last_was_prompt else others)

    def _abort(self):
        self._waiting.clear()
        self._free += list(self._running)
        self._running.clear()
        self._prompt_logprobs.clear()
        self._cancelled.clear()

    def generate(self, prompts, params):
        """Answers to several prompts.

        Args:
            prompts (list[str | sequence[int]]): texts or token ids.
            params (SamplingParams | list[SamplingParams]): for all, or one for each.

        Returns:
            list[Completion], params.n of them for each prompt, in the order of the prompts
        """
        params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        requests = [Request(self.encode(prompt), one) for prompt, one in zip(prompts, params)]
        for request in requests:
            self.check(request)
        numbers = {self.add(request): request for request in requests}
        events = {(number, sample): [] for number, request in numbers.items() for sample in range(request.params.n)}
        missing = set(events)
        while missing:
            for event in self.step():
                place = event.request, event.sample
                if place in events:
                    events[place].append(event)
                    missing -= {place} if event.finish_reason else set()
        return [Completion.of(numbers[number].prompt, parts) for (number, _), parts in events.items()]

    def stream(self, prompt, params):
        """Iterator over the events of one prompt (str or token ids); closing it cancels the request."""
        number = self.add(Request(self.encode(prompt), params))
        missing = params.n
        try:
            while missing:
                for event in self.step():
                    if event.request == number:
                        missing -= event.finish_reason is not None
                        yield event
        finally:
            if missing:
                self.cancel(number)
                self.step()

    def encode(self, prompt):
        """See the function of this name."""
        return encode(prompt, self.tokenizer)

    # ---- parts of a step ----------------------------------------------------------------------------------------------

    def _end_cancelled(self):
        if not self._cancelled:
            return []
        ended = [answer for answer in (*self._running.values(), *self._waiting) if answer.request in self._cancelled]
        self._waiting = deque(answer for answer in self._waiting if answer.request not in self._cancelled)
        for slot in [slot for slot, answer in self._running.items() if answer.request in self._cancelled]:
            self._release(slot)
        self._cancelled = set()
        return [answer.end(CANCELLED) for answer in ended]

    def _admit(self):
        while self._waiting and self._free:
            self._running[self._free.pop()] = self._waiting.popleft()

    def _release(self, slot):
        del self._running[slot]
        self._free.append(slot)

    def _score_prompts(self):
        """Compute the log-probabilities of the prompts that were admitted, once for all answers of a request."""
        wanted = [answer for answer in self._running.values() if answer.params.prompt_logprobs]
        due = {answer.request: list(answer.prompt) for answer in wanted if answer.request not in self._prompt_logprobs}
        for number, scored in zip(due, self.runner.score(list(due.values())) if due else ()):
            self._prompt_logprobs[number] = tuple(float(value) for value in scored.log_probabilities)
        for answer in wanted:
            if not answer.fed:
                answer.prompt_logprobs = self._prompt_logprobs[answer.request]
        alive = {answer.request for answer in self._running.values()}  # answers of a request follow each other
        self._prompt_logprobs = {number: values for number, values in self._prompt_logprobs.items() if number in alive}

    def _feed(self, answers):
        events = []
        feeds = {}
        for slot, answer in answers:
            if answer.is_prompt and answer.limit == 0:
                events.append(answer.end(LENGTH))
                self._release(slot)
            else:
                start, ids, is_last = answer.next_ids(PREFILL_CHUNK)
                feeds[slot] = Feed(slot, start, ids, "last" if is_last else "none")
        results = self.runner.forward(list(feeds.values())) if feeds else []
        for (slot, feed), logits in zip(feeds.items(), results):
            answer = self._running[slot]
            answer.fed += len(feed.ids)
            if logits is None:
                continue
            event = answer.take(logits)
            events.append(event)
            if event.finish_reason:
                self._release(slot)
        return events


def check(request, limits, tokenizer):
    """Raise RequestError if a request cannot be served: empty or too long prompt, id out of the vocabulary, ...

    Args:
        request (Request): the request.
        limits: with `max_sequence_length` and `vocab_size`: a ModelRunner, or a Checkpoint before it is loaded.
        tokenizer (Optional[Tokenizer]): the engine's.
    """
    prompt, params, longest = request.prompt, request.params, limits.max_sequence_length
    _check_ids("prompt", prompt, limits.vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    if not len(prompt):
        raise RequestError("prompt", "is empty: expected at least one token.")
    if len(prompt) > longest or (len(prompt) == longest and params.max_new_tokens != 0):
        raise RequestError("prompt", f"has {len(prompt)} tokens, which leave no room in the context of {longest}: shorten it.")
    if params.max_new_tokens is not None and len(prompt) + params.max_new_tokens > longest:
        raise RequestError(
            "max_new_tokens",
            f"is {params.max_new_tokens}, but the prompt's {len(prompt)} tokens leave {longest - len(prompt)} of the "
            f"context of {longest}: lower it or shorten the prompt.",
        )
    if params.logprobs is not None and params.logprobs > limits.vocab_size:
        raise RequestError("logprobs", f"is {params.logprobs}, but the vocabulary has {limits.vocab_size} ids: lower it.")
    if params.stop and tokenizer is None:
        raise RequestError("stop", f"is {params.stop!r}, but there is no tokenizer: name stop_token_ids instead.")


def encode(prompt, tokenizer):
    """Token ids (tuple[int, ...]) of a prompt (str or sequence of ids).

    Raises:
        RequestError: a text, and there is no tokenizer; a text without tokens.
    """
    if not isinstance(prompt, str):
        return tuple(int(number) for number in prompt)
    if tokenizer is None:
        raise RequestError("prompt", "is a text, but there is no tokenizer: give token ids.")
    if not prompt:
        raise RequestError("prompt", "is empty: expected some text.")
    ids = tokenizer.tokenize(prompt)
    return tuple(ids[:-1] if tokenizer.adds_eos and ids[-1:] == [tokenizer.eos] else ids)


def seeded(request):
    """The request with a seed: its own, or a new one where it has none but needs it."""
    if request.params.seed is not None or request.params.is_greedy:
        return request
    return replace(request, params=replace(request.params, seed=int.from_bytes(os.urandom(8), "little")))


def _check_ids(name, ids, vocab_size):
    outside = [number for number in ids if not 0 <= number < vocab_size]
    if outside:
        raise RequestError(name, f"has the token id {outside[0]}, expected ids from 0 to {vocab_size - 1}.")
