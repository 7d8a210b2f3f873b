"""Backend `shm`: collectives through shared memory for the ranks of one host, under msrun or forked. The default on CPU."""

import hashlib
import os

from mindspeed_ms.core.comm import calls, processes, shm_files
from mindspeed_ms.core.comm import shm_kernels as kernels
from mindspeed_ms.core.comm.board import Board
from mindspeed_ms.core.comm.errors import SharedMemoryError
from mindspeed_ms.core.comm.progress import Engine
from mindspeed_ms.core.comm.shm_group import SharedMemoryGroup
from mindspeed_ms.core.comm.watch import Watch

JOB_ENVIRONMENT_VARIABLE = "MINDSPEED_MS_JOB_ID"
_starts = {}


class SharedMemoryJob:
    """Shared-memory communication of one rank with the others on this host.

    Args:
        environment (LaunchEnvironment): this rank's place.
        timeout (float): seconds to wait for all ranks to come, and the default of groups.

    Raises:
        SharedMemoryError: the ranks are on several hosts, or shared memory is missing, too small or in use.
        CommTimeoutError: a rank did not come.
    """

    def __init__(self, environment, timeout):
        _check_one_host(environment)
        kernels.warm_up()
        self.rank = environment.rank
        identity = job_identity(environment)
        _starts[identity] = _starts.get(identity, 0) + 1  # ranks may end communication and start it again
        self._board = Board(f"{identity}, start {_starts[identity]}", environment.rank, environment.world_size, timeout)
        self._engine = Engine(Watch(self._board))
        self._groups_made = {}
        self._debug = calls.debug_enabled()

    def new_group(self, name, ranks, timeout):
        """Group of these ranks; does not wait for the other members."""
        key = (name, tuple(ranks))
        instance = self._groups_made[key] = self._groups_made.get(key, 0) + 1
        digest = hashlib.sha256(repr((key, instance)).encode()).hexdigest()[:16]
        path = shm_files.path_of(f"{self._board.job_name}.{digest}")
        return SharedMemoryGroup(name, ranks, self.rank, path, self._engine, timeout, self._debug)

    def close(self, exception=None):
        """Complete the started calls, then publish that this rank has left."""
        try:
            if exception is None:
                self._complete_started()
        finally:
            self._board.leave(exception)

    def _complete_started(self):
        for operation in self._engine.pending():
            operation.wait()


def job_identity(environment):
    """Text that the ranks of this launch share and no other job on this host has."""
    chosen = os.environ.get(JOB_ENVIRONMENT_VARIABLE)
    if chosen:
        return f"chosen {chosen} {environment.unique_id if environment.launcher == 'world' else ''}"
    if environment.launcher != "msrun":
        return f"{environment.launcher} {environment.unique_id}"
    launcher = _launcher_process()
    address = f"{os.environ.get('MS_SCHED_HOST')}:{os.environ.get('MS_SCHED_PORT')}"
    return f"msrun {address} {launcher} {processes.start_time(launcher)}"


def _launcher_process():
    """Process that all ranks of this job share: the msrun above this process if one is found, else the parent."""
    pid = os.getppid()
    while pid > 1:
        if _is_msrun(processes.command_line(pid)):
            return pid
        pid = processes.parent(pid)
    return os.getppid()


def _is_msrun(words):
    return any(
        os.path.basename(word) == "msrun" or word.endswith("cluster/run.py") or word == "mindspore.parallel.cluster.run"
        for word in words[:4]
    )


def _check_one_host(environment):
    local = environment.local_world_size
    words = processes.command_line(_launcher_process()) if environment.launcher == "msrun" else []
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == "--local_worker_num":
            value = value or (words[index + 1] if index + 1 < len(words) else "")
            local = int(value) if value.isdigit() else local
    if local != environment.world_size:
        raise SharedMemoryError(
            f"backend shm joins the ranks of one host, but only {local} of {environment.world_size} ranks "
            "are on this one: use backend hccl (Ascend) or mccl (CPU), by --comm-backend or "
            "MINDSPEED_MS_COMM_BACKEND."
        )
