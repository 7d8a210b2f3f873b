"""Communication between ranks: named groups, one interface, three backends (`hccl`, `shm`, `mccl`).

    from mindspeed_ms.core import comm
    comm.init()
    group = comm.new_group([0, 1], "tp-0-1")
    total = group.all_reduce(tensor)

`python -m mindspeed_ms.testing.comm --ranks 8` checks the backends and prints their latency and bandwidth.
"""

from mindspeed_ms.core.comm.errors import (
    CommError,
    CommTimeoutError,
    DeadlockError,
    MismatchError,
    PeerDiedError,
    PeerError,
    PeerLeftError,
    SharedMemoryError,
)
from mindspeed_ms.core.comm.interface import P2P, Handle, ProcessGroup
from mindspeed_ms.core.comm.rank_zero import of_rank_zero
from mindspeed_ms.core.comm.registry import (
    BACKENDS,
    at_destroy,
    backend_name,
    destroy,
    get_backend,
    get_rank,
    get_world_size,
    init,
    is_initialized,
    leave_if_scheduler,
    new_group,
    world_group,
)

__all__ = [
    "BACKENDS",
    "P2P",
    "CommError",
    "CommTimeoutError",
    "DeadlockError",
    "Handle",
    "MismatchError",
    "PeerDiedError",
    "PeerError",
    "PeerLeftError",
    "ProcessGroup",
    "SharedMemoryError",
    "at_destroy",
    "backend_name",
    "destroy",
    "get_backend",
    "get_rank",
    "get_world_size",
    "init",
    "is_initialized",
    "leave_if_scheduler",
    "new_group",
    "of_rank_zero",
    "world_group",
]
