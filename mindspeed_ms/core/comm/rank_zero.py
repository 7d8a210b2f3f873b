"""of_rank_zero: a function that rank 0 alone runs; its result is broadcast to all ranks."""

from mindspeed_ms.core.comm.registry import get_rank, world_group
from mindspeed_ms.core.comm.waiting import waiting_for


def of_rank_zero(work, function, *arguments):
    """What a function gives on rank 0, on all ranks.

    Args:
        work (str): "prepares the data", for the error of the other ranks if they wait too long.
        function (Callable): must not raise, since the others wait for it; called with `arguments`.
    """
    own = function(*arguments) if get_rank() == 0 else None
    with waiting_for(f"rank 0, which {work}"):
        return world_group().all_gather_object(own)[0]
