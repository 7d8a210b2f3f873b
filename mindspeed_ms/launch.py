"""Launcher: run a script on several ranks of this machine, or of several machines, without a scheduler.

    python -m mindspeed_ms.launch -n 4 script.py arguments...
    python -m mindspeed_ms.launch --nproc_per_node 4 --nnodes 2 --node_rank 0 --master_addr HOST --master_port 29500 script.py

The options are torchrun's. The ranks are forked from a process that has imported MindSpore, so eight of them start in the
time of one. On one machine they communicate through shared memory (backend shm), on several through MindSpore (mccl), after
they have met at the port of node 0. If a rank fails the others are ended, and its exit status is that of the command.
"""

import argparse
import contextlib
import os
import runpy
import select
import signal
import sys
import time
import uuid
from pathlib import Path

from mindspeed_ms.core.comm import forking, shm_files
from mindspeed_ms.spelling import SuggestingParser

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
FAILURE_GRACE_SECONDS = 5.0  # for the ranks to notice by themselves that a peer is gone
SIGNAL_GRACE_SECONDS = 60.0  # for saving after Ctrl-C or SIGTERM
_KILL_AFTER_SECONDS = 3.0
_POLL_SECONDS = 0.05


def main(arguments=None):
    """Start the ranks and wait for them; returns the exit status. In a rank: run the script."""
    options = _parse(arguments)
    set_thread_variables(options.ranks)
    forking.preload()
    launch = _Launch(options)
    rank = launch.start()
    if rank is not None:
        return run_script(rank, options, launch.unique_id)
    return launch.wait()


# options of torchrun that have no counterpart, and what to do instead
_REFUSED = {
    "--standalone": "leave it out: one machine needs no --master_port",
    "--rdzv-backend": "give --master_addr and --master_port",
    "--rdzv-endpoint": "give --master_addr and --master_port",
    "--rdzv-id": "give every job its own --master_port",
    "--rdzv-conf": "--distributed-timeout-minutes of the script is the time that ranks wait for each other",
    "--max-restarts": "start the job again: it resumes from its last checkpoint",
    "--monitor-interval": "ranks are watched all the time",
    "--start-method": "ranks are always forked",
    "--role": "there is one kind of rank",
    "--module": "give the path of a script",
    "--no-python": "the script is Python's",
    "--redirects": "--log-dir writes the output of each rank to a file",
    "--tee": "--log-dir writes the output of each rank to a file and shows the first rank's",
    "--local-addr": "--master_addr decides the network",
}


