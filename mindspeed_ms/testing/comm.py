"""Self-test and benchmark of the communication backends: correctness, latency and bandwidth.

    python -m mindspeed_ms.testing.comm --ranks 8
    python -m mindspeed_ms.testing.comm --ranks 2 --backends mccl

Random calls of every operation, dtype and shape over overlapping groups are compared with numpy bit by bit. shm runs in
forked processes, mccl under msrun. Started by msrun itself, this checks the ranks of that job (on Ascend: hccl). The
exit status is not 0 if anything fails.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __package__ in (None, ""):  # run as a file, by msrun
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from mindspeed_ms.core.comm import registry
from mindspeed_ms.spelling import SuggestingParser
from mindspeed_ms.testing import comm_programs
from mindspeed_ms.testing.comm_timings import measure, table
from mindspeed_ms.testing.worlds import World, close_nursery

_MSRUN_TIMEOUT_SECONDS = 600


def main(arguments=None):
    """Run the checks; returns the exit status."""
    options = _parse(arguments)
    if os.environ.get("MS_ROLE"):
        return _as_rank(options)
    failed = []
    for backend in options.backends or ("shm", "mccl"):
        _say(f"\n{backend}, {options.ranks} ranks")
        try:
            if backend == "shm":
                _in_forked_world(options)
            else:
                _under_msrun(backend, options)
        except Exception as error:  # whatever it is: report it, and try the next backend
            failed.append(backend)
            _say(f"{backend}: FAILED: {type(error).__name__}: {error}")
            if error.__cause__ is not None:
                _say(str(error.__cause__))
    close_nursery()
    _say(f"\nfailed: {', '.join(failed)}" if failed else "\nall checks passed")
    return 1 if failed else 0


def _parse(arguments):
    parser = SuggestingParser(prog="python -m mindspeed_ms.testing.comm", description="check communication backends")
    parser.add_argument("--ranks", type=int, default=8, help="ranks to start (default 8)")
    parser.add_argument("--backends", nargs="+", choices=registry.BACKENDS, help="default: shm and mccl")
    parser.add_argument("--calls", type=int, default=400, help="random calls to check per backend (default 400)")
    parser.add_argument("--seed", type=int, default=1, help="of the random calls")
    parser.add_argument("--seconds", type=float, default=0.2, help="time for each measured figure (default 0.2)")
    parser.add_argument("--no-table", action="store_true", help="check only, measure nothing")
    options = parser.parse_args(arguments)
    if options.ranks < 1:
        parser.error(f"--ranks is {options.ranks}: expected at least 1")
    return options


def _in_forked_world(options):
    with World(options.ranks) as world:
        _say(world(check_rank, options)[0])


def _under_msrun(backend, options):
    """Start this file's ranks under msrun."""
    msrun = Path(sys.executable).with_name("msrun")
    with tempfile.TemporaryDirectory(prefix="mindspeed_ms-") as logs:
        command = [
            str(msrun) if msrun.exists() else "msrun",
            f"--worker_num={options.ranks}",
            f"--local_worker_num={options.ranks}",
            f"--master_port={_free_port()}",
            f"--log_dir={logs}",
            "--join=True",
            __file__,
            f"--ranks={options.ranks}",
            f"--backends={backend}",
            f"--calls={options.calls}",
            f"--seed={options.seed}",
            f"--seconds={options.seconds}",
            *(["--no-table"] if options.no_table else []),
        ]
        # msrun starts whatever `python` the PATH gives
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        ended = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_MSRUN_TIMEOUT_SECONDS,
        )
        output = Path(logs, "worker_0.log").read_text(encoding="utf-8") if Path(logs, "worker_0.log").exists() else ""
        if ended.returncode:
            raise RuntimeError(f"msrun ended with status {ended.returncode}\n{ended.stdout[-4000:]}\n{output[-4000:]}")
        _say("\n".join(line for line in output.splitlines() if not line.startswith("[")))


def _as_rank(options):
    """Run as one rank of a job that msrun started."""
    registry.init(options.backends[0] if options.backends else None)
    text = check_rank(options)
    if registry.get_rank() == 0:
        _say(text)
    registry.destroy()
    return 0


def check_rank(options):
    """Check and measure on this rank, with communication started; returns the report."""
    started = time.monotonic()
    on_host = registry.get_backend() != "hccl"
    taken = comm_programs.run(options.seed, options.calls, as_tensors=not on_host)
    if on_host:
        taken += comm_programs.run(options.seed + 1, options.calls // 4, as_tensors=True)
    total = sum(registry.world_group().all_gather_object(taken))
    report = f"{total} calls on all ranks correct ({time.monotonic() - started:.1f} s)"
    if options.no_table or registry.get_world_size() == 1:
        return report
    return f"{report}\n{table(measure(options.seconds))}"


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
