"""Real msrun jobs: the mccl backend, and shm under msrun when a rank is killed; mccl without msrun."""

import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.comm.test_world import SUM, free_port, node_command, together

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# msrun starts whatever `python` the PATH gives
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def test_mccl_gives_the_same_bits():
    command = [
        sys.executable,
        "-m",
        "mindspeed_ms.testing.comm",
        "--ranks",
        "2",
        "--backends",
        "mccl",
        "--calls",
        "80",
        "--no-table",
    ]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout
    assert "calls on all ranks correct" in ended.stdout


def test_a_killed_rank_ends_the_msrun_job(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, time
        from pathlib import Path
        from mindspeed_ms.core import comm
        comm.init(backend="shm")
        group = comm.new_group([0, 1], "tp-0-1")
        group.barrier()
        if comm.get_rank() == 1:
            Path(__file__).with_name("killed").write_text(f"{os.getpid()} {time.time()}")
            os.kill(os.getpid(), signal.SIGKILL)
        group.barrier()
        """)
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ended = subprocess.run(
        [
            str(Path(sys.executable).with_name("msrun")),
            "--worker_num=2",
            "--local_worker_num=2",
            f"--master_port={port}",
            f"--log_dir={tmp_path}/logs",
            "--join=True",
            str(script),
        ],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    pid, killed = (tmp_path / "killed").read_text().split()
    assert ended.returncode != 0
    assert time.time() - float(killed) < 10
    assert f"rank 1 (pid {pid}) died in barrier on group tp-0-1" in (tmp_path / "logs" / "worker_0.log").read_text()


KILLED = "import signal, time; os.kill(os.getpid(), signal.SIGKILL if comm.get_rank() else 0)\ntime.sleep(60)"


@pytest.mark.parametrize("ends", ["", KILLED], ids=["end", "killed"])
def test_two_launchers_without_shared_memory(tmp_path, ends):
    """As on two machines: MindSpore's communication without msrun; a killed rank of one ends the other at once."""
    script, port = tmp_path / "script.py", free_port()
    script.write_text(textwrap.dedent(SUM) + "\ncomm.world_group().barrier()\n" + ends)
    start = time.monotonic()
    commands = [node_command(script, node, 2, 1, port) for node in (0, 1)]
    ended = together(commands, [{"MINDSPEED_MS_COMM_BACKEND": "mccl"}] * 2)
    assert [output for _, output, _ in ended] == [f"mccl {node} 2 {node} 2 0 {port}\n" for node in (0, 1)]
    assert [status for status, _, _ in ended] == ([1, 137] if ends else [0, 0])
    assert time.monotonic() - start < 50
    if ends:
        assert "died: this rank ends too" in ended[0][2]
