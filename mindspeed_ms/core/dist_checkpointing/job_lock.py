"""Lock of an output folder: the file `saving_job.json` names the one job that may save there while it lives.

No flock, which shared disks may lack or grant to everybody. The holder is the process of rank 0: on the same machine (same
boot, same process namespace) its pid and start time show whether it lives. On other machines its heartbeat does: it touches
the file every few seconds, and a job that waits for the folder watches for a change. No clocks are compared. A file that a
killed job left is taken over. The new holder writes its own name, and a holder that finds another name before it changes
something stops: so even a job that was taken for dead (suspended for a minute) destroys nothing.

Readers ignore it.
"""

import atexit
import json
import os
import secrets
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.logging import logger

LOCK_FILE = "saving_job.json"
BEAT_SECONDS = 5.0
WATCH_SECONDS = 60.0  # without a beat a job on another machine is dead; a machine may be busy for some of them
LINGER_SECONDS = 5.0  # a process that is being killed on this machine may need a moment
_SETTLE_SECONDS = 0.5  # two that take over at once: the last one has it, the other one sees that after this time
_held = {}  # real path: _Holding of this process


@dataclass(frozen=True)
class Job:
    """Job that saves into a folder, as recorded in its lock file.

    Attributes:
        host (str): name of the machine.
        pid (int): of rank 0.
        machine (str): boot and namespace of the pid; "" if unknown.
        process_start (str): when the process started, in the system's ticks: pids come again.
        since (str): local time, for people.
        token (str): another one for every job.
    """

    host: str
    pid: int
    machine: str
    process_start: str
    since: str
    token: str

    def __str__(self):
        return f"process {self.pid} on {self.host}, since {self.since}"


def hold(folder):
    """Lock a folder for the saves of this process, until `release`; may be called again.

    Raises:
        CheckpointError: a living job saves there.
        OSError: nothing can be written there.
    """
    path = os.path.realpath(folder)
    holding = _held.get(path)
    if holding is not None and holding.process == os.getpid():
        check(folder)
        return
    own = Job(
        socket.gethostname(),
        os.getpid(),
        _machine(),
        (_process(os.getpid()) or "") if _machine() else "",
        time.strftime("%Y-%m-%d %H:%M:%S"),
        secrets.token_hex(8),
    )
    lock = os.path.join(path, LOCK_FILE)
    if not _create(lock, own):
        _wait_until_dead(folder, lock, own)
        _replace(lock, own)
        time.sleep(_SETTLE_SECONDS)
        now = _read(lock)[0]
        if now != own:
            raise _refusal(folder, now)
    _held[path] = _Holding(lock, own)


def check(folder):
    """Check, before a change in a locked folder, that this process still holds the lock.

    Raises:
        CheckpointError: another job has taken it over meanwhile.
    """
    holding = _held.get(os.path.realpath(folder))
    if holding is None or holding.process != os.getpid():
        return
    now = _read(holding.lock)[0]
    if now is not None and now != holding.job:
        raise CheckpointError(
            f"{folder} was taken over by another job ({now}), which found no sign of life of this one for "
            f"{WATCH_SECONDS:g} s: this job saves nothing there any more."
        )
    if now is None:
        _replace(holding.lock, holding.job)  # somebody has deleted it


def is_free(folder):
    """Whether no other process saves into a folder, judged by one look at its lock."""
    path = os.path.realpath(folder)
    job = _read(os.path.join(path, LOCK_FILE))[0]
    holding = _held.get(path)
    return job is None or (holding is not None and holding.job == job) or _is_alive(job) is False


def holder(folder):
    """(Job that holds a folder's lock, whether it lives: True, False, or None if that cannot be seen); (None, None) without."""
    job = _read(os.path.join(folder, LOCK_FILE))[0]
    return job, None if job is None else _is_alive(job)


def check_free(folder):
    """Check, without locking it, that no living job on this machine saves into a folder; waits a moment for one that ends.

    Raises:
        CheckpointError: one does.
    """
    began = time.monotonic()
    job, is_alive = holder(folder)
    while is_alive:
        if time.monotonic() - began >= LINGER_SECONDS:
            raise _refusal(folder, job)
        time.sleep(0.2)
        job, is_alive = holder(folder)


