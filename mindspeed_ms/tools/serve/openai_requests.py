"""Bodies of OpenAI's requests: fields, ranges, and the SamplingParams that they mean.

Beside OpenAI's fields those that other servers of open models take too: top_k, min_p, repetition_penalty, stop_token_ids,
ignore_eos.
"""

import json
import re
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
)

from mindspeed_ms.core.datasets.tokenizer.interface import TokenizerError, check_characters
from mindspeed_ms.inference.sampling import SamplingParams
from mindspeed_ms.spelling import did_you_mean

_NO_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity")
"""Fields that OpenAI's clients send and that do not bear on the answer."""


class ApiError(Exception):
    """Error that is answered as OpenAI does.

    Args:
        status (int): HTTP status.
        message (str): for a person.
        param (Optional[str]): field of the body.
        code (Optional[str]): OpenAI's word for it.
    """

    def __init__(self, status, message, param=None, code=None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self):
        """Body of the answer (dict)."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _only(*allowed):
    """Type of a field that is known but can only have these values, since another would change the answer."""

    def check(value):
        if value not in allowed:
            words = " or ".join(json.dumps(one) for one in allowed)
            raise ValueError(f"this server cannot do that: expected {words}")
        return value

    return Annotated[Any, BeforeValidator(check)]


_KIND = re.compile(r"(list|constrained)[\[-].*|str|int|float")
"""Parts of pydantic's places that name a type of a union, not a field."""

_UNIONS = dict.fromkeys(
    ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"), "a number"
) | {"prompt": "a text, token ids, or a list of them", "stop": "a text or a list of texts"}
"""What is expected where a field has several types."""

Number = StrictInt | StrictFloat
Ids = list[StrictInt]


class _Stream(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: StrictBool = False
    include_obfuscation: _only(None, False, True) = None  # padding against eavesdroppers on a network


class _Common(BaseModel):
    """Fields of both kinds of requests."""

    model_config = ConfigDict(extra="forbid")
    model: StrictStr | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    n: StrictInt | None = None
    stream: StrictBool | None = None
    stream_options: _Stream | None = None
    stop: StrictStr | list[StrictStr] | None = None
    seed: StrictInt | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: StrictBool | None = None
    logit_bias: _only(None, {}) = None

    def _params(self, max_new_tokens, logprobs, prompt_logprobs=False):
        """SamplingParams; fields that were not given keep OpenAI's defaults, which are those of SamplingParams."""
        names = "temperature top_p n seed presence_penalty frequency_penalty top_k min_p repetition_penalty ignore_eos".split()
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            **given,
        )

    @property
    def wants_usage(self):
        """Whether a stream ends with the count of tokens (bool)."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_Common):
    """Body of `/v1/completions`."""

    prompt: StrictStr | Ids | list[StrictStr] | list[Ids]
    max_tokens: StrictInt | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=5)] | None = None
    echo: StrictBool | None = None
    best_of: _only(None, 1) = None
    suffix: _only(None, "") = None

    def params(self):
        """SamplingParams; OpenAI's default of max_tokens is 16."""
        max_new_tokens = 16 if self.max_tokens is None else self.max_tokens
        return self._params(max_new_tokens, self.logprobs, bool(self.echo) and self.logprobs is not None)

    @property
    def prompts(self):
        """Prompts (list[str | list[int]])."""
        prompt = self.prompt
        is_single = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        return [prompt] if is_single else list(prompt)


class ChatRequest(_Common):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: StrictInt | None = None
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    tools: _only(None, []) = None
    tool_choice: _only(None, "none", "auto") = None
    parallel_tool_calls: _only(None, True, False) = None  # bears on tools only
    functions: _only(None, []) = None
    function_call: _only(None, "none", "auto") = None
    response_format: _only(None, {"type": "text"}) = None
    modalities: _only(None, ["text"]) = None
    audio: _only(None) = None
    prediction: _only(None) = None
    reasoning_effort: _only(None) = None
    web_search_options: _only(None) = None

    def params(self):
        """SamplingParams; without a limit an answer may fill the context."""
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ApiError(400, "max_tokens and max_completion_tokens contradict each other: give one of them", "max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
        limit = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return self._params(limit, (self.top_logprobs or 0) if self.logprobs else None)

    def plain_messages(self):
        """Messages as chat templates take them: content a text, parts of type "text" joined.

        Raises:
            ApiError: 400, a message without role or content, a part that is no text.
        """
        return [_plain_message(message, f"messages.{number}") for number, message in enumerate(self.messages)]


def _plain_message(message, place):
    if not isinstance(message.get("role"), str):
        raise ApiError(400, f'{place}.role is {message.get("role")!r}: expected a text such as "user"', f"{place}.role")
    if message.get("tool_calls") or message.get("function_call"):
        raise ApiError(400, f"{place} calls tools, which this server cannot do", place)
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise ApiError(400, f'{place}.content has a part that is not {{"type": "text", "text": ...}}', f"{place}.content")
        content = "".join(texts)
    if not isinstance(content, str):
        raise ApiError(400, f"{place}.content is {content!r}: expected a text", f"{place}.content")
    return {"role": message["role"], "content": content}


def parse(kind, body):
    """Read a body.

    Args:
        kind (type): CompletionRequest or ChatRequest.
        body (bytes): JSON.

    Raises:
        ApiError: 400, with the field.
    """
    values = json_object(body)
    try:
        return kind.model_validate({name: value for name, value in values.items() if name not in _NO_EFFECT})
    except ValidationError as error:
        raise _first_error(kind, error) from None


def json_object(body):
    """The object (dict) that a body (bytes) holds.

    Raises:
        ApiError: 400, no JSON, no object, a character that UTF-8 cannot hold (no answer could repeat it).
    """
    try:
        values = json.loads(body)
        check_characters([json.dumps(values, ensure_ascii=False)])
    except TokenizerError as error:
        raise ApiError(400, f"the body cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ApiError(400, f"the body is a JSON {type(values).__name__}: expected an object")
    return values


def _first_error(kind, error):
    """ApiError of the first thing that is wrong."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if not _KIND.fullmatch(str(part)))
    if first["type"] == "extra_forbidden":
        hint = did_you_mean(place, kind.model_fields) if len(first["loc"]) == 1 else ""
        return ApiError(400, f"unknown field {place}.{hint}", place, "unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"the field {place} is missing", place, "missing_required_parameter")
    shown = repr(first["input"])
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if len(error.errors()) > 1 and place in _UNIONS:  # pydantic tells what is wrong with each kind
        message = f"expected {_UNIONS[place]}"
    return ApiError(400, f"{place} is {shown}: {message}", place, "invalid_value")


def refused(error):
    """ApiError of a RequestError of the engine, with OpenAI's name of the parameter."""
    names = {"max_new_tokens": "max_tokens"}
    name = names.get(error.parameter, error.parameter)
    code = "context_length_exceeded" if "the context of " in error.rest else "invalid_value"
    return ApiError(400, f"{name} {error.rest}", name, code)


__all__ = ["ApiError", "ChatRequest", "CompletionRequest", "json_object", "parse", "refused"]
