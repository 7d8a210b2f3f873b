"""A mixture of experts, described by the configuration alone: names, cuts, copies, counts; kept and read in any layout."""

from math import prod

import numpy as np
import pytest

from mindspeed_ms.config import ConfigError, init_configs_from_dict
from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core.dist_checkpointing.manifest import Manifest, StoredTensor, whole_slice
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.core.dist_checkpointing.shard_file import Entry, write_shard
from mindspeed_ms.layout.parameters import count_parameters, describe_parameters, describe_whole_model
from mindspeed_ms.layout.ranks import WorldLayout
from mindspeed_ms.layout.sharding import uncovered
from mindspeed_ms.tools.checkpoint.target_layout import layout_cut

MOE = {
    "num_experts": 8, "moe_ffn_hidden_size": 24, "first_k_dense_replace": 1, "n_shared_experts": 2,
    "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid",
}  # fmt: skip
# world, tp, pp, ep, expert tp (None: tp)
LAYOUTS = [(8, 2, 1, 4, None), (4, 1, 1, 2, None), (8, 1, 1, 8, None), (16, 2, 2, 4, 1), (4, 2, 2, 1, None), (1, 1, 1, 1, None)]
LAYER = "language_model.encoder.layers"


def configured(tp=1, pp=1, ep=1, expert_tp=None, moe=MOE, **model):
    sizes = {"vocab_size": 64, "num_layers": 4, "hidden_size": 16, "num_attention_heads": 8, "ffn_hidden_size": 32,
             "seq_length": 16, "hidden_act": "swiglu", "position_embedding_type": "rope", "qkv_has_bias": False,
             "out_proj_has_bias": False, "normalization": "RMSNorm", "untie_embeddings_and_output_weights": True}  # fmt: skip
    return init_configs_from_dict({
        "model_config": {**sizes, **model},
        "moe_config": moe,
        "parallel_config": {
            "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": expert_tp, "sequence_parallel": tp > 1},
    })  # fmt: skip


def described(*arguments, **options):
    return describe_model(configured(*arguments, **options))


def held_by_ranks(model, world):
    """(rank's coordinates, description) of every parameter of every rank."""
    layout = WorldLayout.from_description(model.parallel, world)
    for rank in range(world):
        at = layout.coordinates(rank)
        for one in describe_parameters(model, at):
            yield at, one


def global_state(grouped):
    """{name: float32 array} of the whole model."""
    whole = describe_whole_model(described(moe={**MOE, "moe_grouped_gemm": grouped}))
    return {one.name: np.random.default_rng(number).normal(size=one.sharding.global_shape).astype(np.float32)
            for number, one in enumerate(whole)}  # fmt: skip