def release(folder=None):
    """Unlock a folder; None: all folders of this process."""
    for path in list(_held) if folder is None else [os.path.realpath(folder)]:
        holding = _held.pop(path, None)
        if holding is not None and holding.process == os.getpid():
            holding.end()


atexit.register(release)


class _Holding:
    """Lock that this process holds on a folder, with its heartbeat thread."""

    def __init__(self, lock, job):
        self.lock = lock
        self.job = job
        self.process = os.getpid()  # a forked child inherits the object, not the lock
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="checkpoint folder", daemon=True)
        self._thread.start()

    def _beat(self):
        while not self._over.wait(BEAT_SECONDS):
            try:
                if _read(self.lock)[0] == self.job:
                    os.utime(self.lock)
            except OSError:
                pass  # the disk is away for a moment; the next beat tries again

    def end(self):
        self._over.set()
        self._thread.join()
        try:
            if _read(self.lock)[0] == self.job:
                os.unlink(self.lock)
        except OSError:
            logger.warning("%s could not be deleted; the next job finds out that this one has ended", self.lock)


def _create(lock, job):
    """Create the lock file; False if it exists."""
    try:
        descriptor = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    with open(descriptor, "wb") as file, _removed_if_it_fails(lock):
        file.write(_content(job))
        file.flush()
    return True


def _replace(lock, job):
    temporary = f"{lock}.{job.token}"
    with _removed_if_it_fails(temporary):
        with open(temporary, "wb") as file:
            file.write(_content(job))
        os.replace(temporary, lock)


@contextmanager
def _removed_if_it_fails(path):
    """Context manager: delete `path` on OSError, so that no partial lock file remains."""
    try:
        yield
    except OSError:
        with suppress(OSError):
            os.unlink(path)
        raise


def _content(job):
    return json.dumps(asdict(job)).encode()


def _read(lock):
    """(Job or None, state that changes with every beat) of a lock file. Opening it makes a network disk read it anew."""
    try:
        with open(lock, "rb") as file:
            state = os.fstat(file.fileno())
            content = file.read()
    except OSError:
        return None, None
    try:
        job = Job(**json.loads(content))
    except (ValueError, TypeError):
        job = Job("an unknown machine", 0, "", "", "an unknown time", content.hex())  # cut off by a crash
    return job, (state.st_mtime_ns, content)


def _wait_until_dead(folder, lock, own):
    """Wait until the holder of a lock is dead. Raises CheckpointError if it lives."""
    job, beat = _read(lock)
    began, told = time.monotonic(), False
    # an unreadable file is being written, or was cut off by a crash: nobody touches it
    patience = WATCH_SECONDS if job is None or job.pid else LINGER_SECONDS
    while job is not None:
        alive = _is_alive(job)
        waited = time.monotonic() - began
        if alive is False:
            logger.warning("%s is taken over from a job that has ended without saying so (%s)", folder, job)
            return
        if alive and waited > LINGER_SECONDS:
            raise _refusal(folder, job)
        if alive is None and waited > patience:
            logger.warning("%s is taken over from a job that showed no sign of life for %g s (%s)", folder, patience, job)
            return
        if not told and alive is None:
            logger.info("%s: looking for up to %g s whether the job that saved there still lives (%s)", folder, patience, job)
            told = True
        time.sleep(min(0.2, BEAT_SECONDS))
        job, now = _read(lock)
        if job is not None and now != beat:
            raise _refusal(folder, job)


def _refusal(folder, job):
    return CheckpointError(
        f"another job saves into {folder}: {job}. Give this job a folder of its own (output_dir, --save), "
        f"or end the other one. ({LOCK_FILE} in that folder names it; a job that is dead does not "
        "keep others out.)"
    )


def _is_alive(job):
    """Whether the process of a job lives: True, False, or None if that cannot be seen from here."""
    if not job.machine or job.machine != _machine():
        return None
    return _process(job.pid) == job.process_start


def _machine():
    """Scope (str) in which pids are unique: boot and pid namespace; "" if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process(pid):
    """Start time (str) of a living process, in ticks since the boot; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
