"""What a stage keeps, counted from live objects: micro-batches in flight, saved activations, outputs that were sent."""

import pytest

from mindspeed_ms.testing import small_trainings as job
from mindspeed_ms.testing.live_tensors import measure

# without the final norm nothing but layers saves tensors inside the block
FIELDS = {**job.UNTIED, "num_layers": 8, "use_final_norm": False}
PP4 = {"pipeline_model_parallel_size": 4}
MICRO_BATCHES = 8


def full(method="uniform", number=1):
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": number}


def test_1f1b_keeps_as_many_micro_batches_as_stages_follow(world):
    for result in world(4)(measure, FIELDS, PP4, MICRO_BATCHES):
        assert result["most_micro_batches"] == 4 - result["stage"]
        assert result["left"] == 0


@pytest.mark.parametrize("number, expected", [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_full_recomputation_keeps_one_tensor_per_group_of_layers(world, number, expected):
    """Two stages of 4 layers: L tensors per live micro-batch, or ceil(L / n) in groups of n."""
    fields = {**FIELDS, **full(number=number)}
    for result in world(2)(measure, fields, {"pipeline_model_parallel_size": 2}, MICRO_BATCHES):
        assert result["layer_tensors"] == [expected]
        assert result["peak"]["layer_tensors"] == expected * result["peak"]["micro_batches"]
        assert result["most_micro_batches"] == 2 - result["stage"]


def test_recompute_lists_keep_less(world):
    """The first two of four layers whole: two tensors, and what the other two keep."""
    pp2 = {"pipeline_model_parallel_size": 2}
    none, half, all_layers = (
        world(2)(measure, FIELDS, {**pp2, **lists}, MICRO_BATCHES)[0]["layer_tensors"][0]
        for lists in ({}, {"recompute": [2, 2]}, {"recompute": [4, 4]})
    )
    assert all_layers == 4 and half == 2 + none // 2
    select = world(2)(measure, FIELDS, {**pp2, "select_recompute": [4, 0]}, MICRO_BATCHES)
    assert select[0]["layer_tensors"][0] < select[1]["layer_tensors"][0] == none


def test_interleaved_peak(world):
    parallel = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    for result in world(2)(measure, {**FIELDS, **full()}, parallel, MICRO_BATCHES):
        # warm-up 2 (pp - r - 1) + (vpp - 1) pp, and the one that runs
        assert result["most_micro_batches"] == 2 * (2 - result["stage"] - 1) + 2 + 1
        assert result["layer_tensors"] == [2] and result["left"] == 0


@pytest.mark.parametrize("chunks", [1, 2])
def test_outputs_are_given_up_once_sent(world, chunks):
    parallel = {"pipeline_model_parallel_size": 2, **({"virtual_pipeline_model_parallel_size": 2} if chunks == 2 else {})}
    freed = world(2)(measure, FIELDS, parallel, MICRO_BATCHES)[0]["peak"]
    kept = world(2)(measure, FIELDS, {**parallel, "deallocate_pipeline_outputs": False}, MICRO_BATCHES)[0]["peak"]
    whole = FIELDS["seq_length"] * FIELDS["hidden_size"] * 4
    assert kept["output_bytes"] >= whole
    assert freed["output_bytes"] <= 4 * freed["micro_batches"]
