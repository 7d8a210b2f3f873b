"""The description of every parameter: names, shapes, shards, flags, counts."""

import itertools
from dataclasses import FrozenInstanceError, replace
from math import prod

import numpy as np
import pytest

from mindspeed_ms.config import AllConfig, ModelParallelConfig, TransformerConfig
from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.config.schema import MoEConfig
from mindspeed_ms.layout.errors import LayoutError
from mindspeed_ms.layout.parameters import WORD_EMBEDDINGS, count_parameters, describe_parameters, describe_whole_model
from mindspeed_ms.layout.ranks import Coordinates, WorldLayout
from mindspeed_ms.layout.sharding import FlatSlice, Initializer, join

HEAD = "language_model.output_layer.weight"
LAYER = "language_model.encoder.layers"


def model_38b(**parallel):
    """The guide's 38BV3."""
    return describe_model(TransformerConfig(
        vocab_size=165664, num_layers=62, hidden_size=6144, num_attention_heads=48, ffn_hidden_size=27648,
        group_query_attention=True, num_query_groups=8, hidden_act="swiglu", normalization="RMSNorm",
        use_sandwich_norm=True, attn_post_norm_scale=0.0447, ffn_post_norm_scale=0.0825, qkv_has_bias=False,
        out_proj_has_bias=False, mlp_has_bias=False, untie_embeddings_and_output_weights=True,
        position_embedding_type="rope", init_method_std=0.00884, embedding_init_std=0.5, seq_length=4096,
        parallel_config=ModelParallelConfig(**parallel),
    ))  # fmt: skip


def small(experts=1, parallel=None, **fields):
    """A model that every layout below divides."""
    options = {
        "vocab_size": 64, "num_layers": 8, "hidden_size": 16, "num_attention_heads": 8, "ffn_hidden_size": 24,
        "seq_length": 12, "group_query_attention": True, "num_query_groups": 4, "hidden_act": "swiglu",
        "mlp_has_bias": True,
    }  # fmt: skip
    options.update(fields)
    parallel, moe = ModelParallelConfig(**(parallel or {})), MoEConfig(num_experts=experts)
    return describe_model(TransformerConfig(**options, parallel_config=parallel, moe_config=moe))


def by_name(config, coordinates=None):
    return {description.name: description for description in describe_parameters(config, coordinates)}


def test_38b_count_is_exact():
    assert count_parameters(model_38b()) == 39_093_884_928
    split = model_38b(tensor_model_parallel_size=8, pipeline_model_parallel_size=4, sequence_parallel=True)
    assert count_parameters(split) == 39_093_884_928


def test_38b_shards_add_up():
    config = model_38b(tensor_model_parallel_size=8, pipeline_model_parallel_size=4, sequence_parallel=True)
    world = WorldLayout.from_description(config.parallel, 128)
    assert (world.dp, world.tp, world.pp) == (4, 8, 4)
    total = 0
    for tp, pp in itertools.product(range(8), range(4)):
        place = Coordinates(tp=tp, pp=pp)
        for description in describe_parameters(config, place):
            if description.counts_in_norm(place):
                total += description.sharding.numel
    assert total == 39_093_884_928
    one = describe_parameters(config, world, 127)
    assert one == describe_parameters(config, world.coordinates(127))


