"""Terminal of tools.generate on a runner without a model: order of answers, Ctrl-C, chats with history."""

import io
import json
import os
import signal
import sys

import pytest

from mindspeed_ms.core.datasets.tokenizer.interface import check_characters
from mindspeed_ms.core.datasets.tokenizer.null import NullTokenizer
from mindspeed_ms.inference.engine import Engine, Request
from mindspeed_ms.inference.sampling import SamplingParams
from mindspeed_ms.testing.inference import TableRunner
from mindspeed_ms.tools.generate.chat import HELP, chat
from mindspeed_ms.tools.generate.terminal import Terminal

PARAMS = SamplingParams(max_new_tokens=6, seed=4)


class Screen(Terminal):
    """What is written: `texts` in pieces, `notes`."""

    def __init__(self, as_json=False):
        super().__init__(as_json)
        self.texts, self.notes = [], []

    def write(self, text):
        self.texts.append(text)

    def note(self, text):
        self.notes.append(text)


class Typed:
    """Lines of a user; an exception is raised in place of a line."""

    def __init__(self, *lines):
        self._lines = [*lines, EOFError()]

    def __call__(self):
        line = self._lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line


def engine_of(on_step=None, **arguments):
    """Engine of numbers; `on_step(number of the model's calls)` is called before each."""
    runner = TableRunner(64, **arguments)
    forward = runner.forward

    def stepping(feeds):
        if on_step is not None:
            on_step(len(runner.calls))
        return forward(feeds)

    runner.forward = stepping
    return Engine(runner, NullTokenizer(63), [9])


def numbers(messages):
    """Template of tests: a message is its numbers, a 62 behind it."""
    return [int(word) for message in messages for word in (*message["content"].split(), "62")]


def test_answers_come_in_order_and_as_they_are_made():
    requests = [Request((1, 2), PARAMS), Request((3,), SamplingParams(max_new_tokens=3, seed=1, n=2))]
    screen = Screen()
    completions, was_interrupted = screen.answers(engine_of(slots=2), requests, ["a", "b", "c"])
    expected = Engine(TableRunner(64), NullTokenizer(63), [9])
    wanted = [*expected.generate([[1, 2]], requests[0].params), *expected.generate([[3]], requests[1].params)]
    assert [answer.token_ids for answer in completions] == [answer.token_ids for answer in wanted]
    assert "".join(screen.texts) == "".join(f"=== {name} ===\n{answer.text}\n" for name, answer in zip("abc", wanted))
    assert len(screen.texts) > 12, "token by token"
    assert not was_interrupted
    [note] = screen.notes
    assert note.startswith(f"{sum(len(answer.token_ids) for answer in wanted)} tokens in ")


def test_json_lines():
    screen = Screen(as_json=True)
    [answer], _ = screen.answers(engine_of(), [Request((1, 2), SamplingParams(max_new_tokens=4, seed=1, logprobs=1))], ["x"])
    [line] = [json.loads(text) for text in screen.texts if text]
    assert line["token_ids"] == list(answer.token_ids) and line["text"] == answer.text and line["finish_reason"] == "length"
    assert [entry["token_id"] for entry in line["logprobs"]] == line["token_ids"]
    assert all(len(entry["top"]) == 1 for entry in line["logprobs"])


@pytest.fixture
def ctrl_c():
    """Ctrl-C before the model's fourth call; the handler of this process is as before afterwards."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda calls: os.kill(os.getpid(), signal.SIGINT) if calls == 3 else None
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_ends_an_answer_and_not_the_chat(ctrl_c):
    screen, engine, seen = Screen(), engine_of(ctrl_c), []
    template = lambda messages: (seen.append(messages), numbers(messages))[1]  # noqa: E731
    chat(engine, template, PARAMS, screen, read=Typed("1 2", "3"))
    assert [note.rpartition(" ")[2] for note in screen.notes[1:]] == ["cancelled", "length"]
    said = seen[1][1]["content"]
    assert [message["role"] for message in seen[1]] == ["user", "assistant", "user"]
    assert len(said.split()) == 4, "what was said stays in the history"
    assert not engine.has_work


def test_ctrl_c_ends_prompts(ctrl_c):
    screen = Screen()
    completions, was_interrupted = screen.answers(engine_of(ctrl_c, slots=1), [Request((1,), PARAMS)] * 3, ["a", "b", "c"])
    assert was_interrupted
    assert [answer.finish_reason for answer in completions] == ["cancelled"] * 3


@pytest.mark.parametrize("clear, end", [("/clear", "/exit"), ("clear", "exit"), ("new", "q"), ("clear", "quit")])
def test_what_a_user_types_in_a_chat(clear, end):
    seen, screen = [], Screen()
    template = lambda messages: (seen.append(messages), numbers(messages))[1]  # noqa: E731
    typed = Typed("1", "", "  ", KeyboardInterrupt(), "5 " * 99, clear, "3", f"{end} ", "4")
    chat(engine_of(max_sequence_length=60), template, PARAMS, screen, system="7", read=typed)
    assert [[message["content"] for message in messages] for messages in seen if len(messages) == 2] == [
        ["7", "1"],
        ["7", "5 " * 99],
        ["7", "3"],
    ]
    assert screen.notes.count(HELP) == 2
    left_out = "the question is left out: prompt has 102 tokens with the template, but 54 fit beside an answer: shorten it."
    assert left_out in screen.notes


def test_bytes_that_are_no_text_spoil_their_question_only(monkeypatch):
    def template(messages):
        check_characters([messages[-1]["content"]])
        return numbers(messages)

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"1 \xff\n3\n"), encoding="utf-8"))
    screen = Screen()
    chat(engine_of(), template, PARAMS, screen)
    assert screen.notes[1].startswith("the question is left out: character 3 ") and screen.notes[2].endswith("length")


def test_a_full_context_forgets_the_oldest_turns_and_says_so():
    screen = Screen()
    params = SamplingParams(max_new_tokens=None, seed=4, stop_token_ids=tuple(range(0, 64, 2)))
    chat(engine_of(max_sequence_length=40), numbers, params, screen, read=Typed("1 " * 20, "3 " * 20, "5"))
    assert "the oldest turn is forgotten: the context is full" in screen.notes
