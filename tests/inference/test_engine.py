"""Engine on a runner without a model: batches, seeds, ends, log-probabilities, waiting, cancelling, bad requests."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from mindspeed_ms.inference import engine as engine_module
from mindspeed_ms.inference.engine import Engine, Request
from mindspeed_ms.inference.sampling import RequestError, SamplingParams, log_softmax
from mindspeed_ms.testing.inference import TableRunner
from tests.inference.texts import byte_level_tokenizer, saying

PROMPTS = [[1, 2, 3], [4], list(range(20)), [7] * 60, [5, 6]]
DRAWN = SamplingParams(max_new_tokens=15, seed=5, temperature=1.3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_level_tokenizer(tmp_path_factory.mktemp("tokenizer"), [("S", "T"), ("O", "P"), ("OP", "!")])


def answers(prompts, params, **arguments):
    return [answer.token_ids for answer in Engine(TableRunner(**arguments), eos_ids=[9]).generate(prompts, params)]


@pytest.mark.parametrize("params", [DRAWN, SamplingParams(max_new_tokens=15, temperature=0), replace(DRAWN, n=3)])
def test_an_answer_depends_on_nothing_else_in_the_batch(params, monkeypatch):
    alone = [answer for prompt in PROMPTS for answer in answers([prompt], params)]
    assert answers(PROMPTS, params, slots=5) == alone
    assert answers(PROMPTS, params, slots=1) == alone
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", 7)
    assert answers(PROMPTS, params, slots=3) == alone


def test_greedy_is_the_argmax_of_each_step():
    runner = TableRunner()
    for prompt, answer in zip(PROMPTS, answers(PROMPTS, SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True))):
        ids = list(prompt)
        for token in answer:
            assert token == int(runner.logits(ids).argmax())
            ids.append(token)
        assert len(answer) == 12


def test_samples_and_seeds_differ_and_no_seed_is_another_one_each_time():
    found = answers([[1, 2]], replace(DRAWN, n=6))
    assert len(set(found)) == 6
    assert answers([[1, 2]], DRAWN) == [found[0]]
    assert answers([[1, 2]], replace(DRAWN, seed=6)) != [found[0]]
    assert answers([[1, 2]], replace(DRAWN, seed=None)) != answers([[1, 2]], replace(DRAWN, seed=None))


def test_log_probabilities_are_those_of_a_direct_forward():
    """Of the model, before temperature and penalties; prompt tokens once for all samples."""
    params = replace(DRAWN, n=2, logprobs=3, prompt_logprobs=True, repetition_penalty=1.5, ignore_eos=True)
    runner = TableRunner()
    for answer in Engine(runner).generate(PROMPTS, params):
        ids = [*answer.prompt, *answer.token_ids]
        direct = [log_softmax(runner.logits(ids[:position])) for position in range(1, len(ids))]
        start = len(answer.prompt) - 1
        expected = [values[token] for values, token in zip(direct, ids[1:])]
        np.testing.assert_allclose(answer.prompt_logprobs, expected[:start], atol=1e-12)
        np.testing.assert_allclose([score.logprob for score in answer.logprobs], expected[start:], atol=1e-12)
        assert [score.token_id for score in answer.logprobs] == list(answer.token_ids)
        for score, values in zip(answer.logprobs, direct[start:]):
            assert [token for token, _ in score.top] == np.argsort(-values, kind="stable")[:3].tolist()


def test_log_probabilities_of_a_prompt_come_once():
    params = replace(DRAWN, n=3, prompt_logprobs=True, logprobs=4)
    events = list(Engine(TableRunner(slots=2)).stream([1, 2, 3], params))
    told = [event.sample for event in events if event.prompt_logprobs is not None]
    assert sorted(told) == [0, 1, 2] and len(events) > 3


def test_nothing_is_kept_of_requests_that_ended():
    engine = Engine(TableRunner(slots=1))
    params = replace(DRAWN, prompt_logprobs=True, n=2)
    engine.generate([[1, 2], [3]], params)
    numbers = [engine.add(Request((4, 5), params)) for _ in range(2)]
    engine.step()
    for number in numbers:
        engine.cancel(number)
    while engine.step():
        pass
    kept = {name: value for name, value in vars(engine).items() if isinstance(value, (dict, set, deque)) and value}
    assert kept == {} and not engine.has_work


def test_end_tokens():
    runner = saying([1], [5, 9, 6, 8, 2], 16)
    greedy = SamplingParams(max_new_tokens=4, temperature=0)

    def ended(params):
        [answer] = Engine(runner, eos_ids=[9, 12]).generate([[1]], params)
        return answer.token_ids, answer.finish_reason, answer.matched_stop, answer.usage.completion_tokens

    assert ended(greedy) == ((5, 9), "stop", 9, 2)
    assert ended(replace(greedy, ignore_eos=True)) == ((5, 9, 6, 8), "length", None, 4)
    assert ended(replace(greedy, ignore_eos=True, stop_token_ids=(6,))) == ((5, 9, 6), "stop", 6, 3)
    assert ended(replace(greedy, max_new_tokens=2)) == ((5, 9), "stop", 9, 2)
    assert ended(replace(greedy, max_new_tokens=1)) == ((5,), "length", None, 1)
    assert ended(replace(greedy, max_new_tokens=0)) == ((), "length", None, 0)


@pytest.mark.parametrize(
    ("said", "stop", "text", "reason"),
    [
        ("good. STOP! no", ("STOP!",), "good. ", "stop"),  # over three tokens
        ("good. STOP", ("STOP!",), "good. STOP", "length"),
        ("good. STO", ("STOP!", "x"), "good. STO", "length"),
        ("good. STO<|end|>", ("STOP!",), "good. STO", "stop"),  # what was held back is shown at an end token
        ("你好 STOP! 好", ("STOP!",), "你好 ", "stop"),
        ("a👋", ("x",), "a👋", "length"),
        ("one\n\ntwo", ("\n\n",), "one", "stop"),
        ("one<|mark|>two", ("<|mark|>",), "one", "stop"),  # a special token, which has no text
        ("one<|mark|>two", ("two",), "one", "stop"),
        ("one<|end|>two", ("two",), "one", "stop"),
    ],
)
def test_text_and_stop_texts(tokenizer, said, stop, text, reason):
    ids = tokenizer.tokenize(said)
    prompt = tokenizer.tokenize("well")
    runner = saying(prompt, ids, tokenizer.vocab_size)
    engine = Engine(runner, tokenizer, [tokenizer.eos])
    events = list(engine.stream("well", SamplingParams(max_new_tokens=len(ids), temperature=0, stop=stop)))
    shown = ""
    for event in events:
        shown += event.text
        assert text.startswith(shown)
        assert (event.finish_reason is None) == (event is not events[-1])
    assert (shown, events[-1].finish_reason) == (text, reason)
    assert not engine.has_work
    if reason == "stop":
        assert events[-1].matched_stop in (*stop, tokenizer.eos)


def test_the_longest_stop_text_counts_also_where_a_shorter_one_is_a_token(tokenizer):
    [runner] = [saying([1], tokenizer.tokenize("xab"), tokenizer.vocab_size)]
    [answer] = Engine(runner, tokenizer).generate([[1]], SamplingParams(max_new_tokens=9, temperature=0, stop=("b", "ab")))
    assert (answer.text, answer.matched_stop, answer.finish_reason) == ("x", "ab", "stop")


def test_a_stop_text_before_an_unfinished_character(tmp_path):
    """The token holds the end of the stop text and the first byte of a character that does not follow."""
    tokenizer = byte_level_tokenizer(tmp_path, [("b", "ð")])
    ids = [tokenizer.token_to_id("a"), tokenizer.token_to_id("bð")]
    params = SamplingParams(max_new_tokens=2, temperature=0, stop=("ab",))
    [answer] = Engine(saying([1], ids, tokenizer.vocab_size), tokenizer).generate([[1]], params)
    assert (answer.text, answer.finish_reason, answer.matched_stop) == ("", "stop", "ab")


def test_a_prompt_is_scored_once_for_answers_that_wait():
    runner, scored = TableRunner(slots=1), []
    score = runner.score
    runner.score = lambda sequences: scored.extend(sequences) or score(sequences)
    first, second = Engine(runner).generate([[1, 2]], replace(DRAWN, n=2, prompt_logprobs=True))
    assert scored == [[1, 2]] and first.prompt_logprobs == second.prompt_logprobs


def test_all_tokens_as_alternatives():
    [answer] = Engine(TableRunner()).generate([[1]], replace(DRAWN, logprobs=64, max_new_tokens=1))
    values = [value for _, value in answer.logprobs[0].top]
    assert len(values) == 64 and values == sorted(values, reverse=True)


def test_an_unfinished_character_at_the_end_is_not_shown(tokenizer):
    ids = tokenizer.tokenize("a👋")
    for count, text in ((len(ids) - 1, "a"), (len(ids), "a👋")):
        runner = saying(tokenizer.tokenize("x"), ids, tokenizer.vocab_size)
        params = SamplingParams(max_new_tokens=count, temperature=0)
        assert Engine(runner, tokenizer).generate(["x"], params)[0].text == text


def test_an_end_token_behind_each_text_is_no_part_of_a_prompt(tmp_path):
    ending = byte_level_tokenizer(tmp_path)
    bare = ending.tokenize("well")
    ending.adds_eos, ending._by_backend = True, False
    assert ending.tokenize("well") == [*bare, ending.eos]
    assert Engine(TableRunner(300), ending).encode("well") == tuple(bare)


def test_prompts_take_turns_with_running_answers(monkeypatch):
    """A long prompt enters in pieces, between which other answers go on."""
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", 10)
    runner = TableRunner(slots=2)
    engine = Engine(runner)
    engine.add(Request((1, 2), replace(DRAWN, ignore_eos=True)))
    engine.step()
    engine.add(Request(tuple([3] * 45), DRAWN))
    lengths = [[len(feed.ids) for feed in (engine.step(), runner.calls[-1])[1]] for _ in range(10)]
    assert lengths == [[1], [10], [1], [10], [1], [10], [1], [10], [1], [5]]
    assert [feed.wants for call in runner.calls for feed in call if len(feed.ids) == 10] == ["none"] * 4


def test_waiting_and_cancelling():
    engine = Engine(TableRunner(slots=2))
    numbers = [engine.add(Request((1, 2), replace(DRAWN, ignore_eos=True, n=2, seed=seed))) for seed in range(3)]
    assert numbers == [0, 1, 2]
    assert {event.request for event in engine.step()} == {0}
    engine.cancel(0)
    engine.cancel(2)
    engine.cancel(99)
    events = engine.step()
    ended = [(event.request, event.sample, event.usage.completion_tokens) for event in events if event.finish_reason]
    assert ended == [(0, 0, 1), (0, 1, 1), (2, 0, 0), (2, 1, 0)]
    assert {event.finish_reason for event in events} == {"cancelled", None}
    rest = []
    while engine.has_work:
        rest += engine.step()
    assert {event.request for event in rest} == {1}
    assert engine.step() == []


def test_closing_a_stream_cancels_it():
    engine = Engine(TableRunner(slots=1))
    stream = engine.stream([1, 2], DRAWN)
    next(stream)
    stream.close()
    assert not engine.has_work


def test_an_error_of_the_model_leaves_an_engine_that_works():
    runner, broken = TableRunner(), [True]
    logits = runner._logits
    runner._logits = lambda ids: np.full(runner.vocab_size, np.nan) if broken[0] else logits(ids)
    engine = Engine(runner, eos_ids=[9])
    for _ in range(runner.slots):
        with pytest.raises(ValueError, match="not finite"):
            engine.generate([[1, 2]], DRAWN)
    broken[0] = False
    assert not engine.has_work
    assert [answer.token_ids for answer in engine.generate([[1, 2]], DRAWN)] == answers([[1, 2]], DRAWN)


@pytest.mark.parametrize(
    ("prompt", "given", "message"),
    [
        ([], {}, "prompt is empty: expected at least one token."),
        ("", {}, "prompt is empty: expected some text."),
        ([1] * 40, {}, "prompt has 40 tokens, which leave no room in the context of 40: shorten it."),
        ([1] * 999, {}, "prompt has 999 tokens, which leave no room in the context of 40: shorten it."),
        ([1, 300], {}, "prompt has the token id 300, expected ids from 0 to 257."),
        ([-1], {}, "prompt has the token id -1, expected ids from 0 to 257."),
        ([1] * 9, {"stop_token_ids": (999,)}, "stop_token_ids has the token id 999, expected ids from 0 to 257."),
        (
            [1] * 30,
            {"max_new_tokens": 11},
            "max_new_tokens is 11, but the prompt's 30 tokens leave 10 of the context of 40: lower it or shorten the prompt.",
        ),
    ],
)
def test_requests_that_cannot_be_served(tokenizer, prompt, given, message):
    engine = Engine(TableRunner(258, max_sequence_length=40), tokenizer)
    with pytest.raises(RequestError) as error:
        engine.generate([[1, 2], prompt], SamplingParams(**{"max_new_tokens": None} | given))
    assert str(error.value) == message
    assert not engine.has_work


def test_the_whole_context_can_be_used(tokenizer):
    engine = Engine(TableRunner(258, max_sequence_length=40))
    [answer] = engine.generate([[1] * 30], SamplingParams(max_new_tokens=None, seed=1))
    assert (len(answer.token_ids), answer.finish_reason) == (10, "length")
    [answer] = engine.generate([[1] * 40], SamplingParams(max_new_tokens=0, prompt_logprobs=True))
    assert (answer.token_ids, len(answer.prompt_logprobs)) == ((), 39)
    with pytest.raises(RequestError, match=r"stop is .*, but there is no tokenizer"):
        engine.generate([[1]], SamplingParams(max_new_tokens=1, stop=("x",)))
    with pytest.raises(RequestError, match="prompt is a text, but there is no tokenizer"):
        engine.generate(["x"], SamplingParams())
