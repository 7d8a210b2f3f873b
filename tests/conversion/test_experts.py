"""Experts of a layer in another form: SequentialMLP, GroupedMLP and Transformer Engine's, between all sides."""

import os
from dataclasses import replace

import numpy as np
import pytest

from mindspeed_ms.config import init_configs_from_dict
from mindspeed_ms.core.dist_checkpointing.manifest import Manifest
from mindspeed_ms.core.dist_checkpointing.megatron import names
from mindspeed_ms.core.dist_checkpointing.megatron.manifest import read_megatron_manifest
from mindspeed_ms.core.dist_checkpointing.megatron.writer import MegatronTarget
from mindspeed_ms.core.dist_checkpointing.regrouped_reader import in_form_of
from mindspeed_ms.core.dist_checkpointing.torch_file import read_torch_file
from mindspeed_ms.testing.megatron_checkpoints import MadeUpReader
from mindspeed_ms.tools.checkpoint.__main__ import main as checkpoint_command
from mindspeed_ms.tools.checkpoint.source import open_checkpoint
from mindspeed_ms.training.start_checks import check_resumed
from tests.checkpoint.test_megatron import EP2, EXPERTS, LLAMA, SP, TP2
from tests.conversion.test_hugging_face import convert
from tests.conversion.tiny_models import CONFIGS, write_folder

LAYER = "decoder.layers.1.mlp.experts"
FIRST = {  # a name in the files of each form
    names.SEQUENTIAL: f"{LAYER}.local_experts.0.linear_fc1.weight",
    names.GROUPED: f"{LAYER}.weight1",
    names.ENGINE_GROUPED: f"{LAYER}.linear_fc1.weight0",
}
CHUNKS = ("--target-pipeline-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1")
SIZES_OF_TWO = ("--target-expert-parallel-size", "2")
TP2EP2 = ("--target-tensor-parallel-size", "2", "--target-expert-parallel-size", "2")


def written(folder, form, dtype="float32", distributed=False, style=names.CORE, parallel=EP2):
    """Megatron's folder with experts of a form, and its reader."""
    experts = {**EXPERTS, "moe_grouped_gemm": form == names.GROUPED}
    config = init_configs_from_dict({"model_config": LLAMA, "moe_config": experts, "parallel_config": parallel})
    reader = MadeUpReader(config, dtype)
    style = names.TRANSFORMER_ENGINE if form == names.ENGINE_GROUPED else style
    MegatronTarget(reader, config, style, distributed, experts=form).write(str(folder))
    return str(folder), reader


def form_of(folder):
    return read_megatron_manifest(folder).foreign["megatron"]["experts"]


def names_of(folder):
    """Names of the weights in one of Megatron's files."""
    path = next(
        os.path.join(place, names_[0]) for place, _, names_ in sorted(os.walk(folder)) if "model_optim_rng.pt" in names_
    )
    path = os.path.join(os.path.dirname(path), "model_optim_rng.pt")
    return {name for part, tree in read_torch_file(path).items() if part.startswith("model") for name in tree}


@pytest.mark.parametrize(
    "form, dtype, distributed, style",
    [
        (names.SEQUENTIAL, "float32", False, names.CORE),
        (names.SEQUENTIAL, "bfloat16", True, names.TRANSFORMER_ENGINE),
        (names.GROUPED, "float32", True, names.CORE),
        (names.GROUPED, "bfloat16", False, names.TRANSFORMER_ENGINE),
        (names.ENGINE_GROUPED, "float32", True, None),
    ],
)
def test_from_any_form_to_any_and_back(tmp_path, form, dtype, distributed, style):
    """Weights, masters and moments keep their bits in other layouts; without the flag the form stays."""
    source, reader = written(tmp_path / "source", form, dtype, distributed, style)
    assert FIRST[form] in names_of(source) and form_of(source) == form
    here = source
    for number, (target, layout) in enumerate(zip((*names.EXPERT_FORMS, None, form), (TP2EP2, CHUNKS, TP2EP2, (), TP2EP2))):
        words = () if target is None else ("--experts", target.replace("_", "-"))
        before = form_of(here)
        here = convert(here, tmp_path / str(number), "--verify", *words, *layout)
        assert form_of(here) == (target or before), (number, target)
    arguments = read_megatron_manifest(here).arguments
    assert arguments["moe_grouped_gemm"] == (form != names.SEQUENTIAL)
    with open_checkpoint(here) as again:
        assert set(again.manifest.tensors) == set(reader.arrays)
        for key, values in reader.arrays.items():
            assert np.array_equal(again.read_whole(key), values), key


