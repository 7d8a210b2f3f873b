"""OpenAI's API: answers are those of the engine, whole and streamed, by OpenAI's own client; what is wrong gets a 4xx."""

import asyncio
import concurrent.futures
import json
import zlib

import numpy as np
import openai
import pytest

from mindspeed_ms.inference.engine import Engine
from mindspeed_ms.inference.requests import Event, Request, TokenScore, Usage
from mindspeed_ms.inference.sampling import RequestError, SamplingParams
from mindspeed_ms.testing.inference import TableRunner
from mindspeed_ms.tools.serve import megatron_api
from mindspeed_ms.tools.serve.app import Limits, Server
from mindspeed_ms.tools.serve.openai_responses import Answer, ChatCompletions, Completions

from ..inference.texts import byte_fallback_tokenizer
from .conftest import EOS, ByteTokenizer, Running


def letters(ids):
    """Logits of letters, which the last tokens decide."""
    logits = np.full(257, -20.0)
    key = zlib.crc32(np.asarray([*ids[-3:], len(set(ids))], np.int32).tobytes())
    logits[97:123] = np.random.default_rng(key).normal(0, 2, 26)
    return logits


def runner(slots=4):
    return TableRunner(257, 256, slots, logits=letters)


@pytest.fixture(scope="module")
def server():
    with Running(runner(), Limits()) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def expected(prompt, **params):
    return Engine(runner(), ByteTokenizer(), (EOS,)).generate([prompt], SamplingParams(**params))


def test_a_completion_is_what_the_engine_says(client):
    answer = client.completions.create(model="made-up", prompt="Hello", max_tokens=8, temperature=0)
    (wanted,) = expected("Hello", max_new_tokens=8, temperature=0.0)
    assert answer.choices[0].text == wanted.text and len(wanted.text) == 8
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 8, 13)
    assert answer.model == "made-up" and answer.object == "text_completion"


def test_openais_defaults(client):
    assert client.completions.create(model="x", prompt="Hello").usage.completion_tokens == 16
    answer = client.chat.completions.create(model="x", messages=[{"role": "user", "content": "Hi"}])
    assert answer.usage.completion_tokens == 256 - len("<user>Hi")


