"""Run of the server on this rank: rank 0 listens, the others follow its engine."""

import os
import signal

from mindspeed_ms.core import comm
from mindspeed_ms.core.logging import logger
from mindspeed_ms.inference.engine import Engine
from mindspeed_ms.inference.feed import Feed
from mindspeed_ms.inference.ranks import follow, lead
from mindspeed_ms.tools.model_command.loading import load_model
from mindspeed_ms.tools.serve.app import Limits, Server
from mindspeed_ms.tools.serve.command import listening_socket
from mindspeed_ms.tools.serve.http_server import HttpServer
from mindspeed_ms.tools.serve.service import GenerationService


def run(job, plan):
    """Serve until a signal ends it (ServeJob, Plan); all ranks call it. Returns the exit status."""
    logger.setLevel("INFO")
    loaded = load_model(job, plan)
    _warm_up(loaded.runner)
    engine = Engine(loaded.runner, plan.tokenizer, plan.eos_ids)
    if comm.get_rank() != 0:  # signals are rank 0's
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        follow(engine)
        return 0
    with lead(engine) as leader:
        _serve(job, plan, leader)
    return 0


def _warm_up(runner):
    """Run each kind of step once: what is compiled or read at the first call does not delay the first request."""
    runner.forward([Feed(0, 0, (0, 0), "last")])
    runner.forward([Feed(0, 2, (0,), "last")])
    runner.score([[0, 0]])


def _serve(job, plan, engine):
    service = GenerationService(engine, job.max_requests, job.grace_seconds)
    if plan.prepared is None:
        logger.warning("%s has no chat template: /v1/chat/completions is refused; --prompt-type gives one", job.checkpoint)
    limits = Limits(body_bytes=job.body_bytes, answer_seconds=job.answer_seconds)
    name = job.model_name or os.path.basename(os.path.abspath(job.checkpoint))
    server = Server(service, plan.prepared, name, job.model_name is not None, limits)
    _end_by_signals(service)
    bound = listening_socket(job)
    with HttpServer(server.app(), bound, job.grace_seconds):
        host, port = bound.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        logger.info("serving %s on http://%s:%d; Ctrl-C ends the server", name, shown, port)
        service.run()
    logger.info("the server has ended")


def _end_by_signals(service):
    """SIGINT and SIGTERM end the service; a second one without waiting for running answers."""

    def end(number, frame):
        service.stop(now=not service.is_running)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
