"""Worlds return the results and raise the errors of their ranks."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mindspeed_ms.core import comm
from mindspeed_ms.testing.worlds import World

ROOT = Path(__file__).resolve().parents[2]


def _double(value):
    return 2 * value


def _raise(value):
    raise KeyError(value)


def test_results_come_back(world):
    assert world(1)(_double, 4) == [8]


def test_errors_come_back_with_their_traceback(world):
    with pytest.raises(KeyError, match="lost") as caught:
        world(1)(_raise, "lost")
    assert "in _raise" in str(caught.value.__cause__)


def _fail_on_one_and_hang_on_the_other():
    if comm.get_rank() == 0:
        raise ValueError("rank 0 is wrong")
    time.sleep(60)


def test_a_hanging_rank_is_ended_and_the_world_replaced():
    with World(2, grace=1.0) as world:
        started = time.monotonic()
        with pytest.raises(ValueError, match="rank 0 is wrong") as caught:
            world(_fail_on_one_and_hang_on_the_other)
        assert time.monotonic() - started < 10
        assert "did not end in time on rank 1" in str(caught.value.__cause__)
        assert world(comm.get_rank) == [0, 1]


def _unpicklable():
    return lambda: None


def test_what_cannot_be_sent_back_is_an_error(world):
    with pytest.raises(TypeError, match="the result of rank 0 \\(function\\) cannot be sent"):
        world(1)(_unpicklable)


def test_only_importable_functions_run_in_a_world(world):
    with pytest.raises(ValueError, match="expected a function defined at module level"):
        world(1)(lambda: None)


def test_the_calling_process_has_not_imported_mindspore_for_worlds():
    code = "import sys, mindspeed_ms.testing.worlds; sys.exit('mindspore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def _launch(tmp_path, body, *options):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(body))
    command = [sys.executable, "-m", "mindspeed_ms.launch", *options, str(script), "one", "--two"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_launch_runs_a_script_on_all_ranks(tmp_path):
    ended = _launch(
        tmp_path,
        """
        import sys
        import numpy as np
        from mindspeed_ms.core import comm
        comm.init()
        total = comm.world_group().all_reduce(np.ones(1, np.float32))
        print(f"{__name__} {sys.argv[1:]} {total[0]} of {comm.get_world_size()}")
        """,
        "-n",
        "2",
        "--log-dir",
        str(tmp_path / "logs"),
    )
    assert ended.returncode == 0, ended.stderr
    line = "__main__ ['one', '--two'] 2.0 of 2\n"
    assert ended.stdout == line
    assert [(tmp_path / "logs" / f"worker_{rank}.log").read_text() for rank in (0, 1)] == [line, line]


def test_launch_leaves_ctrl_c_to_the_script(tmp_path):
    """Twice, which otherwise kills the ranks."""
    body = """
        import os, signal, time
        for _ in range(2):
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(0.3)
        print("goes on", flush=True)
        """
    ended = _launch(tmp_path, body, "-n", "1", "--leave-ctrl-c")
    assert (ended.returncode, ended.stdout) == (0, "goes on\n")


def test_launch_ends_all_ranks_with_the_status_of_the_one_that_died(tmp_path):
    ended = _launch(
        tmp_path,
        """
        import os, signal
        from mindspeed_ms.core import comm
        comm.init()
        if comm.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.world_group().barrier()
        """,
        "-n",
        "2",
    )
    assert ended.returncode == 128 + signal.SIGKILL
    assert "died in barrier on group world" in ended.stderr
    assert "ended with SIGKILL" in ended.stderr
