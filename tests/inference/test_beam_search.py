"""Beam search against a search over all sequences, the use of the cache, mistakes."""

import itertools

import numpy as np
import pytest

from mindspeed_ms.inference.beam_search import beam_search
from mindspeed_ms.inference.sampling import RequestError, SamplingParams, log_softmax
from mindspeed_ms.testing.inference import TableRunner

VOCAB, END = 5, 4


def all_sequences(runner, prompt, longest, penalty):
    """(score, tokens) of every answer, the best first."""
    found = []
    for length in range(1, longest + 1):
        for tokens in itertools.product(range(VOCAB), repeat=length):
            ends = tokens[-1] == END or length == longest
            if END in tokens[:-1] or not ends:
                continue
            ids, total = list(prompt), 0.0
            for token in tokens:
                total += log_softmax(runner.logits(ids))[token]
                ids.append(token)
            found.append((total / length**penalty, tokens))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_enough_beams_find_the_best(penalty):
    """With as many beams as sequences nothing is cut; without a length penalty the end of the search loses nothing either."""
    params = SamplingParams(max_new_tokens=4, temperature=0, n=3)
    for prompt in ([1], [2, 3], [0, 0, 1]):
        runner = TableRunner(VOCAB, slots=300)
        found = beam_search(runner, prompt, params, 300, [END], penalty)
        expected = all_sequences(TableRunner(VOCAB), prompt, 4, penalty)[:3]
        assert [beam.token_ids for beam in found] == [tokens for _, tokens in expected]
        np.testing.assert_allclose([beam.score for beam in found], [score for score, _ in expected])


def test_an_end_token_takes_no_beams_place():
    """The end, the likeliest at first, leaves two beams, of which the second has the next best end."""
    rows = {(1,): [1, 0.9, -9, 2, -9], (1, 0): [0, 0, 0, 0, 0], (1, 1): [-9, -9, -9, 9, -9]}

    def logits(ids):
        return np.array(rows[tuple(ids)], np.float32)

    params = SamplingParams(max_new_tokens=2, temperature=0, n=2)
    found = beam_search(TableRunner(5, slots=2, logits=logits), [1], params, 2, [3], length_penalty=0.0)
    assert [beam.token_ids for beam in found] == [(3,), (1, 3)]


def test_only_the_best_may_end():
    """With two beams an end token in the third place does not end one."""
    logits = np.array([2, 1, 0, -9, -9], np.float32)
    params = SamplingParams(max_new_tokens=3, temperature=0, n=2)
    found = beam_search(TableRunner(5, slots=2, logits=lambda ids: logits), [1], params, 2, [2], length_penalty=0.0)
    assert (2,) not in [beam.token_ids for beam in found]


def test_drawn_beams_count_what_they_were_drawn_from():
    runner, params = TableRunner(VOCAB), SamplingParams(max_new_tokens=1, temperature=0.5, top_k=1, seed=1)
    [beam] = beam_search(runner, [1], params, 1)
    assert np.isclose(beam.score, log_softmax(runner.logits([1])).max() / 0.5)


def test_one_beam_is_greedy_and_beams_feed_only_what_is_new():
    runner = TableRunner(32, slots=4)
    [beam] = beam_search(runner, [1, 2, 3], SamplingParams(max_new_tokens=10, temperature=0), 1)
    ids = [1, 2, 3]
    for token in beam.token_ids:
        assert token == int(runner.logits(ids).argmax())
        ids.append(token)
    runner.calls.clear()
    beam_search(runner, list(range(30)), SamplingParams(max_new_tokens=12, temperature=0), 4)
    fed = [sum(len(feed.ids) for feed in call) for call in runner.calls]
    assert fed[0] == 30
    assert fed[1] <= 1 + 3 * 31, "the other slots know nothing of the prompt yet"
    assert max(fed[2:]) < 30, "later steps feed no prompt again"


def test_a_slot_that_cannot_go_back_starts_again():
    runner = TableRunner(32, slots=3)
    expected = beam_search(runner, [1, 2, 3], SamplingParams(max_new_tokens=8, temperature=0, n=3), 3)
    runner = TableRunner(32, slots=3)
    runner.can_start = lambda slot, start: False
    assert beam_search(runner, [1, 2, 3], SamplingParams(max_new_tokens=8, temperature=0, n=3), 3) == expected
    assert {feed.start for call in runner.calls for feed in call} == {0}


def test_sampled_beams_follow_the_seed():
    def found(seed):
        params = SamplingParams(max_new_tokens=8, temperature=1.2, top_k=9, seed=seed, n=2)
        return beam_search(TableRunner(32, slots=3), [1], params, 3)

    assert found(1) == found(1)
    assert len({tuple(found(seed)) for seed in range(6)}) == 6


def test_end_tokens_end_beams_unless_ignored():
    params = SamplingParams(max_new_tokens=12, temperature=0, stop_token_ids=(3,), n=4)
    beams = beam_search(TableRunner(6, slots=4), [1], params, 4, [END])
    assert all(not {3, END} & set(beam.token_ids[:-1]) for beam in beams)
    assert any(beam.token_ids[-1] in (3, END) for beam in beams)
    params = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True, n=4)
    assert {len(beam.token_ids) for beam in beam_search(TableRunner(6, slots=4), [1], params, 4, [END])} == {12}


@pytest.mark.parametrize(
    ("beams", "given", "message"),
    [
        (0, {}, "num_beams is 0: expected an integer >= 1."),
        (9, {}, "num_beams is 9, but the cache has 4 slots: load it with as many."),
        (2, {"n": 3}, "n is 3, but 2 beams give at most as many answers: ask for more beams."),
        (2, {"stop": ("x",)}, "stop is ('x',), which beam search does not use: leave it out."),
        (2, {"logprobs": 0}, "logprobs is 0, which beam search does not use: leave it out."),
        (2, {"presence_penalty": 0.5}, "presence_penalty is 0.5, which beam search does not use: leave it out."),
        (2, {"frequency_penalty": 0.5}, "frequency_penalty is 0.5, which beam search does not use: leave it out."),
        (2, {"max_new_tokens": 0}, "max_new_tokens is 0: expected an integer > 0 for beam search."),
    ],
)
def test_mistakes(beams, given, message):
    with pytest.raises(RequestError) as error:
        beam_search(TableRunner(slots=4), [1], SamplingParams(**{"max_new_tokens": 4, "temperature": 0} | given), beams)
    assert str(error.value) == message


def test_a_long_answer_is_waited_for_if_its_mean_may_be_better():
    """Two short answers are found, and the sum of the running beam falls below theirs: its mean does not."""
    end, start = 4, 0

    def logits(ids):
        follows = {start: {1: 0.4, end: 0.35, 2: 0.25}, 1: {3: 0.9, end: 0.1}, 2: {end: 0.999}, 3: {3: 0.9, end: 0.1}}
        chances = {end: 0.999} if len(ids) == 5 else follows[ids[-1]]
        return np.log([chances.get(token, 1e-6) for token in range(5)])

    params = SamplingParams(max_new_tokens=8, temperature=0)
    [best] = beam_search(TableRunner(5, logits=logits), [start], params, 2, [end])
    assert best.token_ids == (1, 3, 3, 3, end)
