"""One job saves into a folder as long as it lives; whatever it left behind when it was killed keeps nobody out."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from unittest import mock

import pytest

from mindspeed_ms.core.dist_checkpointing import folders, job_lock
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.testing import checkpoint_runs as runs

# a job that saves into a folder: it tells what happened, and answers "check" lines
JOB = """
import sys
from mindspeed_ms.core.dist_checkpointing import folders, job_lock
job_lock.BEAT_SECONDS, job_lock.WATCH_SECONDS, job_lock.LINGER_SECONDS = 0.05, 0.5, 0.1
try:
    print("holds", folders.prepare(sys.argv[1], 5), flush=True)
    for line in sys.stdin:
        job_lock.check(sys.argv[1])
        print("still", flush=True)
except Exception as error:
    print(error, flush=True)
"""


class Job:
    """A process that saves into a folder."""

    def __init__(self, folder):
        self.process = subprocess.Popen(
            [sys.executable, "-c", JOB, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def says(self):
        return self.process.stdout.readline().strip()

    def asked(self):
        """What it says when it is to change something."""
        self.process.stdin.write("check\n")
        self.process.stdin.flush()
        return self.says()


@pytest.fixture
def job(monkeypatch):
    """Factory of jobs; here and there it takes no time to find out that one is dead."""
    for name, value in (("BEAT_SECONDS", 0.05), ("WATCH_SECONDS", 0.5), ("LINGER_SECONDS", 0.1)):
        monkeypatch.setattr(job_lock, name, value)
    made = []

    def make(folder):
        made.append(Job(folder))
        return made[-1]

    yield make
    job_lock.release()
    for one in made:
        one.process.kill()
        one.process.wait()
        one.process.stdout.close()


def test_a_living_job_keeps_others_out(tmp_path, job):
    holder = job(tmp_path)
    temporary = holder.says().partition(" ")[2]
    with pytest.raises(CheckpointError) as caught:
        folders.prepare(str(tmp_path), 6)
    for words in (str(tmp_path), socket.gethostname(), str(holder.process.pid), "--save", job_lock.LOCK_FILE):
        assert words in str(caught.value)
    assert os.path.isdir(temporary) and holder.asked() == "still"
    replaced = tmp_path / "iter_0000005.replaced"  # the holder may be between its two renames
    replaced.mkdir()
    folders.restore_replaced(str(tmp_path))
    assert replaced.is_dir()
    replaced.rmdir()
    holder.process.stdin.close()
    holder.process.wait()
    assert os.listdir(tmp_path) == [os.path.basename(temporary)]
    folders.prepare(str(tmp_path), 6)
    assert not os.path.exists(temporary)


def test_a_killed_job_keeps_nobody_out(tmp_path, job):
    holder = job(tmp_path)
    assert holder.says().startswith("holds")
    holder.process.send_signal(signal.SIGKILL)  # and nobody has asked for its exit status yet
    folders.prepare(str(tmp_path), 6)


def moved(folder, **changes):
    """The same lock, as if another machine had written it."""
    path = folder / job_lock.LOCK_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_number_that_another_process_has_now(tmp_path, job):
    job_lock.hold(tmp_path)
    lines = (tmp_path / job_lock.LOCK_FILE).read_text()
    job_lock.release()
    (tmp_path / job_lock.LOCK_FILE).write_text(lines)
    moved(tmp_path, process_start="1")
    folders.prepare(str(tmp_path), 6)


def test_a_full_disk_leaves_no_half_lock(tmp_path, job, monkeypatch):
    monkeypatch.setattr(job_lock, "_content", lambda job: b"x" * 10**6)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            job_lock.hold(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("content", ["", '{"host": "a'])
def test_a_lock_that_was_cut_off(tmp_path, job, monkeypatch, content):
    monkeypatch.setattr(job_lock, "WATCH_SECONDS", 60.0)  # for jobs on other machines; nobody touches this one
    start = time.monotonic()
    (tmp_path / job_lock.LOCK_FILE).write_text(content)
    folders.prepare(str(tmp_path), 6)
    assert time.monotonic() - start < 5


def test_a_job_on_another_machine(tmp_path, job, monkeypatch):
    holder = job(tmp_path)
    assert holder.says().startswith("holds")
    monkeypatch.setattr(job_lock, "_machine", lambda: "another")
    os.utime(tmp_path / job_lock.LOCK_FILE, (1, 1))  # whatever a clock says
    with pytest.raises(CheckpointError, match=f"process {holder.process.pid} on"):
        folders.prepare(str(tmp_path), 6)
    holder.process.send_signal(signal.SIGSTOP)
    os.waitpid(holder.process.pid, os.WUNTRACED)  # until it has stopped
    began = time.monotonic()
    folders.prepare(str(tmp_path), 6)
    assert time.monotonic() - began >= 0.5
    holder.process.send_signal(signal.SIGCONT)
    said = holder.asked()
    assert "was taken over by another job" in said and str(os.getpid()) in said
    job_lock.check(tmp_path)


def test_of_jobs_that_start_at_once_one_saves(tmp_path, job):
    (tmp_path / job_lock.LOCK_FILE).write_text("")
    jobs = [job(tmp_path) for _ in range(3)]
    said = [one.says() for one in jobs]
    assert [text.startswith("holds") for text in said].count(True) == 1, said
    assert sum("another job saves into" in text for text in said) == 2


def another_job(folder, load=None):
    from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError

    training = {"training_iters": 1}
    try:
        with mock.patch.object(job_lock, "LINGER_SECONDS", 0.1):
            runs.train(folder, training={**training, **({"load_checkpoint": str(load)} if load else {})})
    except CheckpointError as error:
        return str(error)
    return os.listdir(folder)


def test_a_training_is_refused_before_anything_is_built(world, tmp_path, job):
    holder = job(tmp_path)
    assert holder.says().startswith("holds")
    (text,) = world(1)(another_job, tmp_path)
    assert f"another job saves into {tmp_path}" in text
    folder = tmp_path / "free"
    assert job_lock.LOCK_FILE not in world(1)(another_job, folder)[0]
    assert job_lock.LOCK_FILE not in world(1)(another_job, tmp_path / "reader", folder)[0]
