"""Megatron's text generation server: `PUT /api` with its fields, checks and answers. Source: `text_generation_server.py`."""

from dataclasses import dataclass

from starlette.responses import PlainTextResponse

from mindspeed_ms.inference.sampling import RequestError, SamplingParams
from mindspeed_ms.spelling import did_you_mean
from mindspeed_ms.tools.serve.openai_requests import ApiError, json_object
from mindspeed_ms.tools.serve.openai_responses import token_text

MOST_PROMPTS = 128
_KNOWN = (
    "prompts tokens_to_generate logprobs temperature top_k top_p top_p_decay top_p_bound add_BOS stop_on_double_eol "
    "stop_on_eol prevent_newline_after_colon random_seed no_log stop_token length_penalty beam_width max_len sentences"
).split()
_INSTEAD = {"max_len": "tokens_to_generate", "sentences": "prompts"}
_FIXED = {  # fields that change the answer in a way that is not here, with the values that do not
    "top_p_decay": (0.0,),
    "top_p_bound": (0.0,),
    "add_BOS": (False,),
    "prevent_newline_after_colon": (False,),
    "beam_width": (None,),
    "length_penalty": (1, 1.0),
}


@dataclass(frozen=True)
class MegatronRequest:
    """Body of `/api`: prompts (list[str]), SamplingParams of each, whether log-probabilities are wanted."""

    prompts: list
    params: list
    wants_logprobs: bool


def parse(body):
    """Read a body.

    Raises:
        ApiError: 400, with Megatron's name of the field.
    """
    values = json_object(body)
    for name in values:
        if name in _INSTEAD:
            raise ApiError(400, f"{name} is no longer used. Replace with {_INSTEAD[name]}")
        if name not in _KNOWN:
            raise ApiError(400, f"unknown field {name}.{did_you_mean(name, _KNOWN)}")
        if name in _FIXED and (isinstance(values[name], bool), values[name]) not in [
            (isinstance(one, bool), one) for one in _FIXED[name]
        ]:
            raise ApiError(400, f"{name} is {values[name]!r}: this server cannot do that; leave it out")
    prompts = _prompts(values)
    tokens = _integer(values, "tokens_to_generate", 64, 0)
    wants_logprobs = _boolean(values, "logprobs")
    if not tokens and not wants_logprobs:
        raise ApiError(400, "tokens_to_generate=0 implies logprobs=True")
    stop = (["\n\n"] if _boolean(values, "stop_on_double_eol") else []) + (["\n"] if _boolean(values, "stop_on_eol") else [])
    _boolean(values, "no_log")  # prompts are never logged here
    seed = values.get("random_seed")
    seed = None if seed in (None, -1) else _integer(values, "random_seed", None, 0)
    top_p = _number(values, "top_p", 0.0)
    shared = {
        "max_new_tokens": tokens,
        "temperature": _number(values, "temperature", 1.0),
        "top_k": _integer(values, "top_k", 0, 0),
        "top_p": top_p or 1.0,
        "stop": tuple(stop),
        "stop_token_ids": () if values.get("stop_token") is None else (_integer(values, "stop_token", None, 0),),
        "logprobs": 0 if wants_logprobs else None,
        "prompt_logprobs": wants_logprobs,
    }
    if shared["top_k"] and top_p:
        raise ApiError(400, "cannot set both top-k and top-p samplings.")
    try:
        params = [SamplingParams(seed=None if seed is None else seed + number, **shared) for number in range(len(prompts))]
    except RequestError as error:
        raise ApiError(400, f"{error.parameter} {error.rest}") from None
    return MegatronRequest(prompts, params, wants_logprobs)


def _prompts(values):
    if "prompts" not in values:
        raise ApiError(400, "prompts argument required")
    prompts = values["prompts"]
    if not isinstance(prompts, list):
        raise ApiError(400, "prompts is not a list of strings")
    if not prompts:
        raise ApiError(400, "prompts is empty")
    if len(prompts) > MOST_PROMPTS:
        raise ApiError(400, f"Maximum number of prompts is {MOST_PROMPTS}")
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ApiError(400, "prompts is not a list of strings")
    return prompts


def _integer(values, name, default, least):
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ApiError(400, f"{name} is {value!r}: expected an integer of at least {least}")
    return value


def _number(values, name, default):
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ApiError(400, f"{name} is {value!r}: expected a number")
    return float(value)


def _boolean(values, name):
    value = values.get(name, False)
    if not isinstance(value, bool):
        raise ApiError(400, f"{name} must be a boolean value")
    return value


def body_of(wanted, answers, tokenizer):
    """Body of the answer: `text` with the prompt before each answer, `segments` (texts of the tokens), `logprobs` or null."""
    tokens = [[*answer.prompt, *answer.token_ids] for answer in answers]
    logprobs = [[*(answer.prompt_logprobs or ()), *(score.logprob for score in answer.logprobs)] for answer in answers]
    return {
        "text": [prompt + answer.text for prompt, answer in zip(wanted.prompts, answers)],
        "segments": [[token_text(tokenizer.detokenize, token, not place) for place, token in enumerate(one)] for one in tokens],
        "logprobs": logprobs if wanted.wants_logprobs else None,
    }


def error_response(error):
    """Megatron's answer to a bad request: the message as plain text."""
    return PlainTextResponse(error.message, error.status)
