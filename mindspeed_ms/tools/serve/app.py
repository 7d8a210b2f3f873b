"""HTTP application (ASGI, starlette): routes, limits of requests, answers and streams."""

import asyncio
import contextlib
import json
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from mindspeed_ms.core.datasets.tokenizer.interface import TokenizerError
from mindspeed_ms.core.logging import logger
from mindspeed_ms.inference.engine import Request
from mindspeed_ms.inference.sampling import RequestError
from mindspeed_ms.tools.serve import megatron_api
from mindspeed_ms.tools.serve.openai_requests import ApiError, ChatRequest, CompletionRequest, parse, refused
from mindspeed_ms.tools.serve.openai_responses import Answer, ChatCompletions, Completions, usage_of
from mindspeed_ms.tools.serve.service import ServiceClosed, TooManyRequests

_WATCH_SECONDS = 0.25  # between looks whether the client of an answer that is not streamed is still there
_CLIENT_ERRORS = (ApiError, RequestError, TooManyRequests, ServiceClosed)


@dataclass(frozen=True)
class Limits:
    """Limits of requests.

    Args:
        body_bytes (int): longest body.
        body_seconds (float): in which a body must have arrived.
        answer_seconds (float): in which an answer must be complete.
        answers (int): prompts of a request times `n`.
    """

    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    answer_seconds: float = 600.0
    answers: int = 128