class _Refuse(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        parser.error(f"{option_string} of torchrun is not available here: {_REFUSED[self.option_strings[0]]}")


def _add(parser, name, **settings):
    """Add an option with torchrun's two spellings, `_` and `-`."""
    parser.add_argument(name, name[:2] + name[2:].replace("_", "-"), **settings)


def _parse(arguments):
    # abbreviations would be looked for among the script's arguments too
    parser = SuggestingParser(
        prog="python -m mindspeed_ms.launch", description="run a script on several ranks", allow_abbrev=False
    )
    parser.add_argument(
        *("-n", "--ranks", "--nproc_per_node", "--nproc-per-node"),
        dest="ranks",
        type=int,
        required=True,
        help="number of ranks on this machine",
    )
    _add(parser, "--nnodes", type=int, default=1, help="number of launchers, one on each machine")
    _add(parser, "--node_rank", type=int, help="number of this one, from 0")
    _add(parser, "--master_addr", help="name or address of the machine with --node_rank 0")
    _add(parser, "--master_port", type=int, help="a free port of that machine, where the ranks meet")
    _add(parser, "--log_dir", type=Path, help="write each rank's output to LOG_DIR/worker_<rank>.log and show the first one's")
    parser.add_argument("--leave-ctrl-c", action="store_true", help="Ctrl-C is the script's, and no reason to end the job")
    for name in _REFUSED:
        parser.add_argument(name, name[:2] + name[2:].replace("-", "_"), action=_Refuse, nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("script", help="Python file to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(arguments)
    problem = _problem(options)
    if problem:
        parser.error(problem)
    options.node_rank = options.node_rank or 0
    options.world_size = options.ranks * options.nnodes
    options.first_rank = options.ranks * options.node_rank
    return options


def _problem(options):
    """What is wrong with the options (str), or None."""
    if options.ranks < 1:
        return f"-n (--nproc_per_node) is {options.ranks}: expected at least 1"
    if options.nnodes < 1:
        return f"--nnodes is {options.nnodes}: expected at least 1"
    if options.nnodes > 1:
        for name in ("node_rank", "master_addr", "master_port"):
            if getattr(options, name) is None:
                return (
                    f"--nnodes is {options.nnodes}, but --{name} is missing: each node gives its own --node_rank and the same "
                    "--master_addr and --master_port"
                )
    if options.node_rank is not None and not 0 <= options.node_rank < options.nnodes:
        return f"--node_rank is {options.node_rank} and --nnodes {options.nnodes}: expected 0 to {options.nnodes - 1}"
    if options.master_port is not None and not 0 < options.master_port < 65536:
        return f"--master_port is {options.master_port}: expected a port between 1 and 65535"
    if not os.path.isfile(options.script):
        return f"script {options.script} does not exist"
    return None


def set_thread_variables(ranks):
    """Set thread variables to this rank's share of the cores, unless the user did. Call it before numpy is imported."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    for name in THREAD_VARIABLES:
        os.environ.setdefault(name, threads)


def run_script(rank, options, unique_id):
    """Run the script as rank `rank`, in the same way as `python script.py arguments`."""
    from mindspeed_ms.core import launch_environment as environments

    local_rank, meets = rank - options.first_rank, options.nnodes > 1 or options.master_port is not None
    host, port = options.master_addr or "localhost", options.master_port
    kind = "torchrun" if meets else "launch"
    environments.set_launch_environment(
        environments.LaunchEnvironment(
            *(rank, options.world_size, local_rank, options.ranks, "" if meets else unique_id, kind),
            master=(host, port) if meets and options.world_size > 1 else None,
        )
    )
    # torchrun's, for scripts that read them
    variables = {"RANK": rank, "WORLD_SIZE": options.world_size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": options.ranks}
    variables.update({"GROUP_RANK": options.node_rank, "MASTER_ADDR": host, environments.RANK_OF_LAUNCH_VARIABLE: 1})
    if meets:
        variables["MASTER_PORT"] = port
    os.environ.update({name: str(value) for name, value in variables.items()})
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = str(Path(options.script).resolve().parent)
    runpy.run_path(options.script, run_name="__main__")
    return 0


class _Launch:
    """Ranks of one job, seen from the process that started them."""

    def __init__(self, options):
        self._options = options
        self.unique_id = uuid.uuid4().hex
        self._ranks = {}  # pid -> rank
        self._pipe = None
        self._log = None
        self._status = 0
        self._deadline = None
        self._signals = 0

    def start(self):
        """Fork the ranks; returns the rank in a rank, None in this process."""
        logs = self._options.log_dir
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
        first = self._options.first_rank
        for rank in range(first, first + self._options.ranks):
            sys.stdout.flush()
            sys.stderr.flush()
            read, write = os.pipe() if logs is not None and rank == first else (None, None)
            pid = os.fork()
            if pid == 0:
                self._become_rank(rank, write)
                return rank
            self._ranks[pid] = rank
            if read is not None:
                os.close(write)
                self._pipe = read
                self._log = open(logs / f"worker_{rank}.log", "wb")  # noqa: SIM115 - closed with the pipe
        signal.signal(signal.SIGINT, signal.SIG_IGN if self._options.leave_ctrl_c else self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)
        return None

    def _become_rank(self, rank, write):
        forking.die_with_parent()
        if self._options.log_dir is None:
            return
        if write is None:
            write = os.open(self._options.log_dir / f"worker_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.close(write)
        if self._pipe is not None:
            os.close(self._pipe)

    def wait(self):
        """Wait for all ranks, end the rest after a failure; returns the exit status."""
        while self._ranks:
            self._show_output(_POLL_SECONDS)
            self._reap()
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._end_rest()
        self._show_output(0)
        shm_files.remove_stale()
        return self._status

    def _reap(self):
        for pid, rank in list(self._ranks.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del self._ranks[pid]
            code = os.waitstatus_to_exitcode(status)
            if code and not self._status:
                self._status = code if code > 0 else 128 - code
                ending = f"status {code}" if code > 0 else signal.Signals(-code).name
                _say(f"rank {rank} (pid {pid}) ended with {ending}")
                self._deadline = self._deadline or time.monotonic() + FAILURE_GRACE_SECONDS

    def _end_rest(self):
        """End the other ranks: SIGTERM first, SIGKILL later."""
        for pid in self._ranks:
            os.kill(pid, signal.SIGTERM if self._signals == 0 else signal.SIGKILL)
        self._signals += 1
        self._deadline = time.monotonic() + _KILL_AFTER_SECONDS

    def _on_signal(self, number, frame):
        """Signal handler: Ctrl-C reaches the ranks by itself; SIGTERM is passed on; the second signal kills."""
        if self._signals or number == signal.SIGTERM:
            for pid in self._ranks:
                os.kill(pid, signal.SIGKILL if self._signals else signal.SIGTERM)
        self._signals += 1
        self._deadline = time.monotonic() + SIGNAL_GRACE_SECONDS

    def _show_output(self, seconds):
        """Print the output of the first rank; wait for it at most `seconds`."""
        if self._pipe is None:
            time.sleep(seconds)
            return
        while select.select([self._pipe], [], [], seconds)[0]:
            data = os.read(self._pipe, 1 << 16)
            if not data:
                os.close(self._pipe)
                self._log.close()
                self._pipe = None
                return
            self._log.write(data)
            self._log.flush()
            try:
                sys.stdout.buffer.write(data)
                sys.stdout.flush()
            except BrokenPipeError:  # the reader is gone, such as a `tee` that the same Ctrl-C ended: the file has all
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            seconds = 0


def _say(text):
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.write(f"mindspeed_ms.launch: {text}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
