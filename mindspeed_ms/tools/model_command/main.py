"""Main function of the commands that run a model: check the job, start ranks, run it. Imports no MindSpore before that."""

import contextlib
import importlib
import os
import sys

from mindspeed_ms.core.launch_environment import LaunchError, launch_environment
from mindspeed_ms.core.logging import setup_logging
from mindspeed_ms.tools.model_command.job import JobError, plan


def main(arguments, job_of, program, script, runner):
    """Run a command line; returns the exit status: 0, 2 for a mistake, 130 after Ctrl-C.

    More than one rank is started by itself, unless msrun or mindspeed_ms.launch has done so.

    Args:
        arguments (Optional[list[str]]): None: this process's.
        job_of (Callable): arguments -> Job.
        program (str): name of the command in messages.
        script (str): file that each rank runs.
        runner (str): module whose `run` does the job.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    setup_logging("WARNING")
    try:
        job = job_of(arguments)
        with contextlib.redirect_stdout(sys.stderr):  # log lines: the standard output has answers only
            planned = plan(job)
    except JobError as error:
        if _is_one_of_several():
            return _refused_by_one_rank(program, error)
        sys.stderr.write(f"{program}: error: {error}\n")
        return 2
    # what runs a model is imported here: a mistake is found sooner
    from mindspeed_ms.core.comm import leave_if_scheduler
    from mindspeed_ms.training.user_errors import in_one_line

    leave_if_scheduler()
    ranks = planned.checkpoint.ranks
    with in_one_line(program):
        if ranks > 1 and launch_environment().world_size == 1:
            _start_ranks(ranks, script, arguments)
        return importlib.import_module(runner).run(job, planned)


def _is_one_of_several():
    """Whether this process is a rank of a launcher, msrun's or ours; imports no MindSpore."""
    try:
        return launch_environment().world_size > 1
    except LaunchError:
        return False


def _refused_by_one_rank(program, error):
    """End with a mistake that every rank of a launcher finds: one of them tells it."""
    from mindspeed_ms.training.user_errors import in_one_line

    with in_one_line(program):
        raise error


def _start_ranks(ranks, script, arguments):
    """Become the launcher of this command's ranks; does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    launch = [sys.executable, "-m", "mindspeed_ms.launch", "-n", str(ranks), "--leave-ctrl-c", os.path.abspath(script)]
    os.execv(sys.executable, [*launch, *arguments])


def exit_with(status):
    """End a script with the status of `main`; Ctrl-C while it starts or loads ends it without a traceback."""
    try:
        sys.exit(status())
    except KeyboardInterrupt:
        sys.exit(130)
