"""Serve a model over HTTP: `python -m mindspeed_ms.tools.serve CHECKPOINT`; Ctrl-C or SIGTERM ends the server."""

from mindspeed_ms.tools.model_command.main import exit_with
from mindspeed_ms.tools.model_command.main import main as run_command
from mindspeed_ms.tools.serve import command


def main(arguments=None):
    """Run a command line (list[str]; default: this process's); returns the exit status."""
    return run_command(arguments, command.job_of, command.PROGRAM, __file__, "mindspeed_ms.tools.serve.run")


if __name__ == "__main__":
    exit_with(main)
