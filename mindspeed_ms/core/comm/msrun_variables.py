"""MindSpore's own communication (mccl, hccl) for ranks that msrun did not start: its variables, and its scheduler.

MindSpore reads MS_ROLE, MS_WORKER_NUM, MS_NODE_ID, MS_SCHED_HOST and MS_SCHED_PORT, which msrun sets. Here they follow from the
rank and from where the ranks met; the scheduler is a process that rank 0 starts and that ends soon after it.
"""

import os
import subprocess
import sys

_SECONDS_AFTER_RANK_0 = 15
_scheduler = None
_SCHEDULER = "from mindspore.communication import init; init('mccl')"


def set_variables(environment, meeting, timeout):
    """Set the variables of this rank (LaunchEnvironment); rank 0 starts the scheduler where the `Meeting` says.

    Args:
        timeout (float): seconds that the ranks may take to register.
    """
    global _scheduler
    common = {
        "MS_WORKER_NUM": environment.world_size,
        "MS_SCHED_HOST": meeting.address,
        "MS_SCHED_PORT": meeting.scheduler_port,
        "MS_TOPO_TIMEOUT": max(30, int(timeout)),
        "RANK_SIZE": environment.world_size,
    }
    common = {name: str(value) for name, value in common.items()}
    if environment.rank == 0:
        variables = {"GLOG_v": "3", **os.environ, **common, "MS_ROLE": "MS_SCHED"}
        # when this process has ended the pipe closes
        _scheduler = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__)],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # a pipe of the user's would stay open as long as it
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    rank = str(environment.rank)
    os.environ.update(common, MS_ROLE="MS_WORKER", MS_NODE_ID=rank, RANK_ID=rank, DEVICE_ID=str(environment.local_rank))


def _watch_scheduler():
    scheduler = subprocess.Popen([sys.executable, "-c", _SCHEDULER], stdin=subprocess.DEVNULL)
    sys.stdin.buffer.read()  # until rank 0 has ended
    try:
        scheduler.wait(_SECONDS_AFTER_RANK_0)
    except subprocess.TimeoutExpired:
        scheduler.kill()


if __name__ == "__main__":
    _watch_scheduler()
