"""gpt/pretrain_gpt.sh, launched by msrun: training, resuming, signals, a rank that dies, both CPU backends."""

import fcntl
import os
import pty
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time

import pytest

from tests.app.job import CPU_DEFAULT, SCRIPT, TINY, Job, environment

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path):
    """Starts jobs and sees that none outlives its test: `start(*arguments, folder=..., terminal=...)`."""
    jobs = []

    def begin(*arguments, folder=tmp_path, terminal=None):
        folder.mkdir(exist_ok=True)
        jobs.append(Job(folder, [str(argument) for argument in arguments], terminal))
        return jobs[-1]

    yield begin
    for job in jobs:
        if job.process.poll() is None:
            job.kill()


def test_trains_resumes_and_knows_its_end(start, tmp_path):
    """Losses of a run that was cut at iteration 4 are those of one that was not; a third call has nothing left to do."""
    arguments = ("--train-iters", 8, "--save-interval", 4, "--eval-interval", 4)
    job = start(*arguments)
    assert job.wait() == 0, job.printed()
    whole = job.losses()
    assert sorted(whole) == list(range(1, 9))
    summary = job.metrics()[-1]
    assert {"unigram_entropy", "held_out_loss", "held_out_below_unigram", "first_train_loss"} <= set(summary)
    output = tmp_path / "output"
    assert (output / "loss_curve.png").stat().st_size > 1000
    assert "Epoch: 0, Step: 8, Loss: " in job.log(0) and "Loss: " in job.log(1)
    assert "Iteration: 8/8" in job.printed() and "results in" in job.printed()

    shutil.rmtree(output / "iter_0000008")
    (output / "latest_checkpointed_iteration.txt").write_text("4")
    job = start(*arguments)
    assert job.wait() == 0, job.printed()
    assert "resumed from" in job.log(0) and "Iteration: 5/8" in job.log(0) and "Iteration: 4/8" not in job.log(0)
    assert job.losses() == whole

    job = start(*arguments)
    assert job.wait() == 0, job.printed()
    assert "training is complete" in job.printed() and "--train-iters" in job.printed()
    assert job.losses() == whole


