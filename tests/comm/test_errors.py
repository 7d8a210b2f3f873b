"""Wrong calls, lost peers and circles end with one clear error on every rank, and soon."""

import os
import signal
import time
from unittest import mock

import numpy as np
import pytest

from mindspeed_ms.core import comm
from mindspeed_ms.core.comm import (
    CommError,
    CommTimeoutError,
    DeadlockError,
    MismatchError,
    PeerDiedError,
    PeerLeftError,
    waiting,
)
from mindspeed_ms.testing.worlds import WorkerDied

VALUES = np.ones(4, np.float32)


def _error_of(function, *arguments):
    """(class, text, seconds) of the error that a call raises."""
    started = time.monotonic()
    try:
        function(*arguments)
    except CommError as error:
        return type(error), str(error), time.monotonic() - started
    return None, "", 0.0


def _different_operations():
    group = comm.new_group(range(comm.get_world_size()), "tp-all")
    group.barrier()
    call = group.all_gather if comm.get_rank() == 1 else group.all_reduce
    first = _error_of(call, VALUES)
    return first, _error_of(group.barrier)


def test_different_operations_are_an_error_on_every_rank_that_names_both(world):
    for (kind, text, _), (later_kind, later_text, _) in world(3)(_different_operations):
        assert kind is MismatchError
        assert "ranks 0, 2 called all_reduce(sum, float32 [4]), call 2" in text
        assert "rank 1 called all_gather(float32 [4]), call 2" in text
        assert "tp-all" in text
        assert later_kind is MismatchError and "of no more use" in later_text


def _different_tensors(differing):
    group = comm.world_group()
    odd = comm.get_rank() == 0
    if differing == "shape":
        return _error_of(group.all_reduce, np.ones((2, 2), np.float32) if odd else VALUES)
    if differing == "dtype":
        return _error_of(group.all_reduce, VALUES.astype(np.int32) if odd else VALUES)
    if differing == "reduction":
        return _error_of(group.all_reduce, VALUES, "max" if odd else "sum")
    if differing == "source":
        return _error_of(group.broadcast, VALUES, 0 if odd else 1)
    return _error_of(group.all_to_all, VALUES, [2, 2], [1, 3])


@pytest.mark.parametrize(
    "differing, expected",
    [
        ("shape", "rank 0 called all_reduce(sum, float32 [2, 2]), call 1; rank 1 called all_reduce(sum, float32 [4]), call 1"),
        ("dtype", "rank 0 called all_reduce(sum, int32 [4]), call 1; rank 1 called all_reduce(sum, float32 [4]), call 1"),
        ("reduction", "rank 0 called all_reduce(max, float32 [4]), call 1; rank 1 called all_reduce(sum, float32 [4]), call 1"),
        (
            "source",
            "rank 0 called broadcast(from rank 0, float32 [4]), call 1; rank 1 called broadcast(from rank 1, float32 [4])",
        ),
        ("splits", "rank 0 sends 1 rows to rank 0, which expects 2"),
    ],
)
def test_different_tensors_are_an_error_on_every_rank(world, differing, expected):
    for kind, text, _ in world(2)(_different_tensors, differing):
        assert kind is MismatchError
        assert expected in text


def _message_of_another_shape():
    group = comm.world_group()
    if comm.get_rank() == 0:
        group.send(VALUES, 1)
        return _error_of(group.barrier)
    return _error_of(group.recv, (5,), np.float32, 0)


def test_a_message_of_another_shape_names_both(world):
    sender, receiver = world(2).outcomes(_message_of_another_shape)
    kind, text, _ = receiver.value
    assert kind is MismatchError
    assert "rank 0 sends float32 [4], message 1; rank 1 expects float32 [5], message 1" in text
    assert sender.value[0] in (MismatchError, PeerLeftError)


def _debug_stacks():
    comm.destroy()
    with mock.patch.dict(os.environ, {"MINDSPEED_MS_COMM_DEBUG": "1"}):
        comm.init()
        group = comm.world_group()
        return _error_of(group.all_reduce if comm.get_rank() else group.all_gather, VALUES)


def test_debug_mode_shows_where_each_rank_called(world):
    for kind, text, _ in world(2)(_debug_stacks):
        assert kind is MismatchError
        assert text.count("in _debug_stacks") == 2


def _die(victim):
    group = comm.new_group([0, 1, 2], "tp-0-1-2")
    group.barrier()
    if comm.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    before = time.time()
    kind, text, seconds = _error_of(group.all_reduce, VALUES)
    return kind, text, seconds, before


def test_a_killed_rank_is_named_within_half_a_second(world):
    outcomes = world(3).outcomes(_die, 1)
    pid = str(outcomes[1].exception).split("pid ")[1].split(")")[0]
    assert isinstance(outcomes[1].exception, WorkerDied) and outcomes[1].exit_status == -signal.SIGKILL
    for rank in (0, 2):
        kind, text, seconds, _ = outcomes[rank].value
        assert kind is PeerDiedError
        assert text.startswith(f"rank 1 (pid {pid}) died in all_reduce on group tp-0-1-2")
        assert seconds < 0.5
    assert world(3)(comm.get_rank) == [0, 1, 2]  # a new world takes the place of the broken one


def _leave(how):
    group = comm.world_group()
    if comm.get_rank() == 1:
        if how == "raises":
            raise KeyError("no such layer")
        return None
    return _error_of(group.recv, (4,), np.float32, 1)


