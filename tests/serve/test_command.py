"""The command: one rank and two give the same answers, signals end it, mistakes are one line."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import openai
import pytest

from mindspeed_ms.tools.serve.sockets import bound_socket
from tests.documented.sandbox import Sandbox, write_chat_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Hugging Face folder of random weights with tokenizer and chat template."""
    sandbox = Sandbox(tmp_path_factory.mktemp("model"))
    write_chat_model(sandbox, "model")
    return str(sandbox.folder / "model")


class Command:
    """A running server command; `url` when it serves."""

    def __init__(self, *arguments):
        command = [sys.executable, "-m", "mindspeed_ms.tools.serve", *arguments, "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines, self.url = [], None
        threading.Thread(target=self._read, daemon=True).start()
        end = time.monotonic() + 120
        while self.url is None:
            assert self.process.poll() is None and time.monotonic() < end, "".join(self.lines)
            time.sleep(0.05)

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)
            found = re.search(r"on (http://\S+);", line)
            self.url = found[1] if found else self.url

    def end(self, number):
        """Send a signal and wait; returns the exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM)])
def test_serve_and_end(model, ranks, number):
    command = Command(model, "--tensor-model-parallel-size", str(ranks), "--max-sequence-length", "64", "--slots", "2")
    try:
        client = openai.OpenAI(base_url=command.url + "/v1", api_key="none", max_retries=0)
        request = {"model": "model", "messages": [{"role": "user", "content": "def main"}], "max_tokens": 12, "temperature": 0}
        whole = client.chat.completions.create(**request)
        streamed = client.chat.completions.create(stream=True, **request)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == whole.choices[0].message.content
        answer = httpx.post(command.url + "/v1/completions", json={"prompt": "import", "max_tokens": 4, "logprobs": 0})
        values = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
        assert len(values) == 4 and all(value < 0 for value in values)
        assert command.end(number) == 0
    finally:
        command.process.kill()
    assert "the server has ended" in command.lines[-1]
    assert not any("Traceback" in line for line in command.lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere"),
        (["{model}", "--slots", "0"], "--slots"),
        (["{model}", "--port", "70000"], "--port"),
        (["{model}", "--port", "{taken}"], "choose another --port"),
        (["{model}", "--host", "203.0.113.7"], "expected an address of this machine"),
        (["{model}", "--prompt-type", "nonsense"], "--prompt-type"),
        (["{model}", "--max-sequence-length", "0"], "--max-sequence-length"),
        (["{model}", "--max-token", "5"], "unrecognized arguments: --max-token"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_loaded(model, arguments, words):
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        filled = [one.format(model=model, taken=taken.getsockname()[1]) for one in arguments]
        command = [sys.executable, "-m", "mindspeed_ms.tools.serve", *filled]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
