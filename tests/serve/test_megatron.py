"""Megatron's /api: its defaults, answers and messages."""

import json

import numpy as np
import pytest

from mindspeed_ms.inference.sampling import SamplingParams
from mindspeed_ms.tools.serve import megatron_api
from mindspeed_ms.tools.serve.app import Limits

from .conftest import Running
from .test_openai import expected, letters, runner


@pytest.fixture(scope="module")
def client():
    with Running(runner(), Limits()) as running:
        yield running.client


def test_greedy_answers_of_several_prompts(client):
    answer = client.put("/api", json={"prompts": ["Hello", "you"], "tokens_to_generate": 5, "top_k": 1}).json()
    wanted = [prompt + expected(prompt, max_new_tokens=5, temperature=0.0)[0].text for prompt in ("Hello", "you")]
    assert answer["text"] == wanted and answer["logprobs"] is None
    assert ["".join(one) for one in answer["segments"]] == wanted


def test_parameters_arrive(client):
    body = {
        "prompts": ["a", "a"],
        "tokens_to_generate": 30,
        "temperature": 1.5,
        "top_p": 0.8,
        "random_seed": 3,
        "stop_token": 113,
    }
    answer = client.put("/api", json=body).json()
    params = {"max_new_tokens": 30, "temperature": 1.5, "top_p": 0.8, "stop_token_ids": (113,)}
    wanted = ["a" + expected("a", seed=seed, **params)[0].text for seed in (3, 4)]
    assert answer["text"] == wanted and wanted[0] != wanted[1]
    for name, value in (
        ("tokens_to_generate", 3),
        ("temperature", 0.5),
        ("top_p", 0.1),
        ("random_seed", 9),
        ("stop_token", 97),
    ):
        assert client.put("/api", json={**body, name: value}).json()["text"] != wanted, name
    same = client.put("/api", json={**body, "top_p": 0.0, "top_k": 4}).json()["text"]
    del params["top_p"]
    assert same == ["a" + expected("a", seed=seed, top_k=4, **params)[0].text for seed in (3, 4)]


def test_defaults_are_megatrons(client):
    answer = client.put("/api", json={"prompts": ["a"], "random_seed": 5}).json()["text"]
    assert answer == ["a" + expected("a", max_new_tokens=64, seed=5)[0].text]
    assert SamplingParams().temperature == 1.0


def test_log_probabilities_of_prompt_and_answer(client):
    for tokens in (0, 3):
        body = {"prompts": ["Hey"], "tokens_to_generate": tokens, "top_k": 1, "logprobs": True}
        answer = client.put("/api", json=body).json()
        text = answer["text"][0]
        logits = [letters(list(text[:position].encode())) for position in range(1, len(text))]
        wanted = [one[ord(letter)] - np.log(np.exp(one).sum()) for one, letter in zip(logits, text[1:])]
        np.testing.assert_allclose(answer["logprobs"][0], wanted, rtol=1e-6)


def test_a_name_that_no_answer_could_repeat_is_refused(client):
    answer = client.put("/api", content=b'{"prompts": ["a"], "\\ud800": 1}', headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and "surrogate" in answer.text


@pytest.mark.parametrize("field", ["stop_on_eol", "stop_on_double_eol"])
def test_line_ends_stop(client, field):
    assert client.put("/api", json={"prompts": ["a"], field: True, "top_k": 1, "tokens_to_generate": 4}).status_code == 200
    assert client.put("/api", json={"prompts": ["a"], field: "yes"}).text == f"{field} must be a boolean value"
    stops = megatron_api.parse(json.dumps({"prompts": ["a"], field: True}).encode()).params[0].stop
    assert stops == ({"stop_on_eol": "\n", "stop_on_double_eol": "\n\n"}[field],)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "prompts argument required"),
        ({"prompts": "a"}, "prompts is not a list of strings"),
        ({"prompts": [5]}, "prompts is not a list of strings"),
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": ["a"] * 129}, "Maximum number of prompts is 128"),
        ({"prompts": [""]}, "empty"),
        ({"prompts": ["a"], "max_len": 5}, "max_len is no longer used. Replace with tokens_to_generate"),
        ({"prompts": ["a"], "tokens_to_generate": -1}, "tokens_to_generate is -1"),
        ({"prompts": ["a"], "tokens_to_generate": 0}, "tokens_to_generate=0 implies logprobs=True"),
        ({"prompts": ["a"], "tokens_to_generate": 999}, "context of 256"),
        ({"prompts": ["a"], "top_k": 2, "top_p": 0.5}, "cannot set both top-k and top-p samplings."),
        ({"prompts": ["a"], "temperature": "hot"}, "temperature is 'hot'"),
        ({"prompts": ["a"], "temperature": -1}, "temperature"),
        ({"prompts": ["a"], "beam_width": 4}, "beam_width is 4"),
        ({"prompts": ["a"], "add_BOS": True}, "add_BOS is True"),
        ({"prompts": ["a"], "topk": 4}, "Did you mean 'top_k'?"),
        ({"prompts": ["a"], "random_seed": "x"}, "random_seed is 'x'"),
        ({"prompts": ["a"], "stop_token": 400}, "400"),
    ],
)
def test_what_is_wrong_is_said(client, body, words):
    answer = client.put("/api", json=body)
    assert answer.status_code == 400 and words in answer.text and "\n" not in answer.text
