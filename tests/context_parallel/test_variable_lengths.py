"""Batches of different length over cut sequences, and lengths that cannot be cut."""

import numpy as np
import pytest

from mindspeed_ms.layout.errors import LayoutError
from mindspeed_ms.testing import small_trainings as job
from mindspeed_ms.testing.parity.runner import local_batch, micro_batches

LENGTHS = (16, 32, 8)
RING2 = {"context_parallel_size": 2, "context_parallel_algo": "megatron_cp_algo", "variable_seq_lengths": True}


def train(parallel, lengths=LENGTHS):
    """Losses and gradient norms of one step for each length; 16 tokens are the model's seq_length."""
    _, _, step = job.build(job.make_config(job.UNTIED, parallel))
    result = []
    for number, length in enumerate(lengths):
        data = job.batches(1, length=length, rows=8, seed=number)
        report, _ = step(micro_batches(local_batch(data, 0, 1), 1), number + 1)
        result.append((report.loss, report.grad_norm))
    return result


def test_short_batches_are_not_taken_for_parts(world):
    """Whole sequences of the length of a part, without variable_seq_lengths: the same on all ranks, hence no parts."""
    fixed = {**RING2, "variable_seq_lengths": False}
    reference = world(1)(train, {}, (8, 16))[0]
    for result in world(2)(train, fixed, (8, 16)):
        np.testing.assert_allclose(result, reference, rtol=1e-5)


@pytest.mark.parametrize("beside", [{}, {"pipeline_model_parallel_size": 2}], ids=str)
def test_equals_whole_sequences(world, beside):
    reference = world(1)(train, {"variable_seq_lengths": True})[0]
    for result in world(2 * beside.get("pipeline_model_parallel_size", 1))(train, {**RING2, **beside}):
        np.testing.assert_allclose(result, reference, rtol=1e-5)


def test_a_length_that_cannot_be_cut_names_the_padding(world):
    with pytest.raises(LayoutError, match=r"a sequence of 18 tokens .* multiple of 4; pad it by 2 to 20"):
        world(2)(train, RING2, (18,))


def parts_in_micro_batches():
    """Tokens of two micro-batches of a batch that `get_batch` cut, after the default forward step's own cut."""
    from mindspore import Tensor

    from mindspeed_ms.core.context_parallel import get_batch_on_this_cp_rank
    from mindspeed_ms.training.data_streams import split_batch

    job.build(job.make_config(job.UNTIED, RING2))
    batch = get_batch_on_this_cp_rank({"tokens": Tensor(np.arange(32, dtype=np.int32).reshape(2, 16))})
    return [get_batch_on_this_cp_rank(part)["tokens"].asnumpy().tolist() for part in split_batch(batch, 1, 2)]


def test_a_batch_is_cut_once(world):
    first = [[0, 1, 2, 3, 12, 13, 14, 15]]
    assert world(2)(parts_in_micro_batches)[0] == [first, [[place + 16 for place in first[0]]]]


def keep_masks():
    """Keep masks of hidden dropout from the default and the tensor-parallel state."""
    from mindspeed_ms.core.rng import get_rng_tracker

    job.build(job.make_config(job.UNTIED, {"context_parallel_size": 2, "tensor_model_parallel_size": 2}))
    tracker = get_rng_tracker()
    with tracker.fork() as state:
        own = state.keep_mask((64,), 0.5).asnumpy()
    return tracker.current.keep_mask((64,), 0.5).asnumpy(), own


def test_context_ranks_drop_other_elements(world):
    """Ranks 0 and 1 share tokens, 2 and 3 hold others."""
    masks = world(4)(keep_masks)
    assert (masks[0][0] == masks[1][0]).all() and (masks[0][0] != masks[2][0]).any()
    assert all((masks[i][1] != masks[j][1]).any() for i in range(4) for j in range(i))
