"""One model in many layouts: the same loss and the same gradients as on one rank."""

import numpy as np
import pytest

from tests.model import builders
from tests.model.test_parameters import BIASES, MODELS

WIDE = {"num_attention_heads": 8, "num_query_groups": 4}
STRONG = {"init_method_std": 0.2, "scaled_output_init": False}
MODELS_UNDER_TEST = {
    "gpt2": {**builders.GPT2, **STRONG},
    "llama": {**builders.LLAMA, **WIDE, **STRONG, "sliding_window": 5, "window_attn_skip_freq": [0, 1, 1, 0]},
    "sandwich": {**MODELS["sandwich"], **WIDE, **STRONG},
    "post_norm_residual": {
        **builders.GPT2,
        **STRONG,
        "apply_residual_connection_post_norm": True,
        "apply_query_key_layer_scaling": True,
    },
    "biases": {**BIASES, **STRONG, "position_embedding_type": "rope"},  # without positions a shift of keys has no gradient
    "rope_parts": {
        **builders.LLAMA,
        **WIDE,
        **STRONG,
        "rotary_percent": 0.5,
        "rotary_interleaved": True,
        "rotary_seq_len_interpolation_factor": 2.0,
        "hidden_act": "squared_relu",
        "qk_layernorm": True,
    },
    "flash": {**builders.LLAMA, **WIDE, **STRONG, "use_flash_attention": True, "sliding_window": 9},
    "cut_positions": {**builders.GPT2, **STRONG, "parallel_position_embedding": True, "hidden_act": "fast_gelu"},
    "latent": {**builders.LATENT, **STRONG, "qkv_has_bias": True},
    "sinks": {**builders.SINKS, **WIDE, **STRONG},
    "gated_gelu": {**builders.GPT2, **STRONG, "gated_linear_unit": True},
}
LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "tp4_sp": {"tensor_model_parallel_size": 4, "sequence_parallel": True},
}


def loss_and_gradients(model_fields, parallel, rounds=1):
    """Loss and gradients of one batch, accumulated over `rounds` backwards."""
    from mindspeed_ms.core import autograd

    config = builders.make_config(model_fields, **parallel)
    builders.start(config)
    model = builders.make_model(config)
    for _ in range(rounds):
        loss = model(**builders.batch(config))
        autograd.backward(loss)
    return {"loss": float(loss.asnumpy()), "gradients": builders.local_gradients(model)}


def assert_equal_runs(results, reference, tolerance=2e-5):
    """Losses to 1e-6, gradients to `tolerance` of their norm."""
    expected = builders.joined(reference, "gradients")
    for result in results:
        assert abs(result["loss"] - reference[0]["loss"]) < 2e-6 * abs(reference[0]["loss"])
    for name, values in builders.joined(results, "gradients").items():
        error = np.linalg.norm(values - expected[name]) / max(np.linalg.norm(expected[name]), 1e-6)
        # a bias of keys has no true gradient
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize("model", MODELS_UNDER_TEST)
def test_tensor_parallel_layouts(world, model):
    fields = MODELS_UNDER_TEST[model]
    reference = world(1)(loss_and_gradients, fields, {})
    for parallel in LAYOUTS.values():
        results = world(parallel["tensor_model_parallel_size"])(loss_and_gradients, fields, parallel)
        assert_equal_runs(results, reference)


def pipelined(model_fields, parallel):
    """One micro-batch through all stages and chunks, forward and back, over point-to-point messages."""
    from mindspeed_ms.core import autograd
    from mindspeed_ms.core import parallel_state as state

    config = builders.make_config(model_fields, **parallel)
    builders.start(config)
    group = state.get_pipeline_model_parallel_group()
    chunks, data = [], builders.batch(config)
    for chunk in range(state.get_virtual_pipeline_model_parallel_world_size() or 1):
        if state.get_virtual_pipeline_model_parallel_world_size() is not None:
            state.set_virtual_pipeline_model_parallel_rank(chunk)
        chunks.append(builders.make_model(config))
    previous, following = state.get_pipeline_model_parallel_prev_rank(), state.get_pipeline_model_parallel_next_rank()
    length = config.seq_length // (2 if parallel.get("sequence_parallel") else 1)
    shape, loss, saved = (length, 2, config.hidden_size), 0.0, []
    for model in chunks:
        received = None
        if not model.pre_process:
            received = autograd.set_requires_grad(group.recv(shape, "float32", previous))
            model.set_input_tensor([received])
        output = model(**data)
        saved.append((received, output))
        if model.post_process:
            loss = float(output.asnumpy())
        else:
            group.send(output, following)
    for model, (received, output) in zip(reversed(chunks), reversed(saved)):
        autograd.backward(output, None if model.post_process else group.recv(shape, "float32", following))
        if received is not None:
            group.send(autograd.tensor_grad(received), previous)
    loss = max(group.all_gather_object(loss))
    gradients = builders.local_gradients(*chunks)
    word_embeddings = "language_model.embedding.word_embeddings.weight"
    if not config.untie_embeddings_and_output_weights:
        head = gradients.pop("language_model.output_layer.weight", None)
        gradients.update({word_embeddings: head} if head else {})
    return {"loss": loss, "gradients": gradients}


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "parallel",
    [
        {"pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        {
            "pipeline_model_parallel_size": 2,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "num_layer_list": [3, 1],
        },
    ],
    ids=["pp2", "pp2_vpp2", "tp2_sp_pp2_uneven"],
)
def test_pipeline_stages(world, model, parallel):
    fields = MODELS_UNDER_TEST[model]
    size = 2 * parallel.get("tensor_model_parallel_size", 1)
    assert_equal_runs(world(size)(pipelined, fields, parallel), world(1)(loss_and_gradients, fields, {}))


