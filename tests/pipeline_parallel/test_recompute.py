"""Runs with recomputation are bit-equal to runs without, dropout and several micro-batches in flight included."""

import numpy as np
import pytest

from mindspeed_ms.testing import small_trainings as job

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.1}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
METHODS = {
    "uniform1": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "uniform2": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "block1": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective"},
}
LISTS = {
    "recompute": (PP2, {"recompute": [1, 2]}),
    "select": (PP2, {"select_recompute": [2, 1]}),
    "all_kinds": ({**PP2, **TP2SP}, {"recompute": [1, 0], "select_recompute": [1, 2], "select_comm_recompute": [0, 1]}),
    "chunks": (VPP2, {"recompute": [[1, 0], [0, 1]], "select_recompute": [[0, 1], [1, 0]]}),
    "chunks_upstream": ({**VPP2, "num_layer_list_order": "vpp_pp"}, {"recompute": [[1, 0], [1, 1]]}),
    "uneven": ({**PP2, "num_layer_list": [3, 1]}, {"recompute": [2, 1], "select_recompute": [1, 0]}),
}


def assert_bit_equal(results, reference):
    for one, other in zip(results, reference):
        assert one["loss"] == other["loss"] and one["grad_norm"] == other["grad_norm"]
        for name, (_, array) in one["weights"].items():
            assert np.array_equal(array, other["weights"][name][1]), name


@pytest.mark.parametrize("layout", [PP2, VPP2], ids=["pp2", "pp2vpp2"])
def test_methods(world, layout):
    fields = {**job.TIED, **DROPOUT}
    reference = world(2)(job.train, fields, layout)
    for method in METHODS.values():
        assert_bit_equal(world(2)(job.train, {**fields, **method}, layout), reference)


@pytest.mark.parametrize("lists", LISTS)
@pytest.mark.parametrize("flash", [False, True])
def test_lists(world, lists, flash):
    parallel, recompute = LISTS[lists]
    fields = {**job.UNTIED, "use_flash_attention": flash, **({} if flash else DROPOUT)}
    size = job.world_size(parallel)
    assert_bit_equal(world(size)(job.train, fields, {**parallel, **recompute}), world(size)(job.train, fields, parallel))


def count_checkpoints(parallel, fields):
    """How often an evaluation enters CheckpointFunction."""
    from mindspeed_ms.core.tensor_parallel import random
    from mindspeed_ms.testing.parity.runner import local_batch, micro_batches
    from mindspeed_ms.training.evaluation import evaluate
    from mindspeed_ms.training.forward_step import forward_step

    model, _, _ = job.build(job.make_config(fields, parallel))
    calls, original = [], random.CheckpointFunction.forward
    random.CheckpointFunction.forward = staticmethod(lambda *arguments: calls.append(1) or original(*arguments))
    try:
        losses, _ = evaluate(forward_step, micro_batches(local_batch(job.batches(1), 0, 1), 1), model, 1)
    finally:
        random.CheckpointFunction.forward = original
    return len(calls), losses["lm loss"]


def test_evaluation_pays_nothing(world):
    counted = world(2)(count_checkpoints, PP2, {**job.TIED, **METHODS["uniform1"]})
    plain = world(2)(count_checkpoints, PP2, job.TIED)
    assert [calls for calls, _ in counted] == [0, 0] and counted[0][1] == plain[0][1] == plain[1][1]
