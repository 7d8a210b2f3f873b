"""Low-rank adapters in every layout: the same start, the same curve; only adapters are trained."""

import numpy as np
import pytest

from mindspeed_ms.testing import small_trainings

TARGETS = [{"target_cells": [r".*_proj", r".*\.(mapping|projection)"]}]
LORA = {"use_lora": True, "lora_rank": 3, "lora_alpha": 6, "target_cells": TARGETS}


def train(base="UNTIED", parallel=None, lora=None, steps=3, **sections):
    """Training with adapters: curve, whole weights of this rank, and what the wrapper and the optimizer hold."""
    from mindspeed_ms.testing.parity.runner import local_batch, micro_batches

    fields = {**getattr(small_trainings, base), **sections.pop("model", {})}
    all_config = small_trainings.make_config(fields, parallel, lora={**LORA, **(lora or {})}, **sections)
    chunks, optimizer, step = small_trainings.build(all_config)
    with chunks[0].whole_parameters():
        before = _weights(chunks)
    result = {"loss": [], "grad_norm": [], "before": before, "tied": base == "TIED"}
    data, rows = small_trainings.batches(steps), all_config.dataset_config.batch_size
    for number in range(steps):
        batch = micro_batches(local_batch(data, number, rows), rows)
        report, _ = step(batch, number + 1)
        result["loss"].append(report.loss)
        result["grad_norm"].append(report.grad_norm)
    for chunk in chunks:
        chunk.finish_param_sync()
    with chunks[0].whole_parameters():
        result["weights"] = _weights(chunks)
    result["in buffers"] = sum(len(buffer.params) for chunk in chunks for buffer in chunk.buffers)
    result["in optimizer"] = {piece.name for piece, _ in optimizer.pieces_with_states()}
    return result


def _weights(chunks):
    return {
        name: (param.sharding, param.asnumpy().copy())
        for chunk in chunks
        for name, param in chunk.module.parameters_and_names()
    }


def is_adapter(name):
    return name.endswith((".lora_a", ".lora_b"))


@pytest.fixture(scope="module")
def one(world):
    return world(1)(train)[0]


def test_adapters_alone_are_trained(one):
    names = {name for name in one["weights"] if is_adapter(name)}
    assert len(names) == 4 * 4 * 2 == one["in buffers"] and one["in optimizer"] == names
    for name, (_, values) in one["weights"].items():
        before = one["before"][name][1]
        assert (values != before).any() == (name in names), name
        if name.endswith("lora_b"):
            assert not before.any()
    a = one["before"]["language_model.encoder.layers.0.mlp.projection.lora_a"][1]
    assert a.shape == (3, 64) and a.std() == pytest.approx((3 * 64) ** -0.5, rel=0.2)


LAYOUTS = {
    "tp": ({"tensor_model_parallel_size": 2}, {}),
    "sp": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
    "pp": ({"pipeline_model_parallel_size": 2}, {}),
    "vpp": ({"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}, {}),
    "zero1": ({"zero_level": "z1"}, {}),
    "zero2": ({"zero_level": "z2"}, {}),
    "zero3": ({"zero_level": "z3"}, {}),
    "distributed": ({}, {"training": {"use_distributed_optimizer": True, "overlap_grad_reduce": True}}),
    "fused": ({"tensor_model_parallel_size": 2, "gradient_accumulation_fusion": True}, {}),
    "recompute": (
        {"tensor_model_parallel_size": 2},
        {"model": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_give_one_curve(world, one, layout):
    parallel, sections = LAYOUTS[layout]
    results = world(2)(train, parallel=parallel, **sections)
    np.testing.assert_allclose(
        results[0]["loss"] if layout not in ("pp", "vpp") else results[-1]["loss"], one["loss"], rtol=2e-6
    )
    np.testing.assert_allclose(results[0]["grad_norm"], one["grad_norm"], rtol=1e-4)
    before = small_trainings.whole_weights([{**result, "weights": result["before"]} for result in results])
    after = small_trainings.whole_weights(results)
    assert set(before) == set(one["before"])
    for name, values in before.items():
        np.testing.assert_array_equal(values, one["before"][name][1], err_msg=name)
        if is_adapter(name):
            np.testing.assert_allclose(after[name], one["weights"][name][1], atol=2e-5, err_msg=name)
        else:
            np.testing.assert_array_equal(after[name], values, err_msg=name)
