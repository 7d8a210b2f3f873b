"""Files in shared memory: stale ones are passed over and removed, a full file system and several hosts are clear errors."""

import errno
import os
import signal
import time
from pathlib import Path
from unittest import mock

import numpy as np

from mindspeed_ms.core import comm
from mindspeed_ms.core.comm import processes, shm_files
from mindspeed_ms.core.comm.errors import SharedMemoryError


def test_a_reused_pid_is_not_the_same_process():
    started = processes.start_time(os.getpid())
    assert processes.is_alive(os.getpid(), started)
    assert not processes.is_alive(os.getpid(), started - 1)
    assert not processes.is_alive(2**22 + 1, started)


def _files_of(pid):
    return [name for name in os.listdir(shm_files.directory()) if f".p{pid}." in name]


def _no_files_while_running():
    group = comm.new_group(range(comm.get_world_size()), "all")
    group.barrier()
    return _files_of(os.getpid())


def test_files_are_unlinked_once_all_members_have_mapped_them(world):
    assert world(2)(_no_files_while_running) == [[], []]


def _abandon():
    pids = comm.world_group().all_gather_object(os.getpid())
    if comm.get_rank() == 0:
        comm.new_group([0, 1], "half made")  # the other rank never maps it
        assert len(_files_of(os.getpid())) == 1
    else:
        while not _files_of(pids[0]):
            time.sleep(0.01)
        time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


def test_files_of_a_killed_job_are_removed(world):
    owner = world(2).pids[0] if world(2)(comm.get_rank) else None
    outcomes = world(2).outcomes(_abandon)
    assert [outcome.exit_status for outcome in outcomes] == [-signal.SIGKILL] * 2
    assert _files_of(owner) == []


def _too_small():
    group = comm.new_group([0, 1], "tp-0-1")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    os.posix_fallocate, original = full, os.posix_fallocate
    try:
        group.all_reduce(np.ones(100_000, np.float32))
    except SharedMemoryError as error:
        return str(error)
    finally:
        os.posix_fallocate = original


def test_too_little_shared_memory_is_a_clear_error(world):
    for text in world(2)(_too_small):
        assert "is too small: group tp-0-1 needs" in text
        assert "--shm-size" in text and "MINDSPEED_MS_SHM_SLOT_BYTES" in text


def _on_two_hosts():
    from mindspeed_ms.core.comm.shm import SharedMemoryJob
    from mindspeed_ms.core.launch_environment import LaunchEnvironment

    try:
        SharedMemoryJob(LaunchEnvironment(0, 4, 0, 2, "job", "msrun"), 1.0)
    except SharedMemoryError as error:
        return str(error)


def test_ranks_on_several_hosts_are_refused(world):
    (text,) = world(1)(_on_two_hosts)
    assert "only 2 of 4 ranks are on this one: use backend hccl (Ascend) or mccl (CPU)" in text


def _board_over_a_stale_one(directory):
    """A board of a dead process lies where this job's is looked for; rank 1 comes first."""
    from mindspeed_ms.core.comm.board import Board

    rank = comm.get_rank()
    with mock.patch.dict(os.environ, {"MINDSPEED_MS_SHM_DIR": directory}):
        if rank == 0:
            first = Board("job", 0, 1, 5.0)  # its file has the name, but another size: it is not this job's
            path = Path(first._path)
            stale = np.zeros(4096 + 2 * 8192, np.uint8)
            stale[:4096] = first._header_bytes
            stale.view(np.int64)[[1, 2, 4]] = 2**22 + 1, 1, 2  # a process that does not exist
            path.write_bytes(stale.tobytes())
            time.sleep(0.3)
        board = Board("job", rank, 2, 10.0)
        return board.pid(0), list(Path(directory).iterdir())


def test_a_stale_board_is_passed_over(world, tmp_path):
    results = world(2)(_board_over_a_stale_one, str(tmp_path))
    assert [pid for pid, _ in results] == [world(2).pids[0]] * 2
    assert results[0][1] == []
