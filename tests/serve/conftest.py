"""A server on a free port over a runner without a model, with a tokenizer of bytes."""

import contextlib
import threading

import httpx
import pytest

from mindspeed_ms.core.datasets.tokenizer.interface import Tokenizer, check_characters
from mindspeed_ms.inference.engine import Engine
from mindspeed_ms.testing.inference import TableRunner
from mindspeed_ms.tools.serve.app import Limits, Server
from mindspeed_ms.tools.serve.http_server import HttpServer
from mindspeed_ms.tools.serve.service import GenerationService
from mindspeed_ms.tools.serve.sockets import bound_socket

EOS = 256


class ByteTokenizer(Tokenizer):
    """Each byte of UTF-8 is a token; id 256 ends an answer."""

    name, eos, vocab_size, vocab = "bytes", EOS, 257, {}

    def encode_batch(self, texts, add_special_tokens=True):
        check_characters(texts)
        return [list(text.encode()) for text in texts]

    def detokenize(self, ids):
        return bytes(number for number in ids if number < EOS).decode(errors="replace")

    def token_to_id(self, token):
        return None

    def add_special_tokens(self, tokens):
        raise NotImplementedError


def render(messages):
    """Ids of a conversation; as templates do, it refuses what it does not know."""
    if messages[0]["role"] not in ("system", "user"):
        raise ValueError(f"a conversation cannot begin with {messages[0]['role']}")
    return list("".join(f"<{one['role']}>{one['content']}" for one in messages).encode())


class Running:
    """A running server: `url`, `client` (httpx), `engine`, `runner`, `service`."""

    def __init__(self, runner, limits, render_chat=render, **settings):
        self.runner = runner
        self.engine = Engine(runner, ByteTokenizer(), (EOS,))
        self.service = GenerationService(self.engine, **settings)
        self._bound = bound_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._bound.getsockname()[1]}"
        app = Server(self.service, render_chat, "made-up", limits=limits).app()
        self._http = HttpServer(app, self._bound)
        self.thread = threading.Thread(target=self.service.run, daemon=True)
        self.client = httpx.Client(base_url=self.url, timeout=30)

    def __enter__(self):
        self._http.__enter__()
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.client.close()
        self.service.stop(now=True)
        self.thread.join(30)
        self._http.__exit__(*error)


@pytest.fixture
def serve():
    """Start servers: `serve(slots=..., limits=..., max_requests=...)`."""
    with contextlib.ExitStack() as stack:

        def start(slots=4, limits=None, render_chat=render, runner=None, **settings):
            runner = runner or TableRunner(257, 256, slots)
            return stack.enter_context(Running(runner, limits or Limits(), render_chat, **settings))

        yield start