def test_a_rank_that_finishes_early_is_named(world):
    kind, text, seconds = world(2)(_leave, "finishes")[0]
    assert kind is PeerLeftError and seconds < 0.5
    assert "rank 1 (pid" in text and "finished without taking part in recv on group world" in text


def test_a_rank_that_raises_is_named_with_its_error(world):
    outcomes = world(2).outcomes(_leave, "raises")
    kind, text, seconds = outcomes[0].value
    assert kind is PeerLeftError and seconds < 0.5
    assert "Its error: KeyError: 'no such layer'" in text
    assert isinstance(outcomes[1].exception, KeyError)
    assert world(2)(comm.get_rank) == [0, 1]


def _circle():
    first = comm.new_group([0, 1], "first")
    second = comm.new_group([0, 1], "second")
    return _error_of(first.barrier if comm.get_rank() else second.all_reduce, *(() if comm.get_rank() else (VALUES,)))


def test_ranks_in_calls_of_different_groups_do_not_hang(world):
    for kind, text, seconds in world(2)(_circle):
        assert kind is DeadlockError
        assert "all_reduce(sum, float32 [4]), call 1 on group second" in text
        assert "barrier, call 1 on group first" in text
        assert seconds < 5


def _everyone_receives():
    group, rank = comm.world_group(), comm.get_rank()
    return _error_of(group.recv, (4,), np.float32, (rank + 1) % group.size)


def test_ranks_that_all_receive_do_not_hang(world):
    for kind, text, _ in world(3)(_everyone_receives):
        assert kind is DeadlockError
        assert "rank 2" in text and "recv(float32 [4], message 1) from rank 0" in text


def _late():
    group = comm.new_group(range(2), "slow", timeout=0.5)
    if comm.get_rank() == 0:
        time.sleep(1.5)
        return _error_of(group.barrier)
    return _error_of(group.barrier)


def test_a_late_rank_is_named(world):
    kind, text, seconds = world(2)(_late)[1]
    assert kind is CommTimeoutError and 0.4 < seconds < 1.4
    assert "rank 1 waited longer than 0.5 s in barrier, call 1 on group slow: rank 0 (pid" in text
    longer = "To wait longer raise --distributed-timeout-minutes (parallel_config.distributed_timeout_minutes), or MINDSPEED_MS"
    assert f"is not in a call. {longer}_COMM_TIMEOUT where" in text


def _alone(seconds):
    found = comm.of_rank_zero("counts sheep", lambda count: (count, comm.get_rank(), waiting.waits_for()), 3)
    comm.world_group().timeout = 0.3
    return _error_of(comm.of_rank_zero, "counts sheep", time.sleep, seconds), waiting.waits_for(), found


def test_what_rank_zero_does_alone_is_named(world):
    """Where others wait for it; what it gives reaches all ranks."""
    results = world(2)(_alone, 0.8)
    (_, text, _), after, _ = results[1]
    assert "is not in a call. The call waits for rank 0, which counts sheep. To wait longer raise" in text and after == ""
    assert [found for _, _, found in results] == [(3, 0, "")] * 2


def test_the_innermost_work_is_what_is_waited_for():
    with waiting.waiting_for("one"):
        with pytest.raises(KeyError), waiting.waiting_for("two"):
            assert waiting.waits_for() == " The call waits for two."
            raise KeyError
        assert waiting.waits_for() == " The call waits for one."
    assert waiting.waits_for() == ""


def _failed_in_mindspore():
    from mindspeed_ms.core.comm.hccl import HcclGroup
    from mindspeed_ms.core.comm.mccl_mail import Mailbox

    failing = mock.Mock(side_effect=RuntimeError("timeout"))
    with waiting.waiting_for("rank 0, which counts sheep"):
        by_hccl = _error_of(HcclGroup._run, mock.Mock(ranks=[0, 1]), "barrier", failing)
        return by_hccl[1], _error_of(Mailbox._run, "receive from", 0, failing)[1]


def test_errors_of_mindspore_name_what_is_waited_for(world):
    for text in world(1)(_failed_in_mindspore)[0]:
        assert "The call waits for rank 0, which counts sheep." in text


def _bad_arguments():
    group = comm.world_group()
    view = np.ones((4, 4), np.float32)[:, :2]
    return [
        _error_of(*call)[1]
        for call in (
            (group.all_reduce, VALUES, "mean"),
            (group.broadcast, VALUES, 7),
            (group.send, VALUES, comm.get_rank()),
            (group.reduce_scatter, np.ones(3, np.float32)),
            (group.all_gather, np.float32(1)),
            (group.all_to_all, VALUES, [2, 2], [1, 2]),
            (group.all_reduce_in_place, view),
            (comm.new_group, [0, 5], "g"),
            (comm.new_group, [1 - comm.get_rank()], "g"),
            (comm.init, "nccl"),
            (group.all_reduce, np.ones(2, np.complex64)),
        )
    ]


def test_bad_arguments_are_refused(world):
    for texts in world(2)(_bad_arguments):
        expected = [
            "expected one of sum, max, min, prod",
            "rank 7 is no member",
            "is this rank itself",
            "not divisible by",
            "has no axes",
            "add up to 3",
            "would be lost",
            "expected different ranks of 0..1",
            "only members",
            "expected one of hccl, shm, mccl",
            "complex64 cannot be sent",
        ]
        for text, part in zip(texts, expected, strict=True):
            assert part in text
