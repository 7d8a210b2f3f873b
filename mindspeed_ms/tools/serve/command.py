"""Command line of tools.serve."""

import argparse
import errno
import importlib.util
from dataclasses import dataclass

from mindspeed_ms.spelling import SuggestingParser
from mindspeed_ms.tasks.preprocess.templates import FROM_TOKENIZER
from mindspeed_ms.tools.model_command import flags
from mindspeed_ms.tools.model_command.job import Job, JobError
from mindspeed_ms.tools.serve.sockets import bound_socket

PROGRAM = "python -m mindspeed_ms.tools.serve"


@dataclass
class ServeJob(Job):
    """What a command line asks for: the model as in Job, and the settings of the server.

    Attributes:
        host (str), port (int): where to listen.
        model_name (Optional[str]): the only name that requests may give.
        answers_at_a_time (int), max_requests (int), body_bytes (int), answer_seconds (float), grace_seconds (float): limits.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str | None = None
    answers_at_a_time: int = 8
    max_requests: int = 64
    body_bytes: int = 4 * 2**20
    answer_seconds: float = 600.0
    grace_seconds: float = 5.0

    @property
    def slots(self):
        """Cache slots (int)."""
        return self.answers_at_a_time


def parser():
    """The argparse.ArgumentParser."""
    result = SuggestingParser(
        prog=PROGRAM,
        description="Serve a model over HTTP: OpenAI's /v1/completions and /v1/chat/completions, Megatron's /api.",
        allow_abbrev=False,
    )
    result.add_argument("checkpoint", help="folder of a run, of a checkpoint (ours or Megatron's), or of Hugging Face")
    result.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1; 0.0.0.0: all of the machine)")
    result.add_argument("--port", type=_port, default=8000, metavar="N", help="port (8000); 0: a free one, which the log names")
    result.add_argument("--model-name", metavar="NAME", help="requests for another model get 404 (default: any name is taken)")
    result.add_argument(
        "--slots", type=flags.positive, default=8, metavar="N", help="answers generated at a time (8); others wait"
    )
    result.add_argument(
        "--max-requests", type=flags.positive, default=64, metavar="N", help="waiting or running; more get 429 (64)"
    )
    result.add_argument("--max-body-bytes", type=flags.positive, default=4 * 2**20, metavar="N", help="longest body (4194304)")
    result.add_argument("--timeout", type=_seconds, default=600.0, metavar="S", help="an answer is given up after them (600)")
    result.add_argument("--grace", type=_seconds, default=5.0, metavar="S", help="of running answers at the end (5)")
    result.add_argument("--prompt-type", metavar="NAME", help="template of templates.json for chats; default: the folder's own")
    result.add_argument("--prompt-type-path", metavar="FILE", help="a templates.json in place of the package's")
    result.add_argument("--enable-thinking", choices=("true", "false"), help="handed to the chat template, which may heed it")
    result.add_argument("--tokenizer-name-or-path", metavar="FOLDER", help="a tokenizer in place of the checkpoint's")
    flags.add_model_flags(result)
    result.set_defaults(system=None, history_turns=None)
    return result


def job_of(arguments):
    """ServeJob of a command line (list[str]).

    Raises:
        JobError: flags that contradict each other, a package that is missing, an address that is taken.
    """
    options = parser().parse_args(arguments)
    if options.prompt_type_path and options.prompt_type in (None, FROM_TOKENIZER):
        raise JobError("--prompt-type-path needs --prompt-type, the name of a template in that file.")
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise JobError(f"the server needs {name}. Run: pip install 'mindspeed_ms[serve]'")
    job = ServeJob(
        options.checkpoint,
        [],
        [],
        iteration=options.iteration,
        adapter=options.adapter,
        dtype=options.dtype,
        max_sequence_length=options.max_sequence_length,
        host=options.host,
        port=options.port,
        model_name=options.model_name,
        answers_at_a_time=options.slots,
        max_requests=options.max_requests,
        body_bytes=options.max_body_bytes,
        answer_seconds=options.timeout,
        grace_seconds=options.grace,
        **flags.model_arguments(options),
    )
    listening_socket(job).close()  # before ranks start
    return job


def listening_socket(job):
    """Bound socket of a ServeJob.

    Raises:
        JobError: the address is in use or not of this machine.
    """
    try:
        return bound_socket(job.host, job.port)
    except OSError as error:
        hint = "choose another --port" if error.errno == errno.EADDRINUSE else "expected an address of this machine"
        raise JobError(f"cannot listen on --host {job.host} --port {job.port}: {error.strerror or error}; {hint}.") from None


def _port(text):
    value = int(text)
    if not 0 <= value < 65536:
        raise argparse.ArgumentTypeError(f"{text}: expected a number from 0 to 65535")
    return value


def _seconds(text):
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: expected a number of seconds above 0")
    return value
