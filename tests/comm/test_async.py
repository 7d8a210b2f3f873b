"""Asynchronous calls return at once, complete in order, and never stop calls of other groups."""

import time

import numpy as np
import pytest

from mindspeed_ms.core import comm
from mindspeed_ms.core.comm import P2P

LARGE = 3_000_000  # floats: more than all slots and rings hold


def _returns_before_the_peer_comes():
    group = comm.world_group()
    if comm.get_rank():
        time.sleep(0.3)
    started = time.monotonic()
    handles = [group.all_reduce(np.full(4, index, np.float32), async_op=True) for index in range(3)]
    issued = time.monotonic() - started
    early = [handle.is_completed() for handle in handles]
    results = [float(handle.wait()[0]) for handle in reversed(handles)]
    return issued, early, results, [handle.is_completed() for handle in handles]


def test_calls_return_before_the_peer_has_come(world):
    first = world(2)(_returns_before_the_peer_comes)[0]
    assert first[0] < 0.2
    assert first[1] == [False] * 3
    assert first[2] == [4.0, 2.0, 0.0]
    assert first[3] == [True] * 3


def _waits_in_opposite_orders():
    """Large calls of three groups, started in one order and waited for in another on each rank."""
    rank, size = comm.get_rank(), comm.get_world_size()
    groups = [comm.new_group(range(size), f"group-{index}") for index in range(3)]
    order = groups if rank % 2 else groups[::-1]
    handles = {}
    for group in order:
        handles[group.name] = [
            group.all_reduce(np.full(LARGE, rank, np.float32), async_op=True),
            group.all_gather(np.full(LARGE // 4, rank, np.int32), async_op=True),
        ]
    totals = []
    for name in sorted(handles, reverse=rank == 0):
        gathered, total = handles[name][1].wait(), handles[name][0].wait()
        totals.append((float(total[0]), float(total[-1]), int(gathered.sum())))
    return totals


def test_groups_never_stop_each_other(world):
    for totals in world(3)(_waits_in_opposite_orders):
        assert totals == [(3.0, 3.0, 3 * (LARGE // 4))] * 3


def _all_send_first():
    group, rank, size = comm.world_group(), comm.get_rank(), comm.get_world_size()
    values = np.full(LARGE, rank, np.float32)
    group.send(values, (rank + 1) % size)
    values[:] = -1  # a send that returned has taken its values
    return float(group.recv((LARGE,), np.float32, (rank - 1) % size).mean())


def test_ranks_that_all_send_first_do_not_stop_each_other(world):
    assert world(3)(_all_send_first) == [2.0, 0.0, 1.0]


def _batch():
    group, rank = comm.world_group(), comm.get_rank()
    peer = 1 - rank
    sends = [P2P.send(np.full(LARGE, 10 * rank + index, np.float32), peer) for index in range(2)]
    receives = [P2P.recv((LARGE,), np.float32, peer) for _ in range(2)]
    values = group.batch_isend_irecv([sends[0], receives[0], sends[1], receives[1]]).wait()
    return [None if value is None else float(value[-1]) for value in values]


def test_batches_keep_the_order_of_messages(world):
    assert world(2)(_batch) == [[None, 10.0, None, 11.0], [None, 0.0, None, 1.0]]


def _unfinished_sends_at_the_end():
    group = comm.world_group()
    if comm.get_rank() == 0:
        group.isend(np.ones(LARGE, np.float32), 1)
        return None
    time.sleep(0.2)
    return float(group.recv((LARGE,), np.float32, 0).sum())


def test_what_was_sent_arrives_even_if_the_sender_ends(world):
    assert world(2)(_unfinished_sends_at_the_end)[1] == LARGE


def _start_a_call_that_the_peer_never_makes():
    if comm.get_rank() == 0:
        comm.world_group().all_reduce(np.ones(4, np.float32), async_op=True)


def test_a_call_that_was_started_and_never_completed_is_an_error_at_the_end(world):
    with pytest.raises(comm.PeerLeftError, match="finished without taking part in all_reduce on group world"):
        world(2)(_start_a_call_that_the_peer_never_makes)
    assert world(2)(comm.get_rank) == [0, 1]