def save(folder, model, world, state):
    """One file per rank with what it is the first to hold, and a manifest."""
    manifest, held = Manifest(iteration=1), [[] for _ in range(world)]
    for at, one in held_by_ranks(model, world):
        copy = at.expert_dp if one.expert else at.dp
        if copy == 0 and (one.tensor_parallel or (at.expert_tp if one.expert else at.tp) == 0):
            held[at.rank].append(one)
    for rank, parts in enumerate(held):
        name = f"state_{rank:05d}.safetensors"
        arrays = [np.ascontiguousarray(one.sharding.split(state[one.name])) for one in parts]
        entries = [Entry(one.name, "float32", array.shape, array.nbytes, array.reshape(-1).view(np.uint8))
                   for one, array in zip(parts, arrays)]  # fmt: skip
        manifest.files[name] = write_shard(folder / name, entries) if entries else 0
        for one, entry in zip(parts, entries):
            stored = manifest.tensors.setdefault(one.name, StoredTensor(one.sharding.global_shape, "float32", one.grouping))
            stored.pieces.append(entry.piece(whole_slice(one.sharding), name))
    (folder / "manifest.json").write_bytes(manifest.to_bytes())


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("source", LAYOUTS)
def test_experts_saved_in_one_layout_are_bit_equal_in_every_other(tmp_path, source, grouped):
    moe, state = {**MOE, "moe_grouped_gemm": grouped}, global_state(grouped)
    save(tmp_path, described(*source[1:], moe=moe), source[0], state)
    with CheckpointReader(tmp_path) as reader:
        for key, array in state.items():
            np.testing.assert_array_equal(reader.read_whole(key), array)
        for world, *sizes in LAYOUTS:
            for _, one in held_by_ranks(described(*sizes, moe=moe), world):
                out = np.full(one.sharding.numel, np.nan, np.float32)
                assert reader.read(one.name, whole_slice(one.sharding), out) == []
                np.testing.assert_array_equal(out.reshape(one.sharding.local_shape), one.sharding.split(state[one.name]))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_element_counts_once_in_a_norm(layout, grouped):
    model = described(*layout[1:], moe={**MOE, "moe_grouped_gemm": grouped})
    held = held_by_ranks(model, layout[0])
    counted = sum(one.sharding.numel for at, one in held
                  if (at.expert_dp if one.expert else at.dp) == 0 and one.counts_in_norm(at))  # fmt: skip
    assert counted == count_parameters(model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_cut_for_another_layout_holds_every_expert(tmp_path, layout):
    moe = {**MOE, "moe_grouped_gemm": True}
    save(tmp_path, described(moe=moe), 1, global_state(True))
    world, tp, pp, *_ = layout
    found = {}
    for parts in layout_cut(Manifest.read(tmp_path), configured(*layout[1:], moe=moe), world // (tp * pp)):
        for key, part in parts:
            found.setdefault(key, []).append(part)
    whole = {one.name: one.sharding.numel for one in describe_whole_model(described(moe=moe))}
    assert {key: sum(part.stop - part.start for part in parts) for key, parts in found.items()} == whole
    assert not any(uncovered(parts) for parts in found.values())


def test_names_and_cuts():
    layout = WorldLayout.from_description(described(2, 1, 4).parallel, 8)
    plain = {one.name: one for one in describe_parameters(described(2, 1, 4), layout, 3)}  # tp 1, ep 1
    assert f"{LAYER}.0.mlp.mapping.weight" in plain and f"{LAYER}.0.mlp.router.gating.weight" not in plain
    expert = plain[f"{LAYER}.1.mlp.experts.local_experts.3.mapping.weight"]
    assert expert.local_name.endswith("local_experts.1.mapping.weight") and expert.sharding.ranges == ((12, 24), (36, 48))
    shared = plain[f"{LAYER}.1.mlp.shared_experts.projection.weight"]
    assert shared.sharding.global_shape == (16, 48) and shared.sharding.local_shape == (16, 24) and not shared.expert
    bias = plain[f"{LAYER}.1.mlp.router.expert_bias"]
    assert bias.sharding.is_whole and not bias.trainable
    grouped = described(2, 1, 4, moe={**MOE, "moe_grouped_gemm": True})
    found = {one.name: one for one in describe_parameters(grouped, layout, 3)}
    first, second = (found[f"{LAYER}.1.mlp.experts.weight{number}"].sharding for number in (1, 2))
    assert (first.global_shape, first.local_shape, first.leading) == ((8, 16, 48), (2, 16, 24), (2, 4))
    assert first.ranges == expert.sharding.ranges  # its part of the gate and its part of the up projection
    assert (second.global_shape, second.local_shape, second.leading) == ((8, 24, 16), (2, 12, 16), (2, 4))


# published totals: what the models' own weight files hold
MIXTRAL_8X7B = {"vocab_size": 32000, "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
                "ffn_hidden_size": 14336, "group_query_attention": True, "num_query_groups": 8}  # fmt: skip
DEEPSEEK_MOE_16B = {"vocab_size": 102400, "num_layers": 28, "hidden_size": 2048, "num_attention_heads": 16,
                    "ffn_hidden_size": 10944}  # fmt: skip
DEEPSEEK_EXPERTS = {"num_experts": 64, "moe_ffn_hidden_size": 1408, "n_shared_experts": 2, "first_k_dense_replace": 1}


@pytest.mark.parametrize(("model", "moe", "total"), [
    (MIXTRAL_8X7B, {"num_experts": 8}, 46_702_792_704),
    (DEEPSEEK_MOE_16B, DEEPSEEK_EXPERTS, 16_375_728_128),
    (DEEPSEEK_MOE_16B, {**DEEPSEEK_EXPERTS, "n_shared_experts": None, "moe_shared_expert_intermediate_size": 2816},
     16_375_728_128),
])  # fmt: skip
@pytest.mark.parametrize("grouped", [False, True])
def test_parameters_of_published_models(model, moe, total, grouped):
    assert count_parameters(described(moe={**moe, "moe_grouped_gemm": grouped}, **model)) == total
    split = described(2, 2, 4, moe={**moe, "moe_grouped_gemm": grouped}, **model)
    layout = WorldLayout.from_description(split.parallel, 16)
    held = sum(prod(one.sharding.local_shape) for rank in range(16) for one in describe_parameters(split, layout, rank)
               if one.expert and layout.coordinates(rank).expert_dp == 0)  # fmt: skip
    width = moe.get("moe_ffn_hidden_size", model["ffn_hidden_size"])
    layers = model["num_layers"] - moe.get("first_k_dense_replace", 0)
    assert held == layers * moe["num_experts"] * 3 * model["hidden_size"] * width


@pytest.mark.parametrize(("frequency", "dense", "layers"), [
    (None, None, [0, 1, 2, 3]), ([2], None, [0, 2]), (2, None, [0, 2]), ([0, 1, 0, 1], None, [1, 3]), (None, 3, [3]),
    ([2], 1, [2]),
])  # fmt: skip
def test_which_layers_hold_experts(frequency, dense, layers):
    moe = {"num_experts": 8, "moe_layer_freq": frequency, "first_k_dense_replace": dense}
    names = {one.name for one in describe_whole_model(described(moe=moe))}
    assert [layer for layer in range(4) if f"{LAYER}.{layer}.mlp.router.gating.weight" in names] == layers
    # noop layers keep their place in the pattern
    if frequency == [0, 1, 0, 1]:
        all_config = configured(moe={**moe, "moe_layer_freq": [0, 1, 0, 0, 1]}, num_layers=5)
        all_config.parallel_config.noop_layers = [2]
        names = {one.name for one in describe_whole_model(describe_model(all_config))}
        assert [layer for layer in range(4) if f"{LAYER}.{layer}.mlp.router.gating.weight" in names] == [1, 3]


@pytest.mark.parametrize(("moe", "key", "words"), [
    ({"moe_layer_freq": [0, 2, 1, 1]}, "moe_layer_freq", "0 or 1 for each of the 4 layers"),
    ({"moe_layer_freq": [1, 0]}, "moe_layer_freq", "each of the 4 layers"),
    ({"first_k_dense_replace": 4}, "first_k_dense_replace", "leaves no layer with experts"),
    ({"first_k_dense_replace": 5}, "first_k_dense_replace", "more than the 4 layers"),
    ({"n_shared_experts": 1, "moe_shared_expert_intermediate_size": 7}, "n_shared_experts", "keep one"),
])  # fmt: skip
def test_experts_that_do_not_fit_the_layers(moe, key, words):
    with pytest.raises(ConfigError, match=rf"moe_config\.{key}.*{words}"):
        configured(moe={"num_experts": 8, **moe})
