"""Sampling: each parameter against a direct computation, frequencies by chi-square, values out of range."""

import numpy as np
import pytest

from mindspeed_ms.inference.sampling import RequestError, SamplingParams, draw, next_token, penalized, probabilities

DRAWS, VOCAB = 20_000, 12
LOGITS = np.random.Generator(np.random.Philox(1)).normal(size=VOCAB) * 1.5


def directly(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities of all tokens, token by token, as the definitions read."""
    weights = np.exp(logits / temperature)
    weights /= weights.sum()
    order = sorted(range(len(logits)), key=lambda token: (-weights[token], token))
    kept = order[: top_k or len(order)]
    total = sum(weights[token] for token in kept)
    nucleus, mass = [], 0.0
    for token in kept:
        if mass < top_p:
            nucleus.append(token)
        mass += weights[token] / total
    nucleus = [token for token in nucleus if weights[token] >= min_p * weights[order[0]]]
    result = np.zeros(len(logits))
    result[nucleus] = weights[nucleus] / weights[nucleus].sum()
    return result


CASES = [
    {},
    {"temperature": 0.6},
    {"temperature": 2.5},
    {"top_k": 4},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 1.4, "top_k": 7, "top_p": 0.85, "min_p": 0.1},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_frequencies_are_the_probabilities(case):
    """Chi-square of 20,000 draws below its 99.99 % quantile (normal approximation of Wilson and Hilferty)."""
    expected = directly(LOGITS, **case)
    params = SamplingParams(seed=7, **case)
    found = np.bincount([next_token(LOGITS, params, [1], [2] * 3, sample) for sample in range(DRAWS)], minlength=VOCAB)
    assert found[expected == 0].sum() == 0
    used = expected > 0
    statistic = ((found[used] - DRAWS * expected[used]) ** 2 / (DRAWS * expected[used])).sum()
    free = used.sum() - 1
    assert statistic < free * (1 - 2 / (9 * free) + 3.72 * np.sqrt(2 / (9 * free))) ** 3


@pytest.mark.parametrize("vocab", [1, 5, 300, 1500])
def test_probabilities_match_the_definitions(vocab):
    random = np.random.Generator(np.random.Philox(vocab))
    for _ in range(40):
        logits = np.round(random.normal(size=vocab) * 2, 1)  # with ties
        case = {
            "temperature": random.choice([0.3, 1.0, 3.0]),
            "top_k": int(random.choice([0, 1, 3, vocab, 10 * vocab])),
            "top_p": random.choice([1.0, 0.9, 0.5, 1e-9]),
            "min_p": random.choice([0.0, 0.05, 1.0]),
        }
        ids, weights = probabilities(logits, SamplingParams(**case))
        found = np.zeros(vocab)
        found[ids] = weights
        np.testing.assert_allclose(found, directly(logits, **case), atol=1e-12)


def test_a_large_nucleus():
    logits = np.linspace(0, 1, 2000)
    ids, _ = probabilities(logits, SamplingParams(top_p=0.9))
    assert len(ids) == np.count_nonzero(directly(logits, top_p=0.9)) > 1500


def test_random_numbers_cover_positions_samples_and_seeds_evenly():
    for key in (lambda i: (3, 0, i), lambda i: (3, i, 0), lambda i: (i, 0, 0)):
        numbers = np.array([draw(*key(i)) for i in range(2000)])
        assert len(set(numbers)) == 2000
        assert np.bincount((numbers * 10).astype(int), minlength=10).min() > 150


def test_penalties():
    """CTRL's over prompt and answer, OpenAI's over the answer."""
    logits = np.array([2.0, -2.0, 1.0, 0.5, -1.0])
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.3, frequency_penalty=0.1)
    found = penalized(logits.copy(), params, (0, 1, 1), [3, 3, 4])
    np.testing.assert_allclose(found, [1.0, -4.0, 1.0, 0.25 - 0.3 - 0.2, -2.0 - 0.3 - 0.1])
    greedy = SamplingParams(temperature=0, repetition_penalty=2.5)
    assert next_token(logits, greedy, (0,), ()) == 2
    assert logits[0] == 2.0, "the logits are the caller's"


def test_a_nucleus_ends_where_it_has_its_mass():
    ids, weights = probabilities(np.zeros(4), SamplingParams(top_p=0.5))
    assert ids.tolist() == [0, 1] and weights.tolist() == [0.5, 0.5]


def test_the_place_of_a_token_decides_not_where_the_prompt_ended():
    params, logits = SamplingParams(seed=3), np.zeros(1000, np.float32)
    assert next_token(logits, params, [1, 2, 3], []) == next_token(logits, params, [1], [2, 3])
    assert next_token(logits, params, [1, 2, 3], []) != next_token(logits, params, [1, 2], [])


def test_greedy_takes_the_first_of_equal_tokens_as_does_top_k_1():
    logits = np.array([0.0, 3.0, 3.0, 3.0], np.float32)
    assert next_token(logits, SamplingParams(temperature=0), (0,), ()) == 1
    assert {next_token(logits, SamplingParams(top_k=1, seed=seed), (0,), ()) for seed in range(20)} == {1}
    assert next_token(np.array([1.0, -np.inf]), SamplingParams(temperature=1e-320, seed=1), (0,), ()) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_an_error(value):
    with pytest.raises(ValueError, match=r"the logits of token 2 are not finite"):
        next_token(np.array([0.0, value]), SamplingParams(temperature=0), (0, 1), ())


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temperature", -0.1, "expected a number >= 0 (0: greedy)."),
        ("temperature", float("nan"), "expected a number >= 0 (0: greedy)."),
        ("temperature", float("inf"), "expected a number >= 0 (0: greedy)."),
        ("temperature", True, "expected a number >= 0 (0: greedy)."),
        ("top_p", 0, "expected a number > 0 and <= 1 (1: all tokens)."),
        ("top_p", 1.1, "expected a number > 0 and <= 1 (1: all tokens)."),
        ("min_p", -1, "expected a number >= 0 and <= 1 (0: all tokens)."),
        ("top_k", -1, "expected an integer >= 0 (0: all tokens)."),
        ("top_k", 2.0, "expected an integer >= 0 (0: all tokens)."),
        ("repetition_penalty", 0, "expected a number > 0 (1: no penalty)."),
        ("presence_penalty", "1", "expected a number (0: no penalty)."),
        ("n", 0, "expected an integer >= 1."),
        ("max_new_tokens", -1, "expected an integer >= 0, or None for what fits into the context."),
        ("seed", 2**64, "expected an integer from 0 to 2**64 - 1, or None."),
        ("seed", -1, "expected an integer >= 0, or None."),
        ("logprobs", -1, "expected an integer >= 0 (alternatives beside the token's own), or None."),
        ("stop", "end", "expected a tuple of texts, none of them empty."),
        ("stop", ("",), "expected texts, none of them empty."),
        ("stop_token_ids", (-1,), "expected token ids >= 0."),
    ],
)
def test_values_out_of_range(name, value, words):
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    assert str(error.value) == f"{name} is {value!r}: {words}"
    assert error.value.parameter == name


def test_a_stop_text_that_no_text_can_hold():
    with pytest.raises(RequestError, match=r"^stop cannot be found in a text: character 2 .* U\+DCFF"):
        SamplingParams(stop=("a\udcff",))
