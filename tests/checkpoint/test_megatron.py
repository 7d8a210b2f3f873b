"""Megatron checkpoints: read where they are, and written, in every style of names and layout."""

import argparse
import copy
import json
import os

import numpy as np
import pytest

from mindspeed_ms.config import init_configs_from_dict
from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import optimizer_key
from mindspeed_ms.core.dist_checkpointing.megatron import buffers, kept, names
from mindspeed_ms.core.dist_checkpointing.megatron.manifest import read_megatron_manifest
from mindspeed_ms.core.dist_checkpointing.megatron.writer import MegatronTarget
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.core.dist_checkpointing.torch_file import (
    Global,
    Opaque,
    TensorReference,
    TensorToWrite,
    read_torch_file,
    write_torch_file,
)
from mindspeed_ms.layout.parameters import describe_whole_model
from mindspeed_ms.testing import checkpoint_runs as runs
from mindspeed_ms.testing.megatron_checkpoints import MadeUpReader, flat, same
from mindspeed_ms.testing.parity import recordings
from mindspeed_ms.tools.checkpoint.__main__ import main
from mindspeed_ms.tools.checkpoint.rewrite import write_checkpoint
from mindspeed_ms.tools.checkpoint.target_layout import layout_cut
from mindspeed_ms.tools.converter.__main__ import main as converter

LLAMA = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "ffn_hidden_size": 24,
    "seq_length": 8,
    "vocab_size": 32,
    "hidden_act": "swiglu",
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "qkv_has_bias": False,
    "out_proj_has_bias": False,
    "mlp_has_bias": False,
}
GPT = {
    "num_layers": 5,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 24,
    "seq_length": 8,
    "max_position_embeddings": 12,
    "vocab_size": 32,
    "hidden_act": "gelu",
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "qkv_has_bias": True,
    "out_proj_has_bias": True,
    "mlp_has_bias": True,
}
NORMED = {**LLAMA, "qk_layernorm": True, "qkv_has_bias": True}
SCALING = {"type": "llama3", "factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0}
WINDOWS = {**LLAMA, "sliding_window": 4, "window_attn_skip_freq": [0, 1, 1, 0], "rope_scaling": SCALING}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 12}
TP2, PP2, EP2 = ({f"{name}_model_parallel_size": 2} for name in ("tensor", "pipeline", "expert"))
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
SP = {"sequence_parallel": True}
# style, model, experts, layout, distributed, dtype
CASES = {
    "core": (names.CORE, LLAMA, {}, {**TP2, **VPP2}, False, "float32"),
    "core, qk norm, distributed": (names.CORE, NORMED, {}, {**TP2, **PP2}, True, "float32"),
    "core, tied, uneven stages": (names.CORE, GPT, {}, {**TP2, **PP2, "num_layer_list": [1, 4]}, False, "float32"),
    "core, tied, distributed": (names.CORE, GPT, {}, {**PP2, "num_layer_list": [1, 4]}, True, "bfloat16"),
    "core, a stage for the embedding": (
        names.CORE,
        GPT,
        {},
        {"pipeline_model_parallel_size": 3, "standalone_embedding_stage": True, "num_layer_list": [1, 4]},
        False,
        "float32",
    ),
    "core, bfloat16": (names.CORE, LLAMA, {}, {**TP2}, False, "bfloat16"),
    "core, float16, chunks, distributed": (
        names.CORE,
        {**LLAMA, "num_layers": 8},
        {},
        {**VPP2, "noop_layers": [0, 7]},
        True,
        "float16",
    ),
    "core, experts on stages": (names.CORE, LLAMA, EXPERTS, {**TP2, **SP, **VPP2, **EP2}, False, "float32"),
    "core, experts whole in each rank": (
        names.CORE,
        LLAMA,
        EXPERTS,
        {**TP2, **SP, **EP2, "expert_tensor_parallel_size": 1},
        False,
        "float32",
    ),
    "core, experts whole, without expert parallelism": (
        names.CORE,
        LLAMA,
        EXPERTS,
        {**TP2, **SP, "expert_tensor_parallel_size": 1},
        False,
        "float32",
    ),
    "core, experts whole, more tensor ranks than expert ranks": (
        names.CORE,
        {**LLAMA, "num_query_groups": 4, "group_query_attention": False},
        EXPERTS,
        {"tensor_model_parallel_size": 4, **SP, **EP2, "expert_tensor_parallel_size": 1},
        True,
        "float32",
    ),
    "core, experts, distributed": (names.CORE, LLAMA, EXPERTS, {**EP2}, True, "bfloat16"),
    "core, experts in one tensor": (
        names.CORE,
        LLAMA,
        {**EXPERTS, "moe_grouped_gemm": True},
        {**TP2, **SP, **EP2},
        False,
        "float32",
    ),
    "engine": (names.TRANSFORMER_ENGINE, WINDOWS, {}, {**TP2}, False, "float32"),
    "engine, biases, distributed": (names.TRANSFORMER_ENGINE, GPT, {}, {}, True, "bfloat16"),
    "engine, experts": (
        names.TRANSFORMER_ENGINE,
        LLAMA,
        {**EXPERTS, "moe_layer_freq": [0, 1, 0, 1], "moe_shared_expert_intermediate_size": 8},
        {**EP2, **PP2},
        False,
        "float32",
    ),
    "core, experts on one stage, distributed": (
        names.CORE,
        LLAMA,
        {**EXPERTS, "moe_layer_freq": [0, 0, 1, 1]},
        {**EP2, **PP2},
        True,
        "float32",
    ),
    "legacy": (names.LEGACY, GPT, {}, {**TP2, **PP2, "num_layer_list": [1, 4]}, False, "float32"),
    "legacy, untied, chunks": (names.LEGACY, LLAMA, {}, VPP2, True, "float32"),
    "old legacy": (names.OLD_LEGACY, GPT, {}, {}, False, "bfloat16"),
}


