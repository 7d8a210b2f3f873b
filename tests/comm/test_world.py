"""Worlds return the results and raise the errors of their ranks."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mindspeed_ms import launch
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


@pytest.mark.parametrize("options", [[], ["--log_dir", "logs"]])
def test_a_reader_of_the_output_that_is_gone_ends_nothing(tmp_path, options):
    """Ctrl-C ends the `tee` behind a training too, which then still saves."""
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            """
            import time
            from mindspeed_ms.core.logging import logger, setup_logging
            setup_logging()
            for number in range(20):
                logger.info("line %d", number)
                time.sleep(0.02)
            open("saved", "w").close()
            """
        )
    )
    command = [sys.executable, "-m", "mindspeed_ms.launch", "-n", "1", *options, "script.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    job = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "line 0" in job.stdout.readline()
    job.stdout.close()
    assert (job.stderr.read(), job.wait(60)) == ("", 0)
    assert (tmp_path / "saved").exists()
    if options:
        assert "line 19" in (tmp_path / "logs" / "worker_0.log").read_text()


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


SUM = """
    import os
    import numpy as np
    from mindspeed_ms.core import comm
    comm.init()
    total = comm.world_group().all_reduce(np.ones(1, np.float32))
    values = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")]
    line = " ".join(str(value) for value in [comm.get_backend(), comm.get_rank(), int(total[0]), *values])
    os.write(1, f"{line}\\n".encode())  # one write: lines of ranks that share a pipe stay whole
    """


def free_port():
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def together(commands, variables, seconds=120):
    """Run commands at once: (exit status, standard output, standard error) of each."""
    common, pipes = {**os.environ, "PYTHONPATH": str(ROOT)}, {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [
        subprocess.Popen(command, env={**common, **own}, text=True, **pipes) for command, own in zip(commands, variables)
    ]
    printed = [process.communicate(timeout=seconds) for process in started]
    return [(process.returncode, *texts) for process, texts in zip(started, printed)]


def node_command(script, node, nodes, ranks, port):
    options = f"--nproc_per_node {ranks} --nnodes {nodes} --node-rank {node} --master_addr localhost --master-port {port}"
    return [sys.executable, "-m", "mindspeed_ms.launch", *options.split(), str(script)]


def test_two_launchers_make_one_world(tmp_path):
    """With the spellings and the variables of torchrun."""
    script, port = tmp_path / "script.py", free_port()
    script.write_text(textwrap.dedent(SUM))
    ended = together([node_command(script, node, 2, 2, port) for node in (1, 0)], [{}, {}])
    assert [status for status, _, _ in ended] == [0, 0], ended
    lines = [[f"shm {2 * node + local} 4 {2 * node + local} 4 {local} {port}" for local in (0, 1)] for node in (1, 0)]
    assert [sorted(output.splitlines()) for _, output, _ in ended] == lines


def test_ranks_of_another_launcher_make_one_world(tmp_path):
    """Only by the variables, from processes that share nothing else; one that is killed ends the other."""
    script, port = tmp_path / "script.py", free_port()
    script.write_text(
        textwrap.dedent(SUM)
        + textwrap.dedent("""
        import signal
        if comm.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.world_group().barrier()
        """)
    )
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    ended = together([[sys.executable, str(script)]] * 2, [{**common, "RANK": "0"}, {**common, "RANK": "1"}])
    assert ended[0][1] == f"shm 0 2 0 2 None {port}\n"
    assert (ended[0][0], ended[1][0]) == (1, -signal.SIGKILL)
    assert "died in barrier on group world" in ended[0][2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-n 0", "-n (--nproc_per_node) is 0: expected at least 1"),
        ("-n 1 --nnodes 0", "--nnodes is 0: expected at least 1"),
        ("-n 1 --nnodes 2 --node_rank 1 --master_addr a", "--nnodes is 2, but --master_port is missing"),
        ("-n 1 --nnodes 2 --master_addr a --master_port 1", "--nnodes is 2, but --node_rank is missing"),
        ("-n 1 --nnodes 2 --node_rank 2 --master_addr a --master_port 1", "--node_rank is 2 and --nnodes 2: expected 0 to 1"),
        ("-n 1 --node-rank 1", "--node_rank is 1 and --nnodes 1: expected 0 to 0"),
        ("-n 1 --master_port 0", "--master_port is 0: expected a port"),
        ("-n 1 --nnodes 1:4", "--nnodes"),
        ("-n 1 --rdzv_backend c10d", "--rdzv_backend of torchrun is not available here: give --master_addr and --master_port"),
        ("-n 1 --max-restarts 3", "--max-restarts of torchrun is not available here: start the job again"),
    ],
)
def test_launch_options(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        launch._parse([*options.split(), __file__])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error


def test_spellings_of_torchrun():
    for options in ("--nproc_per_node 3", "--nproc-per-node=3", "-n 3", "--ranks 3"):
        assert launch._parse([*options.split(), __file__, "--nnodes", "7"]).ranks == 3
    parsed = launch._parse("-n 2 --nnodes=3 --node-rank 1 --master-addr a --master_port=5 --log-dir d".split() + [__file__])
    assert (parsed.world_size, parsed.first_rank, parsed.master_addr, parsed.master_port) == (6, 2, "a", 5)
