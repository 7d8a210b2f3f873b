"""Generate in the terminal: `python -m mindspeed_ms.tools.generate CHECKPOINT --prompt TEXT`, or `--chat`."""

from mindspeed_ms.tools.generate import command
from mindspeed_ms.tools.model_command.main import exit_with
from mindspeed_ms.tools.model_command.main import main as run_command

RUNNER = "mindspeed_ms.tools.generate.run"


def main(arguments=None):
    """Run a command line (list[str]; default: this process's); returns the exit status."""
    return run_command(arguments, command.job_of, command.PROGRAM, __file__, RUNNER)


if __name__ == "__main__":
    exit_with(main)