RECOMPUTE = [
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    {"recompute_granularity": "selective"},
    {"recompute_granularity": "selective", "use_flash_attention": True},
    {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "distribute_saved_activations": True,
    },
]


@pytest.mark.parametrize("fields", RECOMPUTE, ids=lambda fields: "-".join(map(str, fields.values())))
def test_recomputation_changes_nothing(world, fields):
    """With dropout everywhere: recomputed layers draw the same masks again."""
    dropout = {**MODELS_UNDER_TEST["gpt2"], "attention_dropout": 0.1, "hidden_dropout": 0.2}
    plain = {**dropout, "use_flash_attention": fields.get("use_flash_attention", False)}
    parallel = {"tensor_model_parallel_size": 2}
    reference = world(2)(loss_and_gradients, plain, parallel, 2)
    results = world(2)(loss_and_gradients, {**dropout, **fields}, parallel, 2)
    assert results[0]["loss"] == reference[0]["loss"]
    assert_equal_runs(results, reference, 1e-6)


@pytest.mark.parametrize("model", ["latent", "sinks"])
def test_recomputation_of_other_attention_kinds(world, model):
    fields = MODELS_UNDER_TEST[model]
    reference = world(1)(loss_and_gradients, fields, {})
    for changes in (RECOMPUTE[0], RECOMPUTE[2], RECOMPUTE[3]):
        assert_equal_runs(world(1)(loss_and_gradients, {**fields, **changes}, {}), reference)


def test_recompute_lists(world):
    """Counts of layers, whole and in part."""
    fields = {**MODELS_UNDER_TEST["gpt2"], "hidden_dropout": 0.2}
    reference = world(1)(loss_and_gradients, fields, {})
    results = world(1)(loss_and_gradients, fields, {"recompute": [2], "select_recompute": [1]})
    assert_equal_runs(results, reference, 1e-6)


def fused_gradients(model_fields):
    """`main_grad` of every parameter after two backwards, filled by the linears themselves and by leaf hooks."""
    from mindspeed_ms import ops
    from mindspeed_ms.core import autograd, storage

    config = builders.make_config(model_fields, gradient_accumulation_fusion=True)
    builders.start(config)
    model = builders.make_model(config)

    def add(parameter):
        if not getattr(parameter, "grad_added_to_main_grad", False):
            ops.add_into(parameter.main_grad, autograd.tensor_grad(parameter))
        autograd.set_grad(parameter, None)

    handles = []
    for parameter in model.get_parameters():
        size = parameter.size
        parameter.main_grad = storage.FlatBuffer(size, "float32").slice(0, size, parameter.shape)
        handles.append(autograd.post_accumulate_hook(parameter, add))
    for _ in range(2):
        loss = model(**builders.batch(config))
        autograd.backward(loss)
    gradients = {
        name: (parameter.sharding, parameter.main_grad.asnumpy().copy()) for name, parameter in model.parameters_and_names()
    }
    return {"loss": float(loss.asnumpy()), "gradients": gradients}


@pytest.mark.parametrize("model", ["gpt2", "llama", "latent"])
def test_fused_gradient_accumulation(world, model):
    """Also for tied embeddings, whose lookup adds to what the head has already accumulated."""
    fields = MODELS_UNDER_TEST[model]
    assert_equal_runs(world(1)(fused_gradients, fields), world(1)(loss_and_gradients, fields, {}, 2), 1e-5)
