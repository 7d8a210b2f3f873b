"""Terminal: answers word by word as they come, Ctrl-C, tokens per second."""

import json
import signal
import sys
import time

from mindspeed_ms.inference.detokenize import TextStream
from mindspeed_ms.inference.requests import CANCELLED, Completion


class Interrupts:
    """Context manager that turns Ctrl-C into `requested` (bool), so that a step of the model is never cut in half."""

    def __enter__(self):
        self.requested = False
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *error):
        signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number, frame):
        self.requested = True


class Timing:
    """Time to the first token, and tokens per second."""

    def __init__(self):
        self._started, self._first, self._tokens = time.perf_counter(), None, 0

    def add(self, event):
        """Count the tokens of an Event."""
        self._tokens += len(event.token_ids)
        if event.token_ids and self._first is None:
            self._first = time.perf_counter()

    def text(self):
        """One line (str)."""
        seconds = time.perf_counter() - self._started
        first = "" if self._first is None else f", first token after {self._first - self._started:.2f} s"
        rate = f"{self._tokens / seconds:.1f} tokens/s"
        return f"{self._tokens} {'token' if self._tokens == 1 else 'tokens'} in {seconds:.2f} s: {rate}{first}"


class Terminal:
    """Standard output for answers, standard error for all else.

    Args:
        as_json (bool): a json line for each answer, when it is complete.
    """

    def __init__(self, as_json=False):
        self._as_json = as_json

    def note(self, text):
        """Write a line to the standard error."""
        sys.stderr.write(f"[{text}]\n")
        sys.stderr.flush()

    def write(self, text):
        """Write text to the standard output, at once."""
        if not text:
            return
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()

    def answers(self, engine, requests, titles):
        """Generate and show answers: each as it comes, in the order of the requests.

        Args:
            engine (Engine): nothing else runs in it.
            requests (list[Request]): prompts.
            titles (list[str]): of each answer, shown above it if there are several.

        Returns:
            (list[Completion], bool): the answers, and whether Ctrl-C ended them
        """
        timing, events, order = Timing(), {}, []
        with Interrupts() as interrupts:
            prompts = {engine.add(request): request for request in requests}
            order = [(number, sample) for number, request in prompts.items() for sample in range(request.params.n)]
            events = {place: [] for place in order}
            shown = self._show(order, events, titles)
            missing, is_cancelled = set(order), False
            while missing:
                if interrupts.requested and not is_cancelled:
                    is_cancelled = True
                    for number in prompts:
                        engine.cancel(number)
                for event in engine.step():
                    timing.add(event)
                    events[event.request, event.sample].append(event)
                    missing -= {(event.request, event.sample)} if event.finish_reason else set()
                next(shown)
        completions = [Completion.of(prompts[place[0]].prompt, events[place]) for place in order]
        reasons = sorted({answer.finish_reason for answer in completions})
        self.note(f"{timing.text()}; ended by {', '.join(reasons)}")
        return completions, CANCELLED in reasons

    def _show(self, order, events, titles):
        """Generator that shows at each step what is new and in turn."""
        if self._as_json:
            yield from self._show_json(order, events, titles)
        for place, title in zip(order, titles):
            if len(order) > 1:
                self.write(f"=== {title} ===\n")
            done, last, ends_line = 0, None, True
            while last is None or last.finish_reason is None:
                if len(events[place]) == done:
                    yield
                    continue
                last = events[place][done]
                done += 1
                self.write(last.text)
                ends_line = last.text.endswith("\n") if last.text else ends_line
            self.write("" if ends_line and done > 1 else "\n")
        while True:
            yield

    def _show_json(self, order, events, titles):
        for place, title in zip(order, titles):
            while not events[place] or events[place][-1].finish_reason is None:
                yield
            self.write(json.dumps(_as_dict(Completion.of((), events[place]), title), ensure_ascii=False) + "\n")
        while True:
            yield

    def beams(self, beams, tokenizer, prompt, title, has_title):
        """Show the answers (list[Beam]) of a beam search."""
        for number, beam in enumerate(beams):
            text = text_of(tokenizer, prompt, beam.token_ids)
            if self._as_json:
                found = {"title": title, "answer": number, "text": text, "token_ids": list(beam.token_ids), "score": beam.score}
                self.write(json.dumps(found, ensure_ascii=False) + "\n")
                continue
            if has_title or len(beams) > 1:
                self.write(f"=== {title}, score {beam.score:.4f} ===\n")
            self.write(text + "\n")


def text_of(tokenizer, prompt, ids):
    """Text (str) of an answer's ids."""
    stream = TextStream(tokenizer, prompt)
    return "".join([*(stream.add(token) for token in ids), stream.finish()])


def _as_dict(completion, title):
    found = {
        "title": title,
        "answer": completion.sample,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "matched_stop": completion.matched_stop,
        "prompt_tokens": completion.usage.prompt_tokens,
        "completion_tokens": completion.usage.completion_tokens,
    }
    if completion.logprobs:
        found["logprobs"] = [
            {"token_id": score.token_id, "logprob": score.logprob, "top": [list(pair) for pair in score.top]}
            for score in completion.logprobs
        ]
    if completion.prompt_logprobs is not None:
        found["prompt_logprobs"] = list(completion.prompt_logprobs)
    return found