def test_a_tracker_that_names_a_missing_iteration(tmp_path, capsys):
    """The newest one is taken, and of the kind that it is."""
    source, _ = written(tmp_path / "source", names.SEQUENTIAL)
    with open(os.path.join(source, "latest_checkpointed_iteration.txt"), "w") as file:
        file.write("20")
    convert(source, tmp_path / "result", "--load-model-type", "mg", "--save-model-type", "native")
    assert "converted Megatron" in capsys.readouterr().out


def test_rows_and_columns(tmp_path):
    """weight1 holds the transposed weights of the experts, [gate, up] in columns, cut with them over tensor ranks."""
    source, reader = written(tmp_path / "source", names.SEQUENTIAL, parallel={**TP2, **SP, **EP2})
    grouped = convert(source, tmp_path / "grouped", "--moe-grouped-gemm", *TP2EP2)
    tree = read_torch_file(os.path.join(grouped, "iter_0000007", "mp_rank_01_001", "model_optim_rng.pt"))["model"]
    start = "language_model.encoder.layers.1.mlp.experts.local_experts"
    ffn, hidden = EXPERTS["moe_ffn_hidden_size"], LLAMA["hidden_size"]
    found = tree[f"{LAYER}.weight1"].read().reshape(2, hidden, ffn)
    for local in range(2):
        whole = reader.arrays[f"{start}.{2 + local}.mapping.weight"]
        expected = np.concatenate([whole[ffn // 2 : ffn], whole[ffn + ffn // 2 :]]).T
        np.testing.assert_array_equal(found[local], expected)
    second = tree[f"{LAYER}.weight2"].read().reshape(2, ffn // 2, hidden)
    np.testing.assert_array_equal(second[1], reader.arrays[f"{start}.3.projection.weight"][:, ffn // 2 :].T)


def test_with_ours(tmp_path):
    """Megatron -> ours, with states cut over data-parallel ranks -> Megatron: each time in another form."""
    source, reader = written(tmp_path / "source", names.ENGINE_GROUPED, distributed=True)
    native = convert(source, tmp_path / "native", "--save-model-type", "native", "--experts", "grouped", "--verify")
    ranks = ("--target-data-parallel-size", "4", "--target-expert-parallel-size", "2", "--verify")
    native = convert(native, tmp_path / "cut", "--save-model-type", "native", *ranks)
    with open_checkpoint(native) as opened:
        assert any(key.endswith("experts.weight2") for key in opened.manifest.tensors)
    back = convert(native, tmp_path / "back", "--experts", "te-grouped", "--verify")
    with open_checkpoint(back) as again:
        assert all(np.array_equal(again.read_whole(key), values) for key, values in reader.arrays.items())
    assert form_of(back) == names.ENGINE_GROUPED


@pytest.mark.parametrize("words", [
    ("--save-model-type", "native"), ("--ckpt-format", "torch_dist"), ("--save-model-type", "hf", "--model-type-hf", "mixtral")
], ids=["native", "torch_dist", "hf"])  # fmt: skip
def test_a_training_takes_experts_in_its_own_form(tmp_path, words):
    """No check finds another model, and the values are those of a conversion."""
    sections = {"model_config": {**LLAMA, "ffn_hidden_size": EXPERTS["moe_ffn_hidden_size"]}, "moe_config": EXPERTS}
    MegatronTarget(MadeUpReader(init_configs_from_dict(sections)), init_configs_from_dict(sections)).write(
        str(tmp_path / "source")
    )
    folder = convert(tmp_path / "source", tmp_path / "folder", *words)
    grouped = convert(folder, tmp_path / "grouped", "--save-model-type", "native", "--experts", "grouped")
    sections = {**sections, "moe_config": {**EXPERTS, "moe_grouped_gemm": True}, "training_config": {"load_checkpoint": folder}}
    config = init_configs_from_dict(sections)
    with open_checkpoint(folder) as opened, open_checkpoint(grouped) as expected:
        found = in_form_of(opened, config)
        check_resumed(folder, found.manifest, config, resumes=False, is_gpt=True)
        assert set(found.manifest.tensors) == set(expected.manifest.tensors)
        for key in expected.manifest.tensors:
            assert np.array_equal(found.read_whole(key), expected.read_whole(key)), key
        assert in_form_of(expected, config) is expected and in_form_of(expected, None) is expected


def test_ours_keep_what_they_say_of_their_training(tmp_path, monkeypatch):
    """Seed, number of samples and optimizer: what a continued training is compared with."""
    training = {"training_config": {"seed": 7, "training_iters": 6}, "optimizer_config": {"clip_grad": 0.5}}
    native = convert(written(tmp_path / "source", names.SEQUENTIAL)[0], tmp_path / "native", "--save-model-type", "native")
    read = Manifest.read

    def with_training(folder):
        manifest = read(folder)
        return replace(manifest, args={**manifest.args, **training})

    monkeypatch.setattr(Manifest, "read", with_training)
    result = convert(native, tmp_path / "grouped", "--save-model-type", "native", "--experts", "grouped")
    monkeypatch.undo()
    with open_checkpoint(result) as opened:
        args = opened.manifest.args
    assert (args["training_config"]["seed"], args["training_config"]["training_iters"]) == (7, 6)
    assert args["optimizer_config"]["clip_grad"] == 0.5
    assert args["moe_config"]["moe_grouped_gemm"]


@pytest.mark.parametrize(
    "words, text",
    [
        (("--experts", "grouped"), "has no experts"),
        (("--experts", "te-grouped", "--moe-grouped-gemm"), "--experts te-grouped and --moe-grouped-gemm"),
        (("--experts", "grouped", "--save-to-legacy"), "--save-to-legacy: legacy models have their experts one by one"),
        (("--experts", "te-grouped", "--save-model-type", "native"), "--experts te-grouped: only Megatron's files"),
        (("--experts", "packed"), "--experts: invalid choice: 'packed'"),
    ],
)
def test_forms_that_do_not_exist(tmp_path, capsys, words, text):
    source, _ = write_folder(tmp_path / "model", CONFIGS["llama"])
    convert(source, tmp_path / "result", *words, code=2)
    assert text in capsys.readouterr().err


def test_experts_with_biases_are_not_grouped(tmp_path, capsys):
    model = {**LLAMA, "mlp_has_bias": True, "add_bias_linear": True, "qkv_has_bias": True, "out_proj_has_bias": True}
    config = init_configs_from_dict({"model_config": model, "moe_config": EXPERTS})
    MegatronTarget(MadeUpReader(config), config).write(str(tmp_path / "source"))
    convert(tmp_path / "source", tmp_path / "result", "--experts", "grouped", code=2)
    assert "local_experts.0.mapping.bias, and experts in one tensor (Megatron's GroupedMLP" in capsys.readouterr().err


def test_reshard_takes_the_data_parallel_ranks_that_experts_need(tmp_path, capsys):
    """Without --data-parallel-size as few as are possible; an impossible number, or size, names the flag."""
    source, reader = written(tmp_path / "source", names.SEQUENTIAL)
    target = str(tmp_path / "target")
    for flag, value, text in (
        ("--data-parallel-size", "3", "--data-parallel-size 3 is impossible: expected a multiple of 2"),
        ("--data-parallel-size", "0", "--data-parallel-size 0 is impossible"),
        ("--tensor-model-parallel-size", "3", "--tensor-model-parallel-size = 3"),
    ):
        assert checkpoint_command(["reshard", source, target, flag, value]) == 2
        assert text in capsys.readouterr().err
    convert(source, tmp_path / "no", *SIZES_OF_TWO, "--target-data-parallel-size", "3", "--save-model-type", "native", code=2)
    assert "--target-data-parallel-size 3 is impossible" in capsys.readouterr().err
    assert checkpoint_command(["reshard", source, target]) == 0
    with open_checkpoint(target) as again:
        assert all(np.array_equal(again.read_whole(key), values) for key, values in reader.arrays.items())