def test_gpt2_names_and_shapes():
    sizes = {"vocab_size": 50, "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 32}
    config = describe_model(TransformerConfig(**sizes, seq_length=16, mlp_has_bias=True))
    config = replace(config, num_tokentypes=2)
    shapes = {name: one.sharding.global_shape for name, one in by_name(config).items()}
    assert shapes == {
        WORD_EMBEDDINGS: (50, 8),
        "language_model.embedding.position_embeddings.weight": (16, 8),
        "language_model.embedding.tokentype_embeddings.weight": (2, 8),
        f"{LAYER}.0.input_norm.gamma": (8,),
        f"{LAYER}.0.input_norm.beta": (8,),
        f"{LAYER}.0.attention.qkv_proj.weight": (24, 8),
        f"{LAYER}.0.attention.qkv_proj.bias": (24,),
        f"{LAYER}.0.attention.out_proj.weight": (8, 8),
        f"{LAYER}.0.attention.out_proj.bias": (8,),
        f"{LAYER}.0.post_attention_norm.gamma": (8,),
        f"{LAYER}.0.post_attention_norm.beta": (8,),
        f"{LAYER}.0.mlp.mapping.weight": (32, 8),
        f"{LAYER}.0.mlp.mapping.bias": (32,),
        f"{LAYER}.0.mlp.projection.weight": (8, 32),
        f"{LAYER}.0.mlp.projection.bias": (8,),
        "language_model.encoder.final_norm.gamma": (8,),
        "language_model.encoder.final_norm.beta": (8,),
    }


def test_sandwich_norm_scale_is_the_initial_weight_of_both_types():
    for normalization, suffix in (("RMSNorm", "weight"), ("FusedRMSNorm", "weight"), ("LayerNorm", "gamma")):
        config = small(normalization=normalization, use_sandwich_norm=True, attn_post_norm_scale=0.25)
        found = by_name(config)
        assert found[f"{LAYER}.3.attn_post_norm.{suffix}"].initializer == Initializer("constant", 0.25)
        assert found[f"{LAYER}.3.ffn_post_norm.{suffix}"].initializer == Initializer.ones()
        assert found[f"{LAYER}.3.input_norm.{suffix}"].initializer == Initializer.ones()
    assert found[f"{LAYER}.3.attn_post_norm.beta"].initializer == Initializer.zeros()


@pytest.mark.parametrize(
    ("fields", "qkv", "out", "mlp"),
    [
        ({}, True, True, True),
        ({"qkv_has_bias": False, "out_proj_has_bias": False, "mlp_has_bias": False}, False, False, False),
        ({"qkv_has_bias": True, "out_proj_has_bias": False, "mlp_has_bias": False}, True, False, False),
        ({"qkv_has_bias": False, "out_proj_has_bias": False, "mlp_has_bias": False, "add_bias_linear": True}, 1, 1, 1),
    ],
)
def test_bias_rule(fields, qkv, out, mlp):
    found = by_name(small(**fields))
    assert (f"{LAYER}.0.attention.qkv_proj.bias" in found) == qkv
    assert (f"{LAYER}.0.attention.out_proj.bias" in found) == out
    assert (f"{LAYER}.0.mlp.mapping.bias" in found) == mlp
    assert (f"{LAYER}.0.mlp.projection.bias" in found) == mlp


def test_sizes_that_follow_from_several_settings():
    """Heads, gate and positions: each setting alone changes the shapes that it decides."""

    def shapes(**fields):
        return {name: one.sharding.global_shape for name, one in by_name(small(**fields)).items()}

    qkv, mapping = f"{LAYER}.0.attention.qkv_proj.weight", f"{LAYER}.0.mlp.mapping.weight"
    assert shapes()[qkv] == (8 * 2 + 2 * 4 * 2, 16)
    assert shapes(group_query_attention=False)[qkv] == (3 * 16, 16)
    assert shapes(kv_channels=6)[qkv] == (8 * 6 + 2 * 4 * 6, 16)
    assert shapes(kv_channels=6)[f"{LAYER}.0.attention.out_proj.weight"] == (16, 8 * 6)
    assert shapes(hidden_act="silu")[mapping] == (24, 16)
    assert shapes(hidden_act="silu", gated_linear_unit=True)[mapping] == (48, 16)
    positions = "language_model.embedding.position_embeddings.weight"
    assert shapes()[positions] == (12, 16)
    assert positions not in shapes(add_position_embedding=False) and positions not in shapes(position_embedding_type="rope")


def test_initial_values():
    config = small(init_method_std=0.02, embedding_init_std=0.5, untie_embeddings_and_output_weights=True)
    found = by_name(config)
    assert found[WORD_EMBEDDINGS].initializer == Initializer.normal(0.5)
    assert found["language_model.embedding.position_embeddings.weight"].initializer == Initializer.normal(0.5)
    assert found[f"{LAYER}.0.attention.qkv_proj.weight"].initializer == Initializer.normal(0.02)
    assert found[HEAD].initializer == Initializer.normal(0.02)
    for ending in ("attention.out_proj", "mlp.projection"):
        assert found[f"{LAYER}.0.{ending}.weight"].initializer == Initializer.normal(0.02 / 4)
        assert found[f"{LAYER}.0.{ending}.bias"].initializer == Initializer.zeros()
    plain = by_name(small(init_method_std=0.02, scaled_output_init=False))
    assert plain[f"{LAYER}.0.mlp.projection.weight"].initializer == Initializer.normal(0.02)
    assert plain[WORD_EMBEDDINGS].initializer == Initializer.normal(0.02)
    constant = by_name(small(init_method=0.5, bias_init="ones"))
    assert constant[f"{LAYER}.0.mlp.mapping.weight"].initializer == Initializer.constant(0.5)
    assert constant[f"{LAYER}.0.mlp.mapping.bias"].initializer == Initializer.ones()
    with pytest.raises(LayoutError, match="init_method 'xavier' is unknown"):
        describe_parameters(small(init_method="xavier"))


def test_tied_head_is_a_copy_on_the_last_stage():
    single = by_name(small())
    assert HEAD not in single
    assert not single[WORD_EMBEDDINGS].shared
    config = small(parallel={"pipeline_model_parallel_size": 4}, embedding_init_std=0.5)
    first, last = by_name(config, Coordinates(pp=0)), by_name(config, Coordinates(pp=3))
    assert first[WORD_EMBEDDINGS].shared and first[WORD_EMBEDDINGS].shared_with is None
    assert last[HEAD].shared and last[HEAD].shared_with == WORD_EMBEDDINGS
    assert last[HEAD].initializer == first[WORD_EMBEDDINGS].initializer
    assert not last[HEAD].counts_in_norm(Coordinates(pp=3))
    for stage in (1, 2):
        middle = by_name(config, Coordinates(pp=stage))
        assert all(name.startswith(LAYER) for name in middle)
    assert count_parameters(config) == count_parameters(small())


def test_flags():
    config = small(parallel={"tensor_model_parallel_size": 2, "sequence_parallel": True})
    found = by_name(config, Coordinates(tp=1))
    qkv = found[f"{LAYER}.2.attention.qkv_proj.weight"]
    assert (qkv.grouping, qkv.tensor_parallel, qkv.sequence_parallel, qkv.decay, qkv.layer) == (
        "qkv", True, False, True, 2,
    )  # fmt: skip
    mapping = found[f"{LAYER}.2.mlp.mapping.weight"]
    assert mapping.grouping == "gate_up"
    assert mapping.sharding.ranges == ((12, 24), (36, 48))
    out_bias = found[f"{LAYER}.2.attention.out_proj.bias"]
    assert (out_bias.tensor_parallel, out_bias.sequence_parallel, out_bias.decay) == (False, True, False)
    gamma = found[f"{LAYER}.2.input_norm.gamma"]
    assert (gamma.sequence_parallel, gamma.decay) == (True, False)
    positions = found["language_model.embedding.position_embeddings.weight"]
    assert not positions.sequence_parallel and not positions.tensor_parallel and positions.decay
    assert found[WORD_EMBEDDINGS].grouping == "vocab"
    assert found[WORD_EMBEDDINGS].sharding.local_shape == (32, 16)
    for uncut in ({}, {"sequence_parallel": True}):  # one tensor-parallel rank holds the whole sequence
        assert not by_name(small(parallel=uncut))[f"{LAYER}.2.input_norm.gamma"].sequence_parallel


def test_parallel_position_embedding_is_cut():
    config = small(parallel={"tensor_model_parallel_size": 2}, parallel_position_embedding=True)
    positions = by_name(config, Coordinates(tp=1))["language_model.embedding.position_embeddings.weight"]
    assert positions.sharding.local_shape == (6, 16)
    assert positions.tensor_parallel


def test_experts_have_global_and_local_names():
    config = small(experts=4, parallel={"expert_model_parallel_size": 2})
    prefix = f"{LAYER}.5.mlp.experts.local_experts"
    found = by_name(config, Coordinates(ep=1))
    weight = found[f"{prefix}.3.mapping.weight"]
    assert weight.local_name == f"{prefix}.1.mapping.weight"
    assert weight.expert and weight.grouping == "gate_up"
    assert f"{prefix}.0.mapping.weight" not in found
    router = found[f"{LAYER}.5.mlp.router.gating.weight"]
    assert router.sharding.global_shape == (4, 16)
    assert not router.expert and not router.tensor_parallel
    whole = describe_whole_model(config)
    assert [one.name for one in whole] == [one.name for one in describe_whole_model(small(experts=4))]
    assert all(one.sharding.is_whole for one in whole)


def _every_rank(config, world):
    layout = WorldLayout.from_description(config.parallel, world)
    for rank in range(world):
        yield from describe_parameters(config, layout, rank)


@pytest.mark.parametrize(
    ("world", "experts", "parallel"),
    [
        (1, 1, {}),
        (4, 1, {"tensor_model_parallel_size": 4}),
        (8, 1, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4}),
        (4, 1, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
        (4, 1, {"pipeline_model_parallel_size": 4, "num_layer_list": [1, 3, 2, 2], "noop_layers": "1,4"}),
        (3, 1, {"pipeline_model_parallel_size": 3, "standalone_embedding_stage": True}),
        (8, 4, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}),
        (8, 4, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_split_and_join_of_the_whole_state(world, experts, parallel, tied):
    config = small(experts, parallel, untie_embeddings_and_output_weights=not tied)
    state = {
        one.name: np.random.default_rng(number).normal(size=one.sharding.global_shape)
        for number, one in enumerate(describe_whole_model(config))
    }
    pieces = {}
    for one in _every_rank(config, world):
        source = state[one.shared_with or one.name]
        pieces.setdefault(one.name, []).append((one.sharding, one.sharding.split(source)))
    assert set(pieces) - {HEAD} == set(state) - {HEAD}
    for name, parts in pieces.items():
        np.testing.assert_array_equal(join(parts), state[name if name in state else WORD_EMBEDDINGS])


@pytest.mark.parametrize("expert_tp", [None, 1])
def test_norm_counts_each_element_once(expert_tp):
    parallel = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    config = small(4, {**parallel, "expert_tensor_parallel_size": expert_tp})
    layout = WorldLayout.from_description(config.parallel, 8)
    count = 0
    for rank in range(8):
        place = layout.coordinates(rank)
        for one in describe_parameters(config, place):
            copies = place.expert_dp if one.expert else place.dp
            if copies == 0 and one.counts_in_norm(place):
                count += one.sharding.numel
    assert count == count_parameters(config)


def test_noop_layers_leave_a_smaller_model():
    noop = small(parallel={"noop_layers": [0, 7], "pipeline_model_parallel_size": 2}, num_layers=10)
    plain = small()
    assert describe_whole_model(noop) == describe_whole_model(plain)


def test_distributed_optimizer_slices_compose():
    config = small(parallel={"tensor_model_parallel_size": 2})
    name = f"{LAYER}.0.mlp.mapping.weight"
    array = np.random.default_rng(0).normal(size=(48, 16))
    pieces = []
    for tp in range(2):
        sharding = by_name(config, Coordinates(tp=tp))[name].sharding
        third = sharding.numel // 3
        for start, stop in ((0, third), (third, 2 * third), (2 * third, sharding.numel)):
            flat = FlatSlice(sharding, start, stop)
            pieces.append((flat, flat.split(array)))
    np.testing.assert_array_equal(join(pieces), array)


@pytest.mark.parametrize(
    ("fields", "parallel", "text"),
    [
        ({"num_attention_heads": 6, "hidden_size": 12, "num_query_groups": 3}, {"tensor_model_parallel_size": 4},
         "num_attention_heads 6 must be divisible by tensor_model_parallel_size 4"),
        ({"num_query_groups": 2}, {"tensor_model_parallel_size": 4}, "num_query_groups 2 must be divisible by"),
        ({"ffn_hidden_size": 26}, {"tensor_model_parallel_size": 4}, "ffn_hidden_size 26 must be divisible by"),
        ({"vocab_size": 66}, {"tensor_model_parallel_size": 4}, "vocab_size 66 must be divisible by"),
        ({"num_query_groups": 3}, {}, "num_attention_heads 8 must be divisible by num_query_groups 3"),
        ({"hidden_size": 20}, {}, "hidden_size 20 must be divisible by num_attention_heads 8"),
        ({"normalization": "BatchNorm"}, {}, "normalization 'BatchNorm' is unknown"),
        ({"position_embedding_type": "alibi"}, {}, "position_embedding_type 'alibi' is unknown"),
    ],
)  # fmt: skip
def test_errors(fields, parallel, text):
    with pytest.raises(ValueError, match=text):
        describe_parameters(replace(small(parallel=parallel), **fields))


def test_expert_errors():
    with pytest.raises(LayoutError, match="num_experts 4 must be divisible by expert_model_parallel_size 3"):
        describe_parameters(small(4, {"expert_model_parallel_size": 3}))


def test_a_description_is_built_once_from_either_configuration():
    model = TransformerConfig(64, 2, 4, 16, 32, seq_length=8, parallel_config=ModelParallelConfig(order="cp-tp-dp-pp"))
    description = describe_model(model)
    assert description == describe_model(AllConfig(model_config=model)) and describe_model(description) is description
    assert (description.head_dim, description.kv_channels, description.parallel.order) == (4, None, "cp-tp-dp-pp")
    with pytest.raises(FrozenInstanceError):
        description.hidden_size = 32
    parallel = ModelParallelConfig(pipeline_model_parallel_size=2, num_layer_list=[[1], [1]])
    listed = describe_model(TransformerConfig(64, 2, 4, 16, 32, seq_length=8, parallel_config=parallel))
    parallel.num_layer_list[0][0] = 2
    assert listed.parallel.num_layer_list == ((1,), (1,)) and hash(listed)
    for other in (AllConfig(), ModelParallelConfig(), {"hidden_size": 4}):
        with pytest.raises(
            ValueError, match=f"a {type(other).__name__} does not describe a model: expected a TransformerConfig"
        ):
            describe_model(other)


def test_world_layout_from_config():
    parallel = {"context_parallel_size": 4, "context_parallel_algo": "hybrid_cp_algo", "ulysses_degree_in_cp": 2}
    assert WorldLayout.from_description(small(parallel=parallel).parallel, 8).groups("ulysses")[0] == [0, 1]
    parallel["context_parallel_algo"] = "megatron_cp_algo"
    assert WorldLayout.from_description(small(parallel=parallel).parallel, 8).groups("ring")[0] == [0, 1, 2, 3]
    parallel.update(context_parallel_algo="hybrid_cp_algo", ulysses_degree_in_cp=None)
    with pytest.raises(LayoutError, match=r"ulysses_degree_in_cp None .* must be given"):
        WorldLayout.from_description(small(parallel=parallel).parallel, 8)
    with pytest.raises(LayoutError, match="context_parallel_algo 'x' is unknown"):
        WorldLayout.from_description(replace(small().parallel, context_parallel_algo="x"), 8)
    order = WorldLayout.from_description(small(parallel={"order": "cp-tp-dp-pp", "context_parallel_size": 2}).parallel, 4).order
    assert order.startswith("cp-tp-dp-pp")


def test_description_is_small():
    config = model_38b(tensor_model_parallel_size=8, pipeline_model_parallel_size=4)
    shapes = [one.sharding.local_shape for one in describe_parameters(config, Coordinates(tp=7))]
    assert sum(map(prod, shapes)) < 39_093_884_928 / 20
