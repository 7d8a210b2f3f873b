"""The cells hold exactly the parameters that `layout` computes from the configuration, and start alike everywhere."""

from dataclasses import fields

import numpy as np
import pytest

from tests.model import builders

SANDWICH = {
    **builders.LLAMA,
    "use_sandwich_norm": True,
    "attn_post_norm_scale": 0.25,
    "ffn_post_norm_scale": 0.5,
    "init_method_std": 0.02,
    "embedding_init_std": 0.5,
}
CUT_POSITIONS = {
    **builders.GPT2,
    "parallel_position_embedding": True,
    "scaled_output_init": False,
    "max_position_embeddings": 64,
    "params_dtype": "bfloat16",
    "embedding_init_dtype": "float32",
}
BIASES = {
    **builders.SIZES,
    "position_embedding_type": "none",
    "hidden_act": "relu",
    "kv_channels": 8,
    "use_final_norm": False,
    "bias_init": 0.125,
    "qk_layernorm": True,
}
TIED_LLAMA = {**builders.LLAMA, "untie_embeddings_and_output_weights": False}
MODELS = {
    "gpt2": builders.GPT2,
    "llama": builders.LLAMA,
    "sandwich": SANDWICH,
    "cut_positions": CUT_POSITIONS,
    "biases": BIASES,
    "tied_llama": TIED_LLAMA,
    "latent": builders.LATENT,
    "latent_plain": {**builders.LATENT, "q_lora_rank": None, "qk_layernorm": False, "qkv_has_bias": True},
    "sinks": builders.SINKS,
    "further tokens": {**builders.LLAMA, "mtp_num_layers": 2},
    "further tokens, tied": {**TIED_LLAMA, "mtp_num_layers": 1},
}
LAYOUTS = {
    "one": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "tp2_pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
    "pp2_vpp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "pp2_noop": {"pipeline_model_parallel_size": 2, "num_layer_list": [3, 1], "noop_layers": [1]},
}


PUBLIC_ATTRIBUTES = {
    "sharding": "sharding",
    "tensor_parallel": "tensor_model_parallel",
    "sequence_parallel": "sequence_parallel",
    "shared": "shared_embedding",
    "expert": "is_expert",
    "grouping": "grouping",
    "trainable": "requires_grad",
}


def world_size(parallel):
    """Ranks that a layout needs."""
    return parallel.get("tensor_model_parallel_size", 1) * parallel.get("pipeline_model_parallel_size", 1)


def parameters(model_fields, parallel):
    """What this rank's chunks hold, compared with the description; returns `{name: (sharding, values)}`."""
    from mindspeed_ms.config.model_description import describe_model
    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.core.device import dtype_name
    from mindspeed_ms.core.optimizer.clip_grads import counts_in_norm
    from mindspeed_ms.core.optimizer.optimizer_config import OptimizerConfig
    from mindspeed_ms.core.optimizer.param_groups import has_no_weight_decay
    from mindspeed_ms.core.tensor_parallel.cell import description_of
    from mindspeed_ms.layout.parameters import describe_parameters

    config = builders.make_config(model_fields, **parallel)
    builders.start(config)
    values, found, settings = {}, [], OptimizerConfig()
    for chunk in range(parallel.get("virtual_pipeline_model_parallel_size", 1)):
        if parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None:
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        for name, parameter in builders.make_model(config).parameters_and_names():
            assert parameter.name == name
            values[name] = (parameter.sharding, parameter.float().asnumpy().copy())
            facts = fields_of(description_of(parameter))
            place = (chunk, _original(name, parameter.description))
            rules = (not has_no_weight_decay(name, parameter, settings), counts_in_norm(parameter))
            assert all(getattr(parameter, key) == facts[field] for field, key in PUBLIC_ATTRIBUTES.items())
            assert (tuple(parameter.shape), dtype_name(parameter.dtype)) == (facts["sharding"].local_shape, facts["dtype"])
            found.append((name, facts, place, rules))
    at = parallel_state.get_coordinates()
    described = [
        (one.local_name, fields_of(one), (one.chunk, one.shared_with), (one.decay, one.counts_in_norm(at)))
        for one in describe_parameters(describe_model(config), at)
    ]
    missing, extra = [
        [item for item in these if item not in those] for these, those in ((described, found), (found, described))
    ]
    assert not missing and not extra, f"described only: {missing}; found only: {extra}"
    return values


