"""The training does not know how the layers were cut: losses, gradient norms and final weights equal one rank's."""

import pytest

from mindspeed_ms.testing import small_trainings as job

EIGHT = {"num_layers": 8}
PP = "pipeline_model_parallel_size"
VPP = "virtual_pipeline_model_parallel_size"
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS = {
    "pp2": ({}, {PP: 2}, 1),
    "pp4": ({}, {PP: 4}, 1),
    "pp3": ({}, {PP: 3}, 1),
    "pp2vpp2": ({}, {PP: 2, VPP: 2}, 1),
    "pp4vpp2": (EIGHT, {PP: 4, VPP: 2}, 1),
    "pp2vpp4_group3": (EIGHT, {PP: 2, VPP: 4, "microbatch_group_size_per_virtual_pipeline_stage": 3}, 1),
    "pp2tp2dp2": ({}, {PP: 2, **TP2}, 2),
    "pp2vpp2dp2": ({}, {PP: 2, VPP: 2}, 2),
    "uneven": ({}, {PP: 2, "num_layer_list": [3, 1]}, 1),
    "uneven_chunks": (EIGHT, {PP: 2, "num_layer_list": [[3, 1], [2, 2]]}, 1),
    "upstream_order": (EIGHT, {PP: 2, "num_layer_list": [[3, 1], [1, 3]], "num_layer_list_order": "vpp_pp"}, 1),
    "first_and_last": ({}, {PP: 3, "num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 1}, 1),
    "embedding_and_loss_count": (
        {"num_layers": 6},
        {PP: 4, "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
        1,
    ),
    "standalone_embedding": ({}, {PP: 3, "standalone_embedding_stage": True}, 1),
    "standalone_embedding_chunks": ({}, {PP: 3, VPP: 2, "standalone_embedding_stage": True}, 1),
}
MODELS = {"tied": job.TIED, "untied": job.UNTIED}


@pytest.mark.parametrize(
    "model, layout",
    [*(("tied", layout) for layout in LAYOUTS), ("untied", "pp4"), ("untied", "pp2vpp2"), ("untied", "pp2tp2dp2")],
)
def test_equals_one_rank(world, model, layout):
    model_fields, parallel, data_parallel = LAYOUTS[layout]
    fields = {**MODELS[model], **model_fields}
    # 8 micro-batches in groups of 3 leave one of 2, and 3 stages need a multiple of 3
    sections = {"dataset": {"global_batch_size": 6}} if parallel[PP] == 3 and parallel.get(VPP) else {}
    data = job.batches(3, rows=6) if sections else None
    reference = world(1)(job.train, fields, data=data, **sections)
    results = world(job.world_size(parallel, data_parallel))(job.train, fields, parallel, data=data, **sections)
    job.assert_equal_trainings(results, reference, model == "tied")


@pytest.mark.parametrize(
    "parallel",
    [
        {PP: 2, "noop_layers": [1]},
        {PP: 2, "noop_layers": [2, 3]},
        {PP: 4, "noop_layers": [0, 3]},
        {PP: 2, VPP: 2, "noop_layers": [1]},
    ],
    ids=str,
)
def test_noop_layers_are_the_smaller_model(world, parallel):
    """Layers that pass their input on: equal to the model without them, also where they leave a chunk empty."""
    reference = world(1)(job.train, {**job.TIED, "num_layers": 4 - len(parallel["noop_layers"])})
    job.assert_equal_trainings(world(job.world_size(parallel))(job.train, job.TIED, parallel), reference, tied=True)


@pytest.mark.parametrize(
    "training",
    [
        {"calculate_per_token_loss": True},
        {"overlap_grad_reduce": True, "bucket_size": 900},
        {"overlap_grad_reduce": True, "delay_grad_reduce": True, "bucket_size": 900},
    ],
    ids=str,
)
def test_data_parallel_options(world, training):
    parallel = {PP: 2, VPP: 2}
    reference = world(1)(job.train, job.TIED, training=training)
    job.assert_equal_trainings(world(4)(job.train, job.TIED, parallel, training=training), reference, tied=True)


def test_twice_is_bit_equal(world):
    first, second = (world(2)(job.train, job.TIED, {PP: 2, VPP: 2}) for _ in range(2))
    for one, other in zip(first, second):
        assert one["loss"] == other["loss"] and one["grad_norm"] == other["grad_norm"]
        assert all((array == other["weights"][name][1]).all() for name, (_, array) in one["weights"].items())


def embeddings_of_stages(parallel):
    """Which embeddings and groups a stage has, and its tied gradient after one step."""
    from mindspeed_ms.core import parallel_state as state
    from mindspeed_ms.testing.parity.runner import local_batch, micro_batches

    model, _, step = job.build(job.make_config(job.TIED, parallel))
    step(micro_batches(local_batch(job.batches(1), 0, 1), 1), 1)
    named = [item for chunk in model for item in chunk.module.parameters_and_names()]
    tied = [param.main_grad.asnumpy().copy() for _, param in named if param.shared_embedding]
    return {
        "names": {name for name, _ in named if "embedding" in name or "output_layer" in name},
        "tied": tied,
        "in_embedding_group": state.is_rank_in_embedding_group(ignore_virtual=True),
        "in_position_group": state.is_rank_in_position_embedding_group(),
    }


@pytest.mark.parametrize("parallel", [{PP: 3}, {PP: 4}, {PP: 2, VPP: 2}], ids=str)
def test_tied_embeddings_are_at_both_ends_only(world, parallel):
    """Equal gradients on the first and last stage, nothing between, position embeddings on the first alone."""
    first, *middle, last = world(job.world_size(parallel))(embeddings_of_stages, parallel)
    positions = job.WORD_EMBEDDINGS.replace("word", "position")
    assert first["names"] == {job.WORD_EMBEDDINGS, positions} and last["names"] == {job.HEAD}
    assert (first["tied"][0] == last["tied"][0]).all() and abs(first["tied"][0]).max() > 0
    assert first["in_embedding_group"] and last["in_embedding_group"]
    assert first["in_position_group"] and not last["in_position_group"]
    for stage in middle:
        assert not stage["names"] and not stage["tied"]
        assert not stage["in_embedding_group"] and not stage["in_position_group"]


def test_one_stage_holds_one_copy(world):
    (only,) = world(1)(embeddings_of_stages, {})
    assert job.HEAD not in only["names"] and not only["tied"]


@pytest.mark.parametrize(
    "dtypes",
    [
        {"compute_dtype": "bfloat16"},
        {"compute_dtype": "float16"},
        {"compute_dtype": "bfloat16", "fp32_residual_connection": True},
    ],
    ids=str,
)
def test_half_precision_travels_as_it_is(world, dtypes):
    """Hidden states cross the stages in the dtype in which a single rank keeps them: nothing is rounded twice."""
    fields = {**job.TIED, **dtypes}
    job.assert_equal_trainings(world(2)(job.train, fields, {PP: 2, VPP: 2}), world(1)(job.train, fields), tied=True)
