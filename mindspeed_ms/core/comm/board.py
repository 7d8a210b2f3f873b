"""Status board of a shared-memory job: for each rank its process, its state, the reason of its end, and its present wait.

Peers read it while they wait, so that a dead rank, an early end or a deadlock becomes one error message on every rank
concerned.
"""

import hashlib
import os
import time

import numpy as np

from mindspeed_ms.core.comm import processes, shm_files
from mindspeed_ms.core.comm import shm_kernels as kernels
from mindspeed_ms.core.comm.errors import CommTimeoutError, PeerDiedError, PeerLeftError, SharedMemoryError

_MAGIC = 0x6D696E6473706501
_HEADER_BYTES = 4096
_ENTRY_BYTES = 8192
# words (int64) of an entry
_STATE, _PID, _STARTED, _NAMESPACE, _WAITING, _BEAT, _TARGETS, _VERDICT = range(8)
_TARGET_WORDS = slice(64, 320)  # at most 256 ranks that are waited for
_TEXTS = {"wait": 3072, "left": 5120, "verdict": 6656}  # byte offsets; a length word, then UTF-8
_TEXT_BYTES = 1500
JOINED, FINISHED, RAISED = 1, 2, 3
_POLL_SECONDS = 0.002
_DIFFERENT_NAMESPACES = (
    "the ranks run in different pid namespaces (containers) and cannot see each other: start them in one "
    "container, or use backend mccl."
)


