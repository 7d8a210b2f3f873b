"""The server lives on: bodies too long or too slow, clients that hang up, full queues, an engine that fails, the end."""

import json
import socket
import threading
import time

import pytest

from mindspeed_ms.testing.inference import TableRunner
from mindspeed_ms.tools.serve.app import Limits
from mindspeed_ms.tools.serve.sockets import bound_socket

LONG = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}


class SlowRunner(TableRunner):
    """Runner that takes its time."""

    seconds = 0.02

    def forward(self, feeds):
        time.sleep(self.seconds)
        return super().forward(feeds)


def wait_until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def lives(server):
    answer = server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
    return answer.status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_ten_megabytes_are_refused(serve, chunked):
    server = serve()
    body = json.dumps({"prompt": "a" * 10_000_000}).encode()
    content = (body[start : start + 65536] for start in range(0, len(body), 65536)) if chunked else body
    answer = server.client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413 and "4194304 bytes" in answer.json()["error"]["message"]
    assert lives(server)


def test_a_body_that_does_not_come(serve):
    server = serve(limits=Limits(body_seconds=0.2))
    with socket.create_connection(server.url.removeprefix("http://").split(":")) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
        )
        assert b" 408 " in connection.recv(100)
    assert lives(server)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_slot(serve, stream):
    server = serve(runner=SlowRunner(257, 256, 2))
    body = json.dumps({**LONG, "stream": stream, "n": 2}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(server.url.removeprefix("http://").split(":")) as connection:
        connection.sendall(head.encode() + body)
        wait_until(lambda: server.runner.calls)
        if stream:
            connection.recv(500)
    wait_until(lambda: not server.engine.has_work, 2)  # 200 tokens would take 4 s
    assert len(server.runner.calls) < 150 and lives(server)


def test_an_answer_that_takes_too_long(serve):
    server = serve(runner=SlowRunner(257, 256, 2), limits=Limits(answer_seconds=0.2))
    answer = server.client.post("/v1/completions", json=LONG)
    assert answer.status_code == 504 and "0.2 s" in answer.json()["error"]["message"]
    lines = server.client.post("/v1/completions", json={**LONG, "stream": True}).text.split("\n\n")
    assert "0.2 s" in json.loads(lines[-2].removeprefix("data: "))["error"]["message"]
    wait_until(lambda: not server.engine.has_work, 1)


def test_too_many_requests(serve):
    server = serve(runner=SlowRunner(257, 256, 1), max_requests=2)
    body = {**LONG, "max_tokens": 40}
    threads = [threading.Thread(target=server.client.post, args=("/v1/completions",), kwargs={"json": body}) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.service._count == 2)
    answer = server.client.post("/v1/completions", json=LONG)
    assert answer.status_code == 429 and answer.headers["Retry-After"]
    for thread in threads:
        thread.join()
    assert lives(server)


def test_more_prompts_than_are_ever_taken_are_a_mistake(serve):
    server = serve(max_requests=2)
    answer = server.client.post("/v1/completions", json={**LONG, "prompt": ["a"] * 3})
    assert answer.status_code == 400 and "prompt has 3 prompts: this server takes 2" in answer.json()["error"]["message"]
    answer = server.client.put("/api", json={"prompts": ["a"] * 3})
    assert answer.status_code == 400 and "prompts has 3 prompts: this server takes 2" in answer.text
    assert lives(server)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_ends_its_requests_only(serve, stream, monkeypatch):
    server = serve()
    forward = server.runner.forward

    def fail(feeds):
        raise ValueError("made up")

    monkeypatch.setattr(server.runner, "forward", fail)
    answer = server.client.post("/v1/completions", json={**LONG, "stream": stream})
    assert answer.status_code == 503 and "see the server's log" in answer.json()["error"]["message"]
    monkeypatch.setattr(server.runner, "forward", forward)
    assert lives(server)


def test_the_end_lets_running_answers_finish_or_cuts_them(serve):
    server = serve(runner=SlowRunner(257, 256, 2), grace_seconds=30)
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(server.client.post("/v1/completions", json={**LONG, "max_tokens": 30}))
    )
    thread.start()
    wait_until(lambda: server.runner.calls)
    server.service.stop()
    assert server.client.post("/v1/completions", json=LONG).status_code == 503
    assert server.client.get("/health").status_code == 503
    thread.join()
    assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 30
    server.thread.join(5)
    assert not server.thread.is_alive()

    server = serve(runner=SlowRunner(257, 256, 2), grace_seconds=0.1)
    thread = threading.Thread(target=lambda: answers.append(server.client.post("/v1/completions", json=LONG)))
    thread.start()
    wait_until(lambda: server.runner.calls)
    server.service.stop()
    thread.join()
    assert answers[1].status_code == 503
    server.thread.join(2)
    assert not server.thread.is_alive()


def test_a_port_in_use():
    with bound_socket("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(OSError, match="in use"):
            bound_socket("127.0.0.1", first.getsockname()[1])
