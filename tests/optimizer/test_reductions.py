"""Reduction of gradients: when and how often, non-finite values before it, parameters without a gradient."""

from contextlib import nullcontext

import numpy as np
import pytest

from tests.optimizer.test_optimizer import gradients, make, run_backward, take_step


def nan_before_reduction(level):
    from mindspeed_ms.core import comm

    chunk, optimizer = make(ddp={"check_for_nan_in_grad": True, "zero_level": level})
    entries = gradients(0)
    entries["norm.weight"][0] = np.nan
    if comm.get_rank() == 0:
        entries["norm.weight"][0] = 0.0
    take_step(chunk, optimizer, [entries])
    found = chunk.non_finite_gradients()
    chunk.zero_grad_buffer()
    return found, chunk.non_finite_gradients()


def reductions(ddp):
    """Numbers of collectives that reduced gradients, after each of three backwards and after `finish_grad_sync`."""
    from contextlib import nullcontext
    from unittest import mock

    from mindspeed_ms.core import comm

    chunk, optimizer = make(ddp=ddp)
    calls, counts, kind = [], [], type(comm.world_group())

    def counted(name):
        original = getattr(kind, name)
        return lambda *arguments, **options: (calls.append(name), original(*arguments, **options))[1]

    names = ("all_reduce_in_place", "reduce_scatter_into")
    with mock.patch.multiple(kind, **{name: counted(name) for name in names}):
        optimizer.zero_grad()
        for number in range(3):
            with chunk.no_sync() if number < 2 else nullcontext():
                run_backward(chunk, gradients(number))
            counts.append(len(calls))
        chunk.finish_grad_sync()
    return [*counts, len(calls)]


@pytest.mark.parametrize(
    "ddp, expected",
    [
        ({}, [0, 0, 0, 1]),
        ({"overlap_grad_reduce": True}, [0, 0, 1, 1]),
        ({"zero_level": "z2"}, [1, 2, 3, 3]),
        ({"zero_level": "z2", "allreduce_after_grad_accumulation": True}, [0, 0, 1, 1]),
    ],
    ids=["plain", "overlap", "z2", "z2 once"],
)
def test_gradients_are_reduced_once_or_after_each_backward(world, ddp, expected):
    assert world(2)(reductions, ddp) == [expected] * 2


def left_out(ddp):
    """Largest gradient of a parameter that the second step does not use, and of one that it uses."""
    chunk, optimizer = make(ddp=ddp)
    take_step(chunk, optimizer, [gradients(1)])
    optimizer.zero_grad()
    run_backward(chunk, {name: value for name, value in gradients(2).items() if name != "last.weight"})
    chunk.finish_grad_sync()
    return [float(abs(chunk.module.table[name].main_grad.asnumpy()).max()) for name in ("last.weight", "first.weight")]


@pytest.mark.parametrize("ddp", [{}, {"overlap_grad_reduce": True}], ids=["plain", "overlap"])
def test_a_parameter_without_a_gradient_keeps_none_of_the_step_before(world, ddp):
    ((unused, used),) = world(1)(left_out, ddp)
    assert unused == 0.0 < used


@pytest.mark.parametrize("level", [None, "z1", "z2", "z3"])
def test_nan_in_gradient_is_known_by_parameter_where_it_arose(world, level):
    assert world(2)(nan_before_reduction, level) == [([], []), (["norm.weight"], [])]


def reductions_under_way(ddp):
    """Numbers of buckets and of started reductions: after a micro-batch that only accumulates, after the last backward."""
    chunk, optimizer = make(ddp={"overlap_grad_reduce": True, "bucket_size": 10, **ddp})
    buckets, counts = [bucket for buffer in chunk.buffers for bucket in buffer.buckets], []
    optimizer.zero_grad()
    for accumulates in (chunk.no_sync(), nullcontext()):
        with accumulates:
            run_backward(chunk, gradients(0))
        counts.append(
            sum(vars(bucket).get("_started", False) or vars(bucket).get("_pending") is not None for bucket in buckets)
        )
    chunk.finish_grad_sync()
    return len(buckets), counts


@pytest.mark.parametrize("ddp", [{}, {"zero_level": "z1"}, {"zero_level": "z2", "allreduce_after_grad_accumulation": True}])
def test_reductions_start_during_the_last_backward(world, ddp):
    for buckets, (accumulating, after) in world(2)(reductions_under_way, ddp):
        assert accumulating == 0 and after == buckets > 1