class Board:
    """This rank's view of the status board of a job. Creating it waits for all ranks of the job.

    Args:
        identity (str): equal on all ranks of the job, different from other jobs.
        rank (int), size (int): place in the world.
        timeout (float): seconds to wait for the others.

    Raises:
        CommTimeoutError: some rank did not come.
        PeerDiedError: a rank died meanwhile.
        SharedMemoryError: no shared memory, another job has the identity, or ranks in different containers.
    """

    def __init__(self, identity, rank, size, timeout):
        self.rank, self.size = rank, size
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._path = shm_files.path_of(f"mindspeed_ms.u{os.getuid()}.board-{digest}")
        deadline = time.monotonic() + timeout
        if rank == 0:
            shm_files.remove_stale()
            self._create()
        else:
            self._find(deadline, timeout)
        self._join()
        try:
            self._wait_for_all(deadline, timeout)
        except BaseException as error:
            self.leave(error)
            raise
        self._file.unlink()

    # ---- coming together ----------------------------------------------------------------------------------------------

    def _create(self):
        self._refuse_living_owner()
        self.job_name = shm_files.new_job_name()
        temporary = shm_files.path_of(self.job_name + ".board")
        file = shm_files.SharedFile(temporary, self._bytes, purpose="the board of the job")
        file.reserve(0, self._bytes)
        self._map(file)
        own = os.getpid()
        self._header[1:5] = own, processes.start_time(own), processes.namespace(), self.size
        self._write_text(self._header_bytes, 1024, self.job_name)
        self._header[0] = _MAGIC
        kernels.full_fence()
        os.rename(temporary, self._path)
        file.path = self._path

    def _refuse_living_owner(self):
        """Refuse a board of the same name whose owner lives: two jobs would mix. A board without a living owner is stale."""
        try:
            with open(self._path, "rb") as file:
                words = np.frombuffer(file.read(64), np.int64)
        except OSError:
            return
        is_board = words.size >= 4 and words[0] == _MAGIC and words[3] == processes.namespace()
        if is_board and processes.is_alive(int(words[1]), int(words[2])):
            raise SharedMemoryError(
                f"another job with the same identity is starting on this host (its rank 0 is pid "
                f"{words[1]}): give each job its own MINDSPEED_MS_JOB_ID or scheduler port."
            )

    @property
    def _bytes(self):
        return _HEADER_BYTES + self.size * _ENTRY_BYTES

    def _map(self, file):
        self._file = file
        self._header_bytes = np.frombuffer(file.memory, np.uint8, _HEADER_BYTES)
        self._header = self._header_bytes.view(np.int64)
        entries = np.frombuffer(file.memory, np.uint8, self.size * _ENTRY_BYTES, _HEADER_BYTES)
        self._entry_bytes = entries.reshape(self.size, _ENTRY_BYTES)
        self._entries = self._entry_bytes.view(np.int64)
        self._own = self._entries[self.rank]

    def _find(self, deadline, timeout):
        """Map the board that rank 0 of this job made; wait while a stale one is in its place."""
        while not self._try_map():
            if time.monotonic() > deadline:
                raise CommTimeoutError(
                    f"rank 0 did not start communication within {timeout:g} s ({self._path} is missing). Its log says why. "
                    "If the ranks are on several hosts or containers, use backend hccl or mccl: shm needs one shared memory."
                )
            time.sleep(_POLL_SECONDS)

    def _try_map(self):
        try:
            if os.stat(self._path).st_size != self._bytes:
                return False
            file = shm_files.SharedFile(self._path, self._bytes, create=False, purpose="the board of the job")
        except FileNotFoundError:
            return False
        header = np.frombuffer(file.memory, np.int64, 8)
        kernels.full_fence()
        if header[0] == _MAGIC and header[3] != processes.namespace():
            raise SharedMemoryError(_DIFFERENT_NAMESPACES)
        if header[0] != _MAGIC or header[4] != self.size or not processes.is_alive(int(header[1]), int(header[2])):
            file.release()
            return False
        self._map(file)
        self.job_name = self._read_text(self._header_bytes, 1024)
        return True

    def _join(self):
        if self._own[_STATE]:
            raise SharedMemoryError(
                f"rank {self.rank} is already taken by pid {self._own[_PID]}: two processes were started with the same rank."
            )
        pid = os.getpid()
        self._own[[_PID, _STARTED, _NAMESPACE]] = pid, processes.start_time(pid), processes.namespace()
        kernels.full_fence()
        self._own[_STATE] = JOINED
        kernels.full_fence()

    def _wait_for_all(self, deadline, timeout):
        while True:
            kernels.full_fence()
            missing = [rank for rank in range(self.size) if not self._entries[rank, _STATE]]
            if not missing:
                break
            if time.monotonic() > deadline:
                raise CommTimeoutError(
                    f"ranks {missing} did not start communication within {timeout:g} s. Their logs say why. If they are on "
                    "other hosts or in other containers, use backend hccl or mccl: shm needs one shared memory."
                )
            for rank in range(self.size):
                if self._entries[rank, _STATE] and not self.is_alive(rank):
                    raise PeerDiedError(f"rank {rank} (pid {self.pid(rank)}) died while communication started")
                if self.state(rank) == RAISED:
                    raise PeerLeftError(
                        f"rank {rank} (pid {self.pid(rank)}) failed while communication started: {self.reason(rank)}"
                    )
            time.sleep(_POLL_SECONDS)
        if len(set(self._entries[:, _NAMESPACE].tolist())) > 1:
            raise SharedMemoryError(_DIFFERENT_NAMESPACES)

    # ---- what peers ask -----------------------------------------------------------------------------------------------

    def pid(self, rank):
        """Process id of a rank."""
        return int(self._entries[rank, _PID])

    def state(self, rank):
        """State of a rank: JOINED, FINISHED or RAISED."""
        return int(self._entries[rank, _STATE])

    def is_alive(self, rank):
        """True if the rank's process still runs."""
        return processes.is_alive(self.pid(rank), int(self._entries[rank, _STARTED]))

    def reason(self, rank):
        """Why a rank left with RAISED."""
        return self._read_text(self._entry_bytes[rank], _TEXTS["left"])

    def wait_text(self, rank):
        """Text of the call that a rank waits in; empty if it does not wait (or has only begun)."""
        return self._read_text(self._entry_bytes[rank], _TEXTS["wait"]) if self._entries[rank, _WAITING] else ""

    def snapshot(self, rank):
        """(number of the wait, checks since it began, awaited ranks) of a waiting rank; None if it does not wait."""
        kernels.full_fence()
        entry = self._entries[rank]
        number, beat, count = int(entry[_WAITING]), int(entry[_BEAT]), int(entry[_TARGETS])
        targets = tuple(entry[_TARGET_WORDS][:count].tolist())
        kernels.full_fence()
        if not number or int(entry[_WAITING]) != number:
            return None
        return number, beat, targets

    def verdict(self, rank):
        """Text of the deadlock that a rank found; empty if none."""
        kernels.full_fence()
        return self._read_text(self._entry_bytes[rank], _TEXTS["verdict"]) if self._entries[rank, _VERDICT] else ""

    # ---- entries of this rank ------------------------------------------------------------------------------------------

    def publish_wait(self, number, text, targets):
        """Publish the call that this rank waits in and the awaited ranks; `number` counts its waits from 1."""
        self.clear_wait()
        self._write_text(self._entry_bytes[self.rank], _TEXTS["wait"], text)
        targets = targets[:256]
        self._own[_TARGET_WORDS][: len(targets)] = targets
        self._own[_TARGETS] = len(targets)
        self._own[_BEAT] = 0
        kernels.full_fence()
        self._own[_WAITING] = number
        kernels.full_fence()

    def beat(self):
        """Publish that this rank has checked again and still waits."""
        kernels.full_fence()
        self._own[_BEAT] += 1
        kernels.full_fence()

    def clear_wait(self):
        """Publish that this rank no longer waits."""
        kernels.full_fence()
        self._own[_WAITING] = 0
        kernels.full_fence()

    def publish_verdict(self, text):
        """Publish that this rank is in a deadlock."""
        self._write_text(self._entry_bytes[self.rank], _TEXTS["verdict"], text)
        kernels.full_fence()
        self._own[_VERDICT] = 1
        kernels.full_fence()

    def leave(self, exception=None):
        """Publish that this rank makes no more calls, because of an exception or at its exit; then unmap the board."""
        if exception is not None:
            self._write_text(self._entry_bytes[self.rank], _TEXTS["left"], describe(exception))
        kernels.full_fence()
        self._own[_STATE] = FINISHED if exception is None else RAISED
        kernels.full_fence()
        self._file.close()

    @staticmethod
    def _write_text(area, offset, text):
        data = text.encode()[:_TEXT_BYTES]
        area[offset + 8 : offset + 8 + len(data)] = np.frombuffer(data, np.uint8)
        area[offset : offset + 8].view(np.int64)[0] = len(data)

    @staticmethod
    def _read_text(area, offset):
        length = min(max(int(area[offset : offset + 8].view(np.int64)[0]), 0), _TEXT_BYTES)
        return area[offset + 8 : offset + 8 + length].tobytes().decode(errors="replace")


def describe(exception):
    """Text of an exception, in one line."""
    text = " ".join(str(exception).split())
    return f"{type(exception).__name__}: {text}" if text else type(exception).__name__
