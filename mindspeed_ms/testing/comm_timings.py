"""Benchmark of a backend's calls: latency and bandwidth on the world group."""

import time

import numpy as np

from mindspeed_ms.core.comm import registry
from mindspeed_ms.core.comm.interface import P2P

SIZES = (64, 16 << 10, 256 << 10, 4 << 20)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "ring", "barrier")
_WARM_UP_CALLS = 2


def measure(seconds_each):
    """Measured times {operation: {bytes: microseconds per call}}, equal on all ranks.

    The size is that of the whole tensor: the result of all_gather, the argument of the others. `ring`: each rank sends
    to the next. Calls are repeated for about `seconds_each`.
    """
    group = registry.world_group()
    return {
        operation: {
            size: _time(group, _function(group, operation, size), seconds_each)
            for size in (SIZES if operation != "barrier" else (0,))
        }
        for operation in OPERATIONS
    }


def _function(group, operation, nbytes):
    elements = max(group.size, nbytes // 4 // group.size * group.size)
    whole = np.ones(elements, np.float32)
    part = whole[: elements // group.size]
    following, previous = group.ranks[(group.rank + 1) % group.size], group.ranks[group.rank - 1]
    return {
        "all_reduce": lambda: group.all_reduce(whole),
        "all_gather": lambda: group.all_gather(part),
        "reduce_scatter": lambda: group.reduce_scatter(whole),
        "all_to_all": lambda: group.all_to_all(whole),
        "broadcast": lambda: group.broadcast(whole, group.ranks[0]),
        "ring": lambda: group.batch_isend_irecv(
            [P2P.send(whole, following), P2P.recv(whole.shape, np.float32, previous)]
        ).wait(),
        "barrier": group.barrier,
    }[operation]


def _time(group, function, seconds):
    for _ in range(_WARM_UP_CALLS):
        started = time.perf_counter()
        function()
    calls = int(group.broadcast_object(max(3, min(1000, seconds / (time.perf_counter() - started))), group.ranks[0]))
    group.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        function()
    group.barrier()
    elapsed = (time.perf_counter() - started) / calls * 1e6
    return group.broadcast_object(elapsed, group.ranks[0])


def table(measured):
    """Table (text) of measured times, with the bandwidth of the largest size."""
    lines = [f"{'us per call':16}" + "".join(f"{_size_text(size):>10}" for size in SIZES) + f"{'GB/s':>8}"]
    for operation, times in measured.items():
        if operation == "barrier":
            lines.append(f"{operation:16}{times[0]:10.0f}")
            continue
        cells = "".join(f"{times[size]:10.0f}" for size in SIZES)
        lines.append(f"{operation:16}{cells}{SIZES[-1] / times[SIZES[-1]] / 1e3:8.3f}")
    return "\n".join(lines)


def _size_text(size):
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB" if size >= 1 << 10 else f"{size} B"
