"""Checkpoints of megatron-core in other layouts and kinds than the recordings': read, written back, loaded by megatron-core."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core.dist_checkpointing.manifest import OPTIMIZER_PREFIX
from mindspeed_ms.core.dist_checkpointing.megatron import names, torch_dist
from mindspeed_ms.core.dist_checkpointing.megatron.manifest import read_megatron_manifest
from mindspeed_ms.core.dist_checkpointing.megatron.torch_dist_writer import TorchDistTarget
from mindspeed_ms.core.dist_checkpointing.megatron.writer import MegatronTarget
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.core.dist_checkpointing.torch_file import read_torch_file
from mindspeed_ms.layout.parameters import describe_whole_model
from mindspeed_ms.testing.megatron_checkpoints import flat, same
from tests.peer.megatron_folders import rule

pytestmark = pytest.mark.peer
SIZES = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48}
LLAMA = {**SIZES, "normalization": "RMSNorm", "add_bias_linear": False, "num_query_groups": 2, "qk_layernorm": True}
EXPERTS = {**LLAMA, "num_layers": 2, "num_moe_experts": 4}
ROPE = {"vocab_size": 64, "position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
LEARNED = {"vocab_size": 64, "position_embedding_type": "learned_absolute", "share_embeddings_and_output_weights": True}
PLAIN = ["torch", "torch_dist"]
DISTRIBUTED = [*PLAIN, "torch_dist-dp_zero_gather_scatter"]


def _case(layout, model, gpt, activation, **more):
    formats = DISTRIBUTED if more.get("distributed") else PLAIN
    return {"layout": layout, "model": model, "gpt": gpt, "activation": activation, "formats": formats, **more}


# and the layouts in which megatron-core loads what we write of it
CASES = {
    "swiglu, biases": (_case({"tp": 2, "pp": 2}, {**SIZES, "kv_channels": 12}, ROPE, "swiglu"), [{}, {"tp": 2}]),
    "tied, chunks, bfloat16": (
        _case(
            {"tp": 2, "pp": 2, "vpp": 2},
            {**SIZES, "ffn_hidden_size": 64},
            LEARNED,
            "gelu",
            bf16=True,
            distributed=True,
            fused=True,
        ),
        [{"tp": 2}],
    ),
    "experts": (
        _case(
            {"ep": 2, "dp": 2},
            {**EXPERTS, "moe_shared_expert_intermediate_size": 16},
            ROPE,
            "swiglu",
            distributed=True,
            fused=True,  # megatron-core cannot load the steps of torch's AdamW
        ),
        [{"ep": 2, "dp": 2}],
    ),
    "two stages, one with experts": (
        _case({"pp": 2, "ep": 2, "dp": 2}, {**EXPERTS, "moe_layer_freq": [0, 1]}, ROPE, "swiglu", distributed=True),
        [],
    ),
    "two further tokens": (
        _case({"tp": 2, "pp": 2}, {**SIZES, "mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.1}, ROPE, "swiglu"),
        [{}, {"tp": 2}],
    ),
    "a further token, experts": (
        _case(
            {"ep": 2, "dp": 2},
            {**EXPERTS, "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1},
            ROPE,
            "swiglu",
            distributed=True,
            fused=True,
        ),
        [{"ep": 2, "dp": 2}],
    ),
    "grouped experts": (_case({"ep": 2, "dp": 2}, EXPERTS, ROPE, "swiglu", grouped=True), [{"ep": 2, "dp": 2}]),
    "two ranks share the optimizer": (
        _case({"dp": 2}, {**LLAMA, "num_layers": 2}, ROPE, "swiglu", distributed=True, fused=True, bucket_size=5000),
        [{"tp": 2}],
    ),
}


def run_megatron(folder, cases):
    folder.mkdir(exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("megatron_folders.py")
    done = subprocess.run([sys.executable, script, folder / "cases.json", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder with the checkpoints of all cases."""
    folder = tmp_path_factory.mktemp("megatron")
    run_megatron(folder, {name: case for name, (case, _) in CASES.items()})
    return folder


def expected(shapes):
    """{(state, core name): values}."""
    result = {}
    for key, shape in shapes.items():
        state = re.fullmatch(r"optimizer\.state\.([a-z0-9_]+)\.(.+)", key)
        values = rule(key, shape)
        for core, indices, _ in torch_dist._parts_of(state[2] if state else key, shape):
            result[state[1] if state else "", core] = values[indices]
    return result