def configured(model, experts=None, parallel=None):
    return init_configs_from_dict({"model_config": model, "moe_config": experts or {}, "parallel_config": parallel or {}})


def made_up(case):
    style, model, experts, parallel, distributed, dtype = CASES[case]
    config = configured(model, experts, parallel)
    return MegatronTarget(MadeUpReader(config, dtype), config, style, distributed)


def assert_equal(reader, arrays):
    assert set(reader.manifest.tensors) == set(arrays)
    for key, values in arrays.items():
        assert np.array_equal(reader.read_whole(key), values), key


@pytest.mark.parametrize("case", CASES)
def test_written_and_read_again(tmp_path, case):
    """Every tensor is there once with its bits, whatever the names, the layout and the optimizer; so are counters and args."""
    target = made_up(case)
    source = target.reader
    path = target.write(str(tmp_path))
    manifest = read_megatron_manifest(str(tmp_path))
    with CheckpointReader(path, manifest) as reader:
        assert_equal(reader, source.arrays)
        assert reader.verify() == [] and reader.incomplete() == []
    assert not manifest.not_resumable and manifest.iteration == 7 and manifest.style == target.style
    assert manifest.states["optimizer"] == source.manifest.states["optimizer"]
    assert manifest.states["opt_param_scheduler"] == source.manifest.states["opt_param_scheduler"]
    assert manifest.states["train_state"]["consumed_train_samples"] == 28
    style, model, experts, parallel, _, dtype = CASES[case]
    for section, wanted in (("model_config", model), ("moe_config", experts), ("parallel_config", parallel)):
        found = manifest.args[section]
        for name, value in wanted.items():
            if isinstance(value, dict):
                assert value.items() <= found[name].items(), name
            elif not name.endswith("_has_bias") or not model["add_bias_linear"]:
                assert found[name] == value, name
    assert manifest.args["model_config"]["params_dtype"] == dtype
    assert manifest.foreign["megatron"]["style"] == style
    assert sorted(os.listdir(tmp_path)) == ["iter_0000007", "latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize("case", ["core", "core, tied, distributed", "core, experts on stages", "legacy"])
def test_written_twice_is_equal(tmp_path, case):
    """From its own result in another layout and back: all trees of the files are equal, args and order of tensors too."""
    first = made_up(case)
    path = first.write(str(tmp_path / "first"))
    manifest = read_megatron_manifest(path)
    values = copy.deepcopy(manifest.args)
    one = init_configs_from_dict({**values, "parallel_config": {}})
    with CheckpointReader(path, manifest) as reader:
        other = MegatronTarget(reader, one).write(str(tmp_path / "other"))
        native = write_checkpoint(reader, str(tmp_path / "native"), layout_cut(manifest, one))
    for source in (other, native):
        again = None if source == native else read_megatron_manifest(source)
        with CheckpointReader(source, again) as reader:
            back = MegatronTarget(reader, init_configs_from_dict(values)).write(str(tmp_path / f"back of {source == native}"))
        assert differences(path, back) == []


def differences(one, other, skipped=()):
    """Places of the files' trees that differ, and files whose tensors have another order."""
    found = []
    files = sorted(os.path.relpath(os.path.join(place, name), one) for place, _, names_ in os.walk(one) for name in names_)
    for name in files:
        trees = [dict(flat(read_torch_file(os.path.join(folder, name)))) for folder in (one, other)]
        orders = [
            [place for place, value in tree.items() if isinstance(value, TensorReference) and not place.startswith(skipped)]
            for tree in trees
        ]
        if orders[0] != orders[1]:
            found.append(f"{name}: order")
        for place in sorted(trees[0].keys() | trees[1].keys()):
            if skipped and place.startswith(skipped):
                continue
            if not all(place in tree for tree in trees) or not same(*(tree[place] for tree in trees)):
                found.append(f"{name}: {place}")
    return found


# ---- what real Megatron wrote ---------------------------------------------------------------------------------------

golden = pytest.mark.skipif(recordings.golden_folder() is None, reason="needs the full recordings")
RECORDED = (
    *("llama_tp1pp1", "gpt2_tp2pp2", "llama_tp2pp2vpp2", "legacy_gpt2_tp1pp1", "llama_dp2_distopt"),
    *("llama_bf16_tp2dp2_distopt", "mixtral_ep2", "qwen_tp2pp1", "vocab100_llama_tp2"),
)
# the merged states were made from these runs; the others differ from them by the rounding of their layouts
BITS = ("llama_tp1pp1", "legacy_gpt2_tp1pp1")


def recorded(name):
    return str(recordings.golden_folder() / "ckpt" / name)


@golden
@pytest.mark.parametrize("name", [*RECORDED, "llama_torchdist_tp2pp2"])
def test_recorded_checkpoint(name):
    """Weights and moments are those of the merged state; every element is stored once, and ranks agree on copies."""
    manifest = read_megatron_manifest(recorded(name))
    variant = next((one for one in ("legacy_gpt2", "gpt2", "llama", "mixtral") if name.startswith(one)), None)
    with CheckpointReader(os.path.join(recorded(name), "iter_0000010"), manifest) as reader:
        assert reader.verify() == []
        if variant is None:
            return
        with np.load(recordings.golden_folder() / "ckpt" / f"full_{variant}.npz") as merged:
            arrays = {place: merged[place] for place in merged.files if place.partition("/")[0] in ("w", "m", "v")}
        arrays = {f"{place[0]}/{names.core_name(place[2:])[0]}": values for place, values in arrays.items()}
        ours = our_keys(manifest, {place.partition("/")[2] for place in arrays})
        states = {"m": "exp_avg", "v": "exp_avg_sq"}
        for place, expected in arrays.items():
            kind, _, core = place.partition("/")
            key = optimizer_key(states[kind], ours[core]) if kind in states else ours[core]
            values = reader.read_whole(key)
            if manifest.tensors[key].dtype == "bfloat16":
                values = (values.astype(np.uint32) << 16).view(np.float32)
            if name in BITS:
                assert np.array_equal(values, expected), key
            else:
                tolerance = 2e-2 if "bf16" in name else 1e-3 if core.endswith("linear_qkv.bias") else 1e-5
                np.testing.assert_allclose(values, expected, rtol=0, atol=tolerance, err_msg=key)


def our_keys(manifest, core_names):
    """{core name at one rank: our key}."""
    described = describe_whole_model(describe_model(manifest.configuration))
    result = {names.core_name_of(one.local_name, one.layer): one.name for one in described}
    assert set(result) == set(core_names)
    return result


@golden
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_checkpoint_there_and_back(tmp_path, name):
    """To our format in another layout, and back in Megatron's own: each tensor, group and argument is as it was."""
    source = os.path.join(recorded(name), "iter_0000010")
    manifest = read_megatron_manifest(source)
    values = copy.deepcopy(manifest.args)
    parallel = {
        "tensor_model_parallel_size": 2 if manifest.layout["tensor"] == 1 else 1,
        "pipeline_model_parallel_size": 2 if manifest.layout["pipeline"] == 1 else 4,
        "sequence_parallel": "mixtral" in name,
    }
    with CheckpointReader(source, manifest) as reader:
        cut = layout_cut(manifest, init_configs_from_dict({**values, "parallel_config": parallel}), 2)
        native = write_checkpoint(reader, str(tmp_path / "native"), cut)
    with CheckpointReader(native) as reader:
        back = MegatronTarget(reader, init_configs_from_dict(values)).write(str(tmp_path / "back"))
    assert differences(source, back, ("/rng_state", "/rerun_state_machine")) == []


def test_converter_and_checkpoint_tool(tmp_path, capsys):
    """convert_ckpt.py from Megatron to Megatron in another layout and style, verified; reshard makes it ours."""
    source = made_up("core").write(str(tmp_path / "source"))
    flags = ["--load-model-type", "mg", "--save-model-type", "mg", "--load-dir", source, "--verify", "--save-to-legacy"]
    flags += [
        "--save-dir",
        str(tmp_path / "other"),
        "--target-tensor-parallel-size",
        "1",
        "--target-pipeline-parallel-size",
        "4",
    ]
    assert converter(flags) == 0 and "verified: 81 tensors" in capsys.readouterr().out
    assert (tmp_path / "other" / "iter_0000007" / "mp_rank_00_003").is_dir()
    assert main(["reshard", str(tmp_path / "other"), str(tmp_path / "ours"), "--tensor-model-parallel-size", "2"]) == 0
    assert main(["diff", str(tmp_path / "ours"), source]) == 0


# ---- flat buffers ----------------------------------------------------------------------------------------------------


def test_places_in_flat_buffers():
    """Reversed order, starts at multiples of 64; a bucket's end is not padded, and a tied embedding is a bucket."""
    starts, total = buffers.places([100, 64, 10])
    assert starts == [128, 64, 0] and total == 228
    starts, total = buffers.places([100, 64, 10], shared=(0,))
    assert starts == [128, 64, 0] and total == 228
    starts, total = buffers.places([70, 10, 10], shared=(2,))
    assert starts == [74, 10, 0] and total == 144
    starts, total = buffers.places([70, 10, 10], bucket_size=10)
    assert starts == [20, 10, 0] and total == 90
    assert buffers.places_in_buckets([70, 10, 10], [74, 70]) == [(1, 0), (0, 64), (0, 0)]
    assert buffers.places_in_buckets([70, 10, 10], [74, 60]) is None
    arguments = {"overlap_grad_reduce": True, "data_parallel_size": 64}
    assert buffers.bucket_size_of(arguments, 0, 0) == 64_000_000
    assert buffers.bucket_size_of({**arguments, "data_parallel_size": 2}, 0, 0) == 40_000_000
    assert buffers.bucket_size_of({**arguments, "ddp_bucket_size": 5}, 0, 0) == 5
    early = {**arguments, "overlap_param_gather_with_optimizer_step": True}
    for others in ((arguments, 1, 0), (arguments, 0, 1), ({}, 0, 0), (early, 0, 0)):
        assert buffers.bucket_size_of(*others) is None


def test_names_and_order_of_megatrons_modules():
    """Names that Megatron gives, not only those that we read again; parameters in the order of its modules."""
    norm, head = "decoder.layers.3.pre_mlp_layernorm.weight", "output_layer.weight"
    for name, style, rest, expected in (
        (norm, names.TRANSFORMER_ENGINE, (), "decoder.layers.3.mlp.linear_fc1.layer_norm_weight"),
        (norm, names.TRANSFORMER_ENGINE, (True,), norm),  # experts have no norm of their own
        (norm, names.LEGACY, (), "language_model.encoder.layers.3.post_attention_norm.weight"),
        (norm, names.OLD_LEGACY, (), "language_model.encoder.layers.3.post_attention_layernorm.weight"),
        (head, names.LEGACY, (), "language_model.output_layer.weight"),
        (head, names.LEGACY, (False, True), "word_embeddings_for_head.weight"),
    ):
        assert names.name_in_style(name, style, *rest) == expected
        assert names.core_name(expected)[0] == name
    assert names.is_linear(head) and not names.is_linear(norm)
    layer, experts = "decoder.layers.0", "decoder.layers.0.mlp.experts.local_experts"
    attention = [f"{layer}.self_attention.linear_{name}.weight" for name in ("proj", "qkv")]
    experts = [f"{experts}.{expert}.linear_{name}.weight" for expert in (0, 1) for name in ("fc1", "fc2")]
    front = f"{layer}.input_layernorm.weight"
    for style, expected in (
        (names.CORE, [front, *attention, *experts]),
        (names.TRANSFORMER_ENGINE, [attention[0], front, attention[1], *experts[::2], *experts[1::2]]),
        (names.LEGACY, [front, *attention[::-1], *experts]),
    ):
        assert sorted(dict.fromkeys(sorted(expected)), key=lambda name: names.module_order(name, style)) == expected


def test_what_is_kept_beside_tensors(tmp_path):
    """Plain form and back, through JSON; of tensors only numbers."""
    tree = {
        ("a", 1): [Global("torch", "float32"), argparse.Namespace(x={1, 2}), (None, 2.5)],
        "enum": Opaque("megatron.core.enums", "ModelType", (1,), {"state": [1]}, "new"),
    }
    found = kept.restored(json.loads(json.dumps(kept.plain(tree))))
    enum, wanted = found.pop("enum"), tree.pop("enum")
    assert found == tree and vars(enum) == vars(wanted)
    write_torch_file(
        tmp_path / "scale.pt", [TensorToWrite("float32", (size,), np.full(size, 4.0, np.float32)) for size in (1, 2)]
    )
    assert kept.plain(read_torch_file(tmp_path / "scale.pt")) == [4.0, None]


# ---- trainings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model, parallel", [("tied", PP2), ("untied", TP2)])
def test_a_training_goes_on(tmp_path, world, model, parallel):
    """Ours -> Megatron -> ours: the losses after it are bit-equal; what is saved then keeps Megatron's arguments."""
    settings = {"model": model, "parallel": parallel}
    whole = world(2)(runs.train, tmp_path / "whole", **settings)[0]
    with CheckpointReader(str(tmp_path / "whole" / "iter_0000002")) as reader:
        config = runs.make_config(tmp_path, **settings)
        MegatronTarget(reader, config, distributed=True).write(str(tmp_path / "megatron"))
    training = {"resume_training": True, "load_checkpoint": str(tmp_path / "megatron")}
    part = world(2)(runs.train, tmp_path / "part", training=training, **settings)[0]
    assert part["losses"] == {step: whole["losses"][step] for step in (3, 4)}
    assert part["lr"] == {step: whole["lr"][step] for step in (3, 4)} and part["rows"] == whole["rows"][24:]
    with CheckpointReader(str(tmp_path / "part" / "iter_0000004")) as reader:
        assert reader.manifest.foreign["megatron"]["args"]
    weights = {**training, "resume_training": False}
    fresh = world(2)(runs.train, tmp_path / "fresh", training=weights, **settings)[0]
    assert fresh["iteration"] == 4 and any("loaded the weights of" in text for text in fresh["log"])


def test_other_programs_checkpoints_are_neither_deleted_nor_replaced(tmp_path, world):
    """A run that saves into the folder of a Megatron checkpoint keeps that; one that would come to its iteration is refused."""
    config = runs.make_config(tmp_path)
    reader = MadeUpReader(config, iteration=2)
    path = MegatronTarget(reader, config).write(str(tmp_path))
    training = {"load_checkpoint": str(tmp_path), "resume_training": True, "keep_checkpoint_max": 1}
    world(1)(runs.train, tmp_path, training=training)
    assert read_megatron_manifest(path).iteration == 2 and os.path.isfile(tmp_path / "iter_0000004" / "manifest.json")
    fresh = {"load_checkpoint": str(tmp_path / "megatron"), "output_dir": str(tmp_path / "megatron")}
    MegatronTarget(reader, config).write(str(tmp_path / "megatron"))
    with pytest.raises(CheckpointError, match=r"holds checkpoints of another program of iterations \[2\]"):
        world(1)(runs.train, tmp_path, training=fresh)