def test_ctrl_c_on_a_terminal_saves_and_ends(start, tmp_path):
    """Ctrl-C goes to the script alone; the ranks save and end with code 0."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    job = start("--train-iters", 100000, terminal=terminal)
    os.close(terminal)
    os.set_blocking(controller, False)
    job.wait_for("Step: 3,")
    os.killpg(job.process.pid, signal.SIGINT)  # what a terminal does with its foreground group
    shown, end = b"", time.monotonic() + 60
    while job.process.poll() is None and time.monotonic() < end:
        shown += _available(controller)
        time.sleep(0.05)
    assert job.wait(10) == 0, shown.decode(errors="replace")
    shown += _available(controller)
    os.close(controller)
    saved = (tmp_path / "output" / "latest_checkpointed_iteration.txt").read_text().strip()
    assert int(saved) >= 3
    assert f"saved checkpoint of iteration {saved}" in job.log(0)
    assert b"step/s" in shown or b"s/step" in shown, shown  # the progress bar


def _available(descriptor):
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""


def test_interrupt_before_the_ranks_listen(start, tmp_path):
    """Ends at once and says so; what an earlier job has logged is not shown as its cause."""
    (tmp_path / "msrun_log").mkdir()
    (tmp_path / "msrun_log" / "worker_1.log").write_text("ValueError: of an earlier job\n")
    job = start("--train-iters", 100000)
    end = time.monotonic() + 60
    while "Starting 2 ranks" not in job.printed() and time.monotonic() < end:
        time.sleep(0.0005)
    os.kill(job.process.pid, signal.SIGINT)
    assert job.wait(30) == 130, job.printed()
    assert "Interrupted before" in job.printed()
    assert "earlier job" not in job.printed() and "Killed" not in job.printed()


def test_killed_rank_ends_the_job(start):
    """Within ten seconds, with a code that is not 0 and one line that names the rank."""
    job = start("--train-iters", 100000)
    job.wait_for("Step: 3,")
    ranks = job.ranks()
    assert sorted(ranks) == [0, 1]
    os.kill(ranks[1], signal.SIGKILL)
    begin = time.monotonic()
    assert job.wait(30) != 0
    assert time.monotonic() - begin < 10
    assert f"rank 1 (pid {ranks[1]}) died in " in job.log(0)
    assert f"rank 1 (pid {ranks[1]}) died in " in job.printed()
    assert not job.ranks() and not os.path.exists(f"/proc/{ranks[0]}")


def test_mccl_gives_the_bits_of_shm(start, tmp_path):
    """Four ranks (tensor parallel 2, data parallel 2): losses and gradient norms of both backends are equal."""
    results = {}
    for backend in ("shm", "mccl"):
        job = start("--world", 4, "--train-iters", 3, "--comm-backend", backend, folder=tmp_path / backend)
        assert job.wait() == 0, job.printed()
        results[backend] = [(line["loss"], line["grad_norm"]) for line in job.metrics() if "loss" in line]
    assert len(results["shm"]) == 3
    assert results["shm"] == results["mccl"]


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--world", "3"], "3"),
        (["--data-path", "nowhere"], "nowhere does not exist"),
        (["--world", "none"], "expected a positive number"),
    ],
)
def test_mistakes_are_found_before_a_rank_starts(start, tmp_path, arguments, expected):
    """Exit code 2 and the value in the message, without msrun; test_careless has what pretrain_gpt.py finds."""
    job = start(*arguments)
    assert job.wait(30) == 2
    assert expected in job.printed(), job.printed()
    assert "Traceback" not in job.printed() and not (tmp_path / "msrun_log").exists()


def test_msrun_that_waits_for_its_scheduler_is_ended(tmp_path):
    """All ranks have ended, msrun itself would wait for ever: it is ended within seconds, with a code that is not 0."""
    (tmp_path / "bin").mkdir()
    # beside python, where the script looks first
    stand_ins = {
        "msrun": "echo 'x.py: error: why' > msrun_log/worker_0.log\nsleep 100",
        "python": f'exec {sys.executable} "$@"',
    }
    for name, body in stand_ins.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    variables = environment()
    variables["PATH"] = os.pathsep.join([str(tmp_path / "bin"), variables["PATH"]])
    begin = time.monotonic()
    job = subprocess.run(
        ["bash", SCRIPT, "--mock-data", "--train-iters", "1"],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert job.returncode not in (0, 2) and "x.py: error: why" in job.stdout and time.monotonic() - begin < 40, job


def test_ranks_that_do_not_fit_end_with_one_line(tmp_path):
    """Started with msrun directly, 3 ranks for tensor parallel 2: one of them says it, once."""
    files = ["--config", *CPU_DEFAULT, "--mock-data"]
    options = ["--worker_num=3", "--local_worker_num=3", f"--master_port={_free_port()}", "--log_dir=logs", "--join=True"]
    job = subprocess.run(
        [shutil.which("msrun", path=environment()["PATH"]), *options, SCRIPT.with_suffix(".py"), *files],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    logs = "".join(path.read_text() for path in (tmp_path / "logs").glob("worker_*.log"))
    said = [line for line in logs.splitlines() if "error" in line]
    assert job.returncode and "Traceback" not in logs and len(said) == 1 and "needs a multiple of 2 ranks" in said[0], logs


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--config", "empty.yaml"], "model_config: is missing"),
        ([*TINY, "--lr", "1e-3", "--train-iters", "1", "--valid-data-path", "empty.yaml"], "without train_data_path"),
        ([*TINY, "--device", "Ascend"], "MINDSPEED_MS_DEVICE is 'CPU'"),
    ],
)
def test_mistakes_of_the_script_alone(tmp_path, arguments, expected):
    """No launcher, no default configuration."""
    (tmp_path / "empty.yaml").touch()
    result = subprocess.run(
        [sys.executable, SCRIPT.with_suffix(".py"), *arguments],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2 and expected in result.stderr, result.stderr
    assert "Traceback" not in result.stderr


def test_environment_is_clean(monkeypatch):
    """A job started from within a job does not take over its place."""
    monkeypatch.setenv("RANK_ID", "7")
    monkeypatch.setenv("MS_WORKER_NUM", "8")
    assert not {"RANK_ID", "MS_WORKER_NUM"} & set(environment())


def test_preparation_prints_the_number_of_ranks_alone(tmp_path):
    """Whatever is logged on the way, here about a tokenizer without an end token, goes to the error stream."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])).save(str(tmp_path / "tokenizer.json"))
    words = [
        *map(str, TINY),
        "--mock-data",
        "--reset-position-ids",
        "--tokenizer-type",
        "PretrainedFromHF",
        "--tokenizer-name-or-path",
        str(tmp_path),
        "--prepare",
    ]
    result = subprocess.run(
        [sys.executable, SCRIPT.with_suffix(".py"), *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "eos" in result.stderr and result.stdout.strip() in ("", "2"), (result.stdout, result.stderr)