class Server:
    """Handlers of the routes.

    Args:
        service (GenerationService): the engine; its tokenizer may be None: then prompts are token ids.
        render_chat (Optional[Callable]): messages -> token ids; None: no chat template.
        model_name (str): name that answers give.
        only_this_model (bool): requests for another name get 404.
        limits (Limits): see there.
    """

    def __init__(self, service, render_chat, model_name, only_this_model=False, limits=None):
        self.service, self.tokenizer, self.render_chat = service, service.engine.tokenizer, render_chat
        self.model_name, self.only_this_model, self.limits = model_name, only_this_model, limits or Limits()

    def app(self):
        """The ASGI application."""
        routes = [
            Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/api", self._guarded(self.megatron, megatron_api.error_response), methods=["PUT", "POST"]),
            Route("/health", self.health, methods=["GET"]),
        ]
        handlers = {404: _no_such_route, 405: _wrong_method}
        return Starlette(routes=routes, exception_handlers=handlers)

    # ---- routes -------------------------------------------------------------------------------------------------------

    async def health(self, request):
        """200 while requests are taken, else 503."""
        running = self.service.is_running
        return JSONResponse({"status": "ok" if running else "shutting down"}, 200 if running else 503)

    async def models(self, request):
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request):
        """One model by name."""
        if request.path_params["name"] != self.model_name:
            return _error_response(self._unknown_model(request.path_params["name"]))
        return JSONResponse(self._model())

    async def completions(self, request, body):
        """`/v1/completions`."""
        wanted = parse(CompletionRequest, body)
        self._check_model(wanted.model)
        params = _params(wanted)
        prompts = await run_in_threadpool(self.encode_prompts, wanted.prompts)
        form = Completions(self.model_name, self.tokenizer, bool(wanted.echo), wanted.logprobs is not None)
        return await self._answer(request, wanted, form, prompts, params)

    async def chat(self, request, body):
        """`/v1/chat/completions`."""
        wanted = parse(ChatRequest, body)
        self._check_model(wanted.model)
        if self.render_chat is None:
            raise ApiError(
                400, "the model has no chat template: use /v1/completions, or start the server with --prompt-type", "messages"
            )
        params, messages = _params(wanted), wanted.plain_messages()
        try:
            prompt = await run_in_threadpool(self.render_chat, messages)
        except ValueError as error:  # what the template itself refuses: roles that do not alternate, ...
            raise ApiError(400, f"messages do not fit the chat template: {error}", "messages") from None
        form = ChatCompletions(self.model_name, self.tokenizer, with_logprobs=bool(wanted.logprobs))
        return await self._answer(request, wanted, form, [tuple(prompt)], params)

    async def megatron(self, request, body):
        """Megatron's `/api`."""
        wanted = megatron_api.parse(body)
        self._check_number(wanted.prompts, "prompts")
        prompts = await run_in_threadpool(self.encode_prompts, wanted.prompts)
        answers = await self._collect(request, [Request(prompt, params) for prompt, params in zip(prompts, wanted.params)])
        return JSONResponse(megatron_api.body_of(wanted, answers, self.tokenizer))

    # ---- prompts ------------------------------------------------------------------------------------------------------

    def encode_prompts(self, prompts):
        """Token ids (list[tuple[int, ...]]) of prompts (str or ids)."""
        try:
            return [self.service.engine.encode(prompt) for prompt in prompts]
        except TokenizerError as error:
            raise ApiError(400, f"prompt: {error}", "prompt", "invalid_value") from None

    # ---- answers ------------------------------------------------------------------------------------------------------

    async def _answer(self, request, wanted, form, prompts, params):
        count = len(prompts) * params.n
        if not prompts:
            raise ApiError(400, "prompt is empty: expected at least one", "prompt", "invalid_value")
        if count > self.limits.answers:
            raise ApiError(400, f"prompts times n is {count}: at most {self.limits.answers} answers a request", "n")
        self._check_number(prompts, "prompt")
        requests = [Request(prompt, params) for prompt in prompts]
        if not wanted.stream:
            return JSONResponse(form.whole(await self._collect(request, requests)))
        events = self._events(requests)
        first = await _first(events)  # what the engine refuses is an answer with a status, not a broken stream
        body = self._stream(form, requests, _chained(first, events), wanted.wants_usage)
        return StreamingResponse(body, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _events(self, requests):
        """Pairs (number of the request, event) of several requests as they come."""
        arrived = asyncio.Queue()

        async def forward(number, one):
            try:
                async with contextlib.aclosing(self.service.events(one)) as events:
                    async for event in events:
                        arrived.put_nowait((number, event))
                arrived.put_nowait((number, None))
            except Exception as error:
                arrived.put_nowait((number, error))

        tasks = [asyncio.ensure_future(forward(number, one)) for number, one in enumerate(requests)]
        remaining = len(tasks)
        late = ApiError(504, f"the answer was not complete after {self.limits.answer_seconds:g} s")
        # not asyncio.wait_for: before Python 3.12 it can swallow a cancellation
        timer = asyncio.get_running_loop().call_later(self.limits.answer_seconds, arrived.put_nowait, (None, late))
        try:
            while remaining:
                number, event = await arrived.get()
                if isinstance(event, Exception):
                    raise event
                if event is None:
                    remaining -= 1
                else:
                    yield number, event
        finally:
            timer.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _collect(self, request, requests):
        """Whole answers (list[Answer], n of each request in turn); given up when the client is gone."""
        answers = _answers(requests)

        async def collect():
            async with contextlib.aclosing(self._events(requests)) as events:
                async for number, event in events:
                    answers[number, event.sample].take(event)

        task = asyncio.ensure_future(collect())
        try:
            while not (await asyncio.wait([task], timeout=_WATCH_SECONDS))[0]:
                if await request.is_disconnected():
                    raise ClientDisconnect
            task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return list(answers.values())

    async def _stream(self, form, requests, events, wants_usage):
        """Lines of a stream of server-sent events; closed by starlette when the client is gone."""
        answers = _answers(requests)
        started = set()
        try:
            async with contextlib.aclosing(events):
                async for number, event in events:
                    answer = answers[number, event.sample]
                    is_first = answer.index not in started
                    started.add(answer.index)
                    answer.take(event)
                    choices = form.first(answer) if is_first else []
                    if choices:
                        yield _line(form.chunk(choices, wants_usage=wants_usage))
                    yield _line(form.chunk([form.delta(answer, event, is_first)], wants_usage=wants_usage))
            if wants_usage:
                yield _line(form.chunk([], usage_of(list(answers.values())), True))
            yield b"data: [DONE]\n\n"
        except _CLIENT_ERRORS as error:  # the status is sent already
            yield _line(_api_error(error).body())

    # ---- checks -------------------------------------------------------------------------------------------------------

    def _guarded(self, handler, error_response=None):
        """Endpoint that reads the body within the limits and answers errors (`handler`: request, body -> response)."""
        respond = error_response or _error_response

        async def endpoint(request):
            try:
                return await handler(request, await self._body(request))
            except ClientDisconnect:
                return JSONResponse({}, 499)  # nobody reads it
            except _CLIENT_ERRORS as error:
                return respond(_api_error(error))
            except Exception:
                logger.exception("a request failed")
                return respond(ApiError(500, "the server failed at this request; see its log"))

        return endpoint

    async def _body(self, request):
        """Body (bytes) of a request.

        Raises:
            ApiError: 415, 413, 408: of another type, too long, too slow.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a page of another site could send text without being asked
            raise ApiError(415, f"the content type is {kind or 'missing'}: expected application/json")
        limit = self.limits.body_bytes
        too_long = ApiError(413, f"the body is longer than {limit} bytes")
        if int(request.headers.get("content-length") or 0) > limit:
            raise too_long

        async def read():
            parts, size = [], 0
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_long
                parts.append(part)
            return b"".join(parts)

        try:
            return await asyncio.wait_for(read(), self.limits.body_seconds)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self.limits.body_seconds:g} s") from None

    def _check_number(self, prompts, name):
        most = self.service.max_requests
        if len(prompts) > most:  # waiting would not help
            raise ApiError(400, f"{name} has {len(prompts)} prompts: this server takes {most} at a time", name, "invalid_value")

    def _check_model(self, name):
        if self.only_this_model and name not in (None, self.model_name):
            raise self._unknown_model(name)

    def _unknown_model(self, name):
        return ApiError(
            404, f"there is no model {name!r} here: this server has {self.model_name!r}", "model", "model_not_found"
        )

    def _model(self):
        return {"id": self.model_name, "object": "model", "created": 0, "owned_by": "mindspeed_ms"}


def _params(wanted):
    try:
        return wanted.params()
    except RequestError as error:
        raise refused(error) from None


def _answers(requests):
    """Answers by (number of the request, sample), in the order of their indices."""
    keys = [(number, sample, one) for number, one in enumerate(requests) for sample in range(one.params.n)]
    return {(number, sample): Answer(index, one.prompt) for index, (number, sample, one) in enumerate(keys)}


async def _first(events):
    """The first item of an iterator that has one."""
    try:
        return await anext(events)
    except BaseException:
        await events.aclose()
        raise


async def _chained(first, events):
    """Iterator over `first` and the rest of `events`; closing it closes them."""
    async with contextlib.aclosing(events):
        yield first
        async for item in events:
            yield item


def _line(body):
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def _api_error(error):
    if isinstance(error, RequestError):
        return refused(error)
    if isinstance(error, TooManyRequests):
        return ApiError(429, str(error), code="rate_limit_exceeded")
    if isinstance(error, ServiceClosed):
        return ApiError(503, str(error))
    return error


def _error_response(error):
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return JSONResponse(error.body(), error.status, headers=headers)


async def _no_such_route(request, error):
    known = "/v1/completions, /v1/chat/completions, /v1/models, /api, /health"
    return _error_response(ApiError(404, f"there is no {request.url.path} here: {known}"))


async def _wrong_method(request, error):
    allowed = (error.headers or {}).get("Allow", "")
    return _error_response(ApiError(405, f"{request.url.path} does not take {request.method}: expected {allowed}"))