def test_sampling_parameters_arrive(client):
    given = {"temperature": 1.5, "top_p": 0.9, "n": 3, "seed": 70, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    extra = {"top_k": 12, "min_p": 0.05, "repetition_penalty": 1.3, "stop_token_ids": [101]}
    answer = client.completions.create(model="x", prompt="Hello", max_tokens=30, stop="x", extra_body=extra, **given)
    params = {"max_new_tokens": 30, "stop": ("x",), **given, **extra, "stop_token_ids": (101,)}
    wanted = [one.text for one in expected("Hello", **params)]
    assert [choice.text for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == 5
    for name in params:
        fewer = {key: value for key, value in params.items() if key != name}
        assert [one.text for one in expected("Hello", **fewer)] != wanted, f"{name} has no effect in this test"


@pytest.mark.parametrize("prompt", [[72, 101], [[72, 101], [108]], ["He", "l"], "He"])
def test_prompts_as_texts_and_ids(client, prompt):
    answer = client.completions.create(model="x", prompt=prompt, max_tokens=4, temperature=0)
    prompts = prompt if isinstance(prompt[0], (list, str)) and isinstance(prompt, list) else [prompt]
    wanted = [expected(one, max_new_tokens=4, temperature=0.0)[0].text for one in prompts]
    assert [choice.text for choice in answer.choices] == wanted
    assert answer.usage.prompt_tokens == sum(len(one) for one in prompts)


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_says_the_same_as_a_whole_answer(client, n):
    request = {"model": "x", "prompt": ["Hello", "you"], "max_tokens": 9, "seed": 5, "n": n, "stop": ["zz"]}
    whole = client.completions.create(**request)
    texts, reasons, usages = {}, {}, []
    for chunk in client.completions.create(stream=True, stream_options={"include_usage": True}, **request):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons[choice.index] = choice.finish_reason
        usages.append(chunk.usage)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usages[-1] == whole.usage and not any(usages[:-1])


def test_chat_whole_and_streamed(client):
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    request = {"model": "x", "messages": messages, "max_tokens": 6, "temperature": 0}
    whole = client.chat.completions.create(**request)
    (wanted,) = expected("<system>Be kind.<user>Hi", max_new_tokens=6, temperature=0.0)
    assert whole.choices[0].message.content == wanted.text and whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(stream=True, **request))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted.text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert (
        client.chat.completions.create(**{**request, "max_tokens": openai.NOT_GIVEN}, max_completion_tokens=6)
        .choices[0]
        .message.content
        == wanted.text
    )


def test_log_probabilities(client):
    answer = client.completions.create(model="x", prompt="He", max_tokens=3, temperature=0, logprobs=2, echo=True).choices[0]
    assert answer.text.startswith("He") and answer.logprobs.tokens == list(answer.text)
    assert answer.logprobs.text_offset == [0, 1, 2, 3, 4]
    direct = [None]
    for position in range(1, 5):
        logits = letters(list(answer.text[:position].encode()))
        direct.append(float(logits[ord(answer.text[position])] - np.log(np.exp(logits).sum())))
    assert answer.logprobs.token_logprobs[0] is None
    np.testing.assert_allclose(answer.logprobs.token_logprobs[1:], direct[1:], rtol=1e-6)
    assert [len(one or ()) for one in answer.logprobs.top_logprobs] == [0, 0, 2, 2, 2]
    chat = client.chat.completions.create(
        model="x", messages=[{"role": "user", "content": "H"}], max_tokens=2, temperature=0, logprobs=True, top_logprobs=3
    ).choices[0]
    assert [one.token for one in chat.logprobs.content] == list(chat.message.content)
    assert chat.logprobs.content[0].top_logprobs[0].logprob == chat.logprobs.content[0].logprob
    bare = client.chat.completions.create(
        model="x", messages=[{"role": "user", "content": "H"}], max_tokens=2, temperature=0, logprobs=True
    ).choices[0]
    assert [one.logprob for one in bare.logprobs.content] == [one.logprob for one in chat.logprobs.content]


def test_log_probabilities_of_a_stream_go_on_where_they_ended(client):
    request = {"model": "x", "prompt": ["Hello", "you"], "max_tokens": 3, "temperature": 0, "logprobs": 0, "echo": True}
    offsets, tokens = {0: [], 1: []}, {0: [], 1: []}
    for chunk in client.completions.create(stream=True, **request):
        for choice in chunk.choices:
            offsets[choice.index] += choice.logprobs.text_offset
            tokens[choice.index] += choice.logprobs.tokens
    for choice in client.completions.create(**request).choices:
        assert tokens[choice.index] == choice.logprobs.tokens
        assert offsets[choice.index] == choice.logprobs.text_offset == list(range(len(choice.text)))


def test_parts_of_characters_in_log_probabilities():
    scores = [TokenScore(200, -1.0, ((200, -1.0), (201, -2.0), (97, -3.0)))]
    answer = Answer(0, (97,), logprobs=scores)
    legacy = Completions("x", ByteTokenizer(), with_logprobs=True).choice(answer)["logprobs"]
    assert legacy["top_logprobs"] == [{"\ufffd": -1.0, "a": -3.0}]  # the likeliest of those that look the same
    (token,) = ChatCompletions("x", ByteTokenizer(), with_logprobs=True).choice(answer)["logprobs"]["content"]
    assert [one["bytes"] for one in (token, *token["top_logprobs"])] == [None, None, None, [97]]


def test_texts_of_tokens_keep_their_blanks(tmp_path):
    tokenizer = byte_fallback_tokenizer(tmp_path)  # its decoder drops the first blank of a text
    prompt, said = tokenizer.tokenize("on a"), tokenizer.tokenize("tree")
    answer = Answer(0, tuple(prompt), tokenizer.detokenize(said), logprobs=[TokenScore(number, -1.0) for number in said])
    answer.prompt_logprobs = (-1.0,) * (len(prompt) - 1)
    whole = Completions("x", tokenizer, echo=True, with_logprobs=True).choice(answer)["logprobs"]
    assert "".join(whole["tokens"]) == "on a tree"
    segments = megatron_api.body_of(megatron_api.MegatronRequest(["on a"], [], False), [answer], tokenizer)["segments"]
    assert segments == [whole["tokens"][: len(prompt)]]


def test_what_is_refused_after_a_stream_began_is_said_in_it(server):
    prompts = [Request((97,), SamplingParams()), Request((98,), SamplingParams())]

    async def events():
        yield 0, Event(0, 0, (99,), "c", None, None, (), None, Usage(1, 1))
        raise RequestError("prompt", "is too long")

    async def lines():
        app = Server(server.service, None, "x")
        return [line async for line in app._stream(Completions("x", ByteTokenizer()), prompts, events(), False)]

    first, last = asyncio.run(lines())
    assert b'"text": "c"' in first and b"prompt is too long" in last


def test_models(client):
    assert [model.id for model in client.models.list()] == ["made-up"]
    assert client.models.retrieve("made-up").id == "made-up"
    with pytest.raises(openai.NotFoundError, match="no model 'other' here"):
        client.models.retrieve("other")


def test_requests_at_once_are_batched_and_stay_apart(server, client):
    prompts = [f"prompt {number}" for number in range(12)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:

        def ask(prompt):
            return client.completions.create(model="x", prompt=prompt, max_tokens=20, temperature=0).choices[0].text

        texts = list(pool.map(ask, prompts))
    assert texts == [expected(prompt, max_new_tokens=20, temperature=0.0)[0].text for prompt in prompts]
    assert max(len(call) for call in server.runner.calls) > 1


WRONG = {  # body: words of the message
    "{": "no JSON",
    "[]": "JSON list",
    '{"max_tokens": 3}': "prompt is missing",
    '{"prompt": "a", "max_token": 3}': "unknown field max_token. Did you mean 'max_tokens'?",
    '{"prompt": "a", "max_tokens": "3"}': "max_tokens is '3'",
    '{"prompt": "a", "max_tokens": -1}': "max_tokens is -1: expected an integer >= 0",
    '{"prompt": "a", "max_tokens": 1000}': "context of 256",
    '{"prompt": "a", "max_tokens": true}': "max_tokens",
    '{"prompt": "a", "temperature": -1}': "temperature",
    '{"prompt": "a", "temperature": "x"}': "temperature is 'x': expected a number",
    '{"prompt": "a", "temperature": NaN}': "temperature",
    '{"prompt": "a", "top_p": 1.5}': "top_p",
    '{"prompt": "a", "n": 0}': "n ",
    '{"prompt": "a", "n": 500}': "at most 128",
    '{"prompt": "a", "logprobs": 9}': "logprobs",
    '{"prompt": "a", "logit_bias": {"5": 1}}': "logit_bias",
    '{"prompt": "a", "stop": 5}': "stop is 5: expected a text or a list of texts",
    '{"prompt": "a", "stop": [""]}': "stop",
    '{"prompt": "a", "suffix": "b"}': "suffix",
    '{"prompt": "a", "stream_options": {"x": 1}}': "stream_options.x",
    '{"prompt": ""}': "empty",
    '{"prompt": []}': "empty",
    '{"prompt": [[]]}': "empty",
    '{"prompt": 5}': "prompt is 5: expected a text, token ids, or a list of them",
    '{"prompt": [300]}': "token id 300",
    '{"prompt": [-1]}': "token id -1",
    '{"prompt": "\\ud800"}': "surrogate",
    '{"prompt": "a", "stop": "\\ud800"}': "surrogate",
    '{"prompt": "a", "\\ud800": 1}': "surrogate",
    '{"prompt": "%s"}' % ("a" * 300): "no room in the context of 256",
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", WRONG)
def test_what_is_wrong_is_said(server, body, stream):
    sent = body[:-1] + ', "stream": true}' if stream and body.startswith('{"') else body
    answer = server.client.post("/v1/completions", content=sent.encode(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert WRONG[body] in error["message"] and "\n" not in error["message"] and len(error["message"]) < 400
    assert error["type"] == "invalid_request_error"
    assert (error["code"] == "context_length_exceeded") == ("the context of " in error["message"])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages.0.content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "cannot begin with tool"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "contradict"),
        ({"messages": [{"role": "user", "content": "a" * 300}]}, "context"),
    ],
)
def test_what_is_wrong_in_a_chat_is_said(client, fields, words):
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="x", messages=body.pop("messages"), extra_body=body)
    assert words in caught.value.body["message"]


def test_a_model_without_template_cannot_chat(serve):
    answer = serve(render_chat=None).client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
    assert answer.status_code == 400 and "no chat template" in answer.json()["error"]["message"]


def test_routes_and_methods(server):
    client = server.client
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/v2").status_code == 404 and "/v1/completions" in client.get("/v2").json()["error"]["message"]
    assert client.get("/v1/completions").status_code == 405
    assert client.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
    assert json.loads(client.get("/v1/models").text)["object"] == "list"
