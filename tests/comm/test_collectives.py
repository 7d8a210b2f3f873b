"""Every operation on every dtype and many shapes, over overlapping groups, equals numpy's result bit by bit."""

import numpy as np
import pytest

from mindspeed_ms.core import comm
from mindspeed_ms.testing import comm_programs


@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_programs(world, size):
    assert sum(world(size)(comm_programs.run, size, 250)) > 250


def test_random_program_on_tensors(world):
    assert sum(world(2)(comm_programs.run, 1, 100, True)) > 100


def test_one_rank_needs_no_peers(world):
    assert world(1)(comm_programs.run, 1, 30) == [30]


def _strided_tensors():
    from mindspore import Tensor

    group, rank = comm.world_group(), comm.get_rank()
    base = Tensor(np.arange(12, dtype=np.float32).reshape(3, 4) + rank)
    transposed = group.all_reduce(base.T)
    part = group.all_gather(base[:, 1:3])
    refused = ""
    try:
        group.all_reduce_in_place(base[1:])
    except comm.CommError as error:
        refused = str(error)
    return transposed, part, base, refused


def test_views_are_read_in_their_own_shape_and_refused_for_writing(world):
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    for rank, (transposed, part, unchanged, refused) in enumerate(world(2)(_strided_tensors)):
        np.testing.assert_array_equal(transposed, 2 * base.T + 1)
        np.testing.assert_array_equal(part, np.concatenate([base[:, 1:3], base[:, 1:3] + 1]))
        np.testing.assert_array_equal(unchanged, base + rank)
        assert "would be lost" in refused


def _reduction_of_nan_and_wrap():
    group, rank = comm.world_group(), comm.get_rank()
    values = np.array([np.nan if rank == 0 else 1, np.nan if rank else 1, 2], np.float32)
    return group.all_reduce(values, "max"), group.all_reduce(np.array([200], np.uint8))


def test_nan_is_kept_and_integers_wrap(world):
    for maximum, wrapped in world(2)(_reduction_of_nan_and_wrap):
        assert np.isnan(maximum[:2]).all() and maximum[2] == 2
        assert wrapped[0] == 400 - 256


def _bfloat16_order():
    """1 + 3 * 2^-9 in bfloat16: each addend alone is lost, but not their sum in float32."""
    import mindspore as ms
    from mindspore import Tensor

    small = 2.0**-9
    value = Tensor(np.array([1.0 if comm.get_rank() == 0 else small], np.float32)).astype(ms.bfloat16)
    return comm.world_group().all_reduce(value)


def test_bfloat16_is_accumulated_in_float32(world):
    for (total,) in world(4)(_bfloat16_order):
        assert total == 1 + 2.0**-7  # 1 + 3 * 2^-9 rounded once