def checked(reader, wanted, case):
    """Compare every tensor of a checkpoint with the rule."""
    described = describe_whole_model(describe_model(reader.manifest.configuration))
    cores = {one.name: names.core_name_of(one.local_name, one.layer) for one in described if one.shared_with is None}
    left = {place for place in wanted if place[0] != "fp32_param" or case.get("bf16")}
    for key, stored in reader.manifest.tensors.items():
        state, _, weight = (
            key.removeprefix(OPTIMIZER_PREFIX).partition(".") if key.startswith(OPTIMIZER_PREFIX) else ("", "", key)
        )
        places, grouped = [(state, cores[weight])], re.fullmatch(r"(.+\.experts)\.weight([12])", cores[weight])
        if grouped:
            experts = range(stored.shape[0])
            places = [(state, f"{grouped[1]}.local_experts.{number}.linear_fc{grouped[2]}.weight") for number in experts]
        values = np.stack([wanted[place].T for place in places]) if grouped else wanted[places[0]]
        if stored.dtype == "bfloat16":
            bits = np.ascontiguousarray(values).view(np.uint32)
            values = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        assert np.array_equal(reader.read_whole(key), values), key
        left -= set(places)
    assert not left and reader.verify() == []


@pytest.mark.parametrize("name", CASES)
def test_read_and_written_back(saved, tmp_path, name):
    """Every format gives the same global tensors, bit for bit; files of ranks are Megatron's again, to the last entry."""
    case, original = CASES[name][0], saved / name / "torch" / "iter_0000010"
    wanted = expected(json.loads((saved / name / "shapes.json").read_text()))
    for form in case["formats"]:
        path = str(saved / name / form / "iter_0000010")
        manifest = read_megatron_manifest(path)
        assert not manifest.not_resumable and manifest.states["optimizer"]["step"] == 10
        with CheckpointReader(path, manifest) as reader:
            checked(reader, wanted, case)
            if case.get("grouped") and form != "torch":
                continue  # experts one by one are another model's files
            back = Path(MegatronTarget(reader, manifest.configuration).write(str(tmp_path / form)))
        files = {one.relative_to(original) for one in original.rglob("*.pt")}
        assert files == {one.relative_to(back) for one in back.rglob("*.pt")}
        for file in files:
            ours, theirs = (dict(flat(read_torch_file(folder / file))) for folder in (back, original))
            places = {one for one in {*ours, *theirs} if not one.startswith("/args/") and "/step" not in one}
            assert [one for one in sorted(places) if not same(ours.get(one), theirs.get(one))] == []


def test_megatron_loads_what_is_written(saved, tmp_path):
    """megatron-core finds all that it asks for and nothing else, and the same bits, in this layout and in others."""
    loads = {}
    for name, (case, layouts) in CASES.items():
        path = str(saved / name / "torch" / "iter_0000010")
        manifest = read_megatron_manifest(path)
        with CheckpointReader(path, manifest) as reader:
            written = TorchDistTarget(reader, manifest.configuration).write(str(tmp_path / name))
        for number, layout in enumerate(layouts):
            loads[f"{name} {number}"] = {**case, "layout": layout, "load": written}
    run_megatron(tmp_path / "loaded", loads)
    for name in loads:
        result = json.loads((tmp_path / "loaded" / name / "loaded.json").read_text())
        assert result["different"] == [] and result["count"] > 40, name


def test_torch_reads_what_is_written(saved, tmp_path):
    """torch.distributed.checkpoint alone, which knows no more than `.metadata`."""
    path = str(saved / "swiglu, biases" / "torch" / "iter_0000010")
    manifest = read_megatron_manifest(path)
    with CheckpointReader(path, manifest) as reader:
        written = TorchDistTarget(reader, manifest.configuration).write(str(tmp_path))
    script = (
        "import sys, torch, torch.distributed.checkpoint as dcp, numpy\n"
        "key = 'decoder.layers.mlp.linear_fc1.weight'\n"
        "state = {key: torch.zeros(4, 96, 32)}\n"
        "dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)\n"
        "numpy.save(sys.argv[2], state[key].numpy())\n"
    )
    subprocess.run([sys.executable, "-c", script, written, tmp_path / "weights.npy"], check=True, capture_output=True)
    key = "decoder.layers.mlp.linear_fc1.weight"
    assert np.array_equal(np.load(tmp_path / "weights.npy"), rule(key, (4, 96, 32)))