def fields_of(description):
    """Fields that do not depend on the place in the model: a cell does not know that."""
    place = ("name", "local_name", "chunk", "layer", "shared_with")
    return {field.name: getattr(description, field.name) for field in fields(description) if field.name not in place}


def _original(name, description):
    return description.original_name(name) if description.shared_with else None


@pytest.mark.parametrize("model", MODELS)
def test_cells_hold_what_the_layout_describes_and_start_alike(world, model):
    """All layouts of one model: same parameters as described, same initial values as on one rank."""
    reference = None
    for name, parallel in LAYOUTS.items():
        if name == "pp2_noop" and model != "llama":
            continue
        whole = builders.joined(world(world_size(parallel))(parameters, MODELS[model], parallel))
        if name == "pp2_noop":  # a layer less: other scaled projections
            continue
        if reference is None:
            reference = whole
            continue
        for key, values in whole.items():
            original = key
            if key == "language_model.output_layer.weight" and key not in reference:
                original = "language_model.embedding.word_embeddings.weight"
            np.testing.assert_array_equal(values, reference[original], err_msg=f"{name} {key}")


def test_initial_spread(world):
    """Embedding, blocks and scaled output projections have the configured spread; post norms their scale."""
    whole = builders.joined(world(1)(parameters, SANDWICH, {}))
    layer = "language_model.encoder.layers.2."
    assert abs(whole["language_model.embedding.word_embeddings.weight"].std() - 0.5) < 0.02
    assert abs(whole[layer + "attention.qkv_proj.weight"].std() - 0.02) < 0.001
    assert abs(whole[layer + "mlp.projection.weight"].std() - 0.02 / 8**0.5) < 0.0004
    assert (whole[layer + "attn_post_norm.weight"] == 0.25).all()
    assert (whole[layer + "ffn_post_norm.weight"] == 0.5).all()


def first_loss():
    """Loss of a fresh model over 512 ids."""
    config = builders.make_config({**builders.GPT2, "vocab_size": 512})
    builders.start(config)
    return float(builders.make_model(config)(**builders.batch(config)).asnumpy())


def test_first_loss_is_uniform(world):
    assert abs(world(1)(first_loss)[0] - np.log(512)) < 0.05


def users_parameter():
    """Descriptions of a user's Parameter and of a layer's weight, both with attributes that the user set."""
    from mindspore import Parameter, Tensor

    from mindspeed_ms.core.tensor_parallel.cell import description_of
    from mindspeed_ms.legacy.model.norms import RMSNorm

    builders.start(builders.make_config(builders.LLAMA))
    own, layers = Parameter(Tensor(np.ones((4, 2), np.float32)), requires_grad=False), RMSNorm(4).weight
    own.tensor_model_parallel = own.is_expert = layers.sequence_parallel = True
    return description_of(own), description_of(layers)


def test_megatrons_attributes_describe_a_users_parameter(world):
    """What a user sets is not ignored, neither on a parameter without a description nor on a layer's."""
    own, layers = world(1)(users_parameter)[0]
    assert own.sharding.global_shape == (4, 2) and own.original_name("head.weight") == "head.weight"
    assert own.tensor_parallel and own.expert and not (own.trainable or own.sequence_parallel or own.shared)
    assert layers.sequence_parallel and layers.trainable and not layers.tensor_parallel


def token_types():
    """Names and shapes of a built and a described model with token types; the descriptions that its cells hold."""
    from mindspeed_ms.layout.parameters import describe_parameters
    from mindspeed_ms.legacy.model.module import Module

    config = builders.make_config({**builders.GPT2, "num_layers": 2})
    builders.start(config)
    model = builders.make_model(config, num_tokentypes=2)
    described = {one.name: one.sharding.global_shape for one in describe_parameters(model.described.model)}
    built = {name: tuple(parameter.shape) for name, parameter in model.parameters_and_names()}
    modules = [cell for _, cell in model.cells_and_names() if isinstance(cell, Module) and cell.described.model]
    return built, described, len(modules), len({id(cell.described.model) for cell in modules})


def test_a_model_builds_one_description_with_its_token_types(world):
    built, described, modules, descriptions = world(1)(token_types)[0]
    assert built == described and built["language_model.embedding.tokentype_embeddings.weight"] == (2, 64)
    assert modules > 10 and descriptions == 1
