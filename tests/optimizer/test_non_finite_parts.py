"""A gradient that is infinite in the memory of one rank alone: all ranks skip the step, in any layout and at any ZeRO level."""

import numpy as np
import pytest

from tests.optimizer.test_optimizer import gradients, make, parameters_of, run_backward


def infinite_on_the_last_rank(sizes, level):
    """(success, found_inf, loss scale afterwards, whether the weights are unchanged) on each rank."""
    from mindspeed_ms.core import comm, parallel_state, storage
    from mindspeed_ms.core.distributed import finalize_model_grads
    from mindspeed_ms.training.checkpointing import whole_parameters

    parallel_state.initialize_model_parallel(*sizes)

    def mark(cell):
        for name in ("first.weight", "last.weight"):
            cell.table[name].tensor_model_parallel = sizes[0] > 1

    options = {"loss_scale": None, "initial_loss_scale": 16.0, "hysteresis": 1}
    chunk, optimizer = make(mark=mark, ddp={"zero_level": level}, fp16=True, **options)
    with whole_parameters([chunk]):
        before = parameters_of(chunk)
    optimizer.zero_grad()
    run_backward(chunk, gradients(0), 16.0)
    finalize_model_grads([chunk])
    if comm.get_rank() == comm.get_world_size() - 1:
        shard = optimizer.shards[-1]
        piece = shard.pieces[-1]
        storage.write(shard.slice_grad(piece.start, piece.start + 1), np.inf + shard.slice_grad(piece.start, piece.start + 1))
    success, _, _ = optimizer.step()
    with whole_parameters([chunk]):
        unchanged = all(np.array_equal(before[name], value) for name, value in parameters_of(chunk).items())
    return success, optimizer.found_inf, optimizer.get_loss_scale(), unchanged


LAYOUTS = [
    ((2, 1), None, 2),
    ((1, 2), None, 2),
    ((2, 2), None, 4),
    *(((1, 1), level, 2) for level in ("z1", "z2", "z3")),
    *(((2, 1), level, 4) for level in ("z1", "z2", "z3")),
    ((1, 2), "z1", 4),
]


@pytest.mark.parametrize("sizes, level, ranks", LAYOUTS)
def test_infinity_on_one_rank_is_skipped_by_all(world, sizes, level, ranks):
    assert world(ranks)(infinite_on_the_last_rank, sizes, level) == [(False, True, 8.0, True)] * ranks
