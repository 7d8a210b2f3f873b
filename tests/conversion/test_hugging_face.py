"""Hugging Face folders of every family: to our format and back, bit for bit; errors name file and tensor. No MindSpore."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.core.dist_checkpointing.torch_file import TensorToWrite, read_torch_file, write_torch_file
from mindspeed_ms.core.logging import setup_logging
from mindspeed_ms.models.families import Family, families, register_family
from mindspeed_ms.models.hugging_face import manifest as hugging_face_manifest
from mindspeed_ms.models.hugging_face.folder import read_folder
from mindspeed_ms.models.hugging_face.manifest import read_manifest
from mindspeed_ms.tools.checkpoint.__main__ import main as checkpoint_command
from mindspeed_ms.tools.converter.__main__ import main
from tests.conversion.tiny_models import CONFIGS, SIZES, read_json, tensors_of, write_folder, write_json

setup_logging()  # the first call takes the handlers of a test away
TP2PP2 = ("--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2")
ROTARY = ("model.rotary_emb", "model.layers.3.self_attn.rotary_emb")
GATE = "model.layers.1.mlp.gate_proj.weight"
QUERY, KEY = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qk")


def convert(source, target, *words, code=0):
    assert main(["--load-dir", str(source), "--save-dir", str(target), *words]) == code
    return str(target)


def read_tensors(folder):
    """{name: (dtype, shape, bytes)} of a Hugging Face folder."""
    result = {}
    for name, place in read_folder(folder).items():
        with open(os.path.join(folder, place.file), "rb") as file:
            file.seek(place.start)
            result[name] = place.dtype, place.shape, file.read(place.stop - place.start)
    return result


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back(tmp_path, name):
    source, tensors = write_folder(tmp_path / "model", CONFIGS[name])
    write_json(source, "tokenizer.json", {"model": {}})
    native = convert(source, tmp_path / "native", "--save-model-type", "native", "--verify", *TP2PP2)
    ranks = [name for name in os.listdir(os.path.join(native, "iter_0000000")) if name.startswith("state_")]
    assert len(ranks) == 4
    back = convert(native, tmp_path / "back", "--save-model-type", "hf", "--verify")
    assert read_tensors(back) == read_tensors(source)
    assert read_json(back) == CONFIGS[name] and read_json(back, "tokenizer.json") == {"model": {}}
    assert set(tensors) == set(read_tensors(back))
    if name == "gpt_oss":  # Megatron core 0.12 has no attention sinks
        return
    megatron = convert(native, tmp_path / "megatron")
    assert read_tensors(convert(megatron, tmp_path / "from it", "--save-model-type", "hf")) == read_tensors(source)


@pytest.mark.parametrize("name", [name for name in CONFIGS if "moe" in name or name == "mixtral"])
def test_experts_in_one_tensor(tmp_path, name):
    source, _ = write_folder(tmp_path / "model", CONFIGS[name])
    layout = ("--moe-grouped-gemm", "--target-tensor-parallel-size", "2", "--target-expert-parallel-size", "2")
    native = convert(source, tmp_path / "native", "--save-model-type", "native", "--verify", *layout)
    with CheckpointReader(os.path.join(native, "iter_0000000")) as reader:
        assert any(key.endswith("experts.weight1") for key in reader.manifest.tensors)
    assert read_tensors(convert(native, tmp_path / "back", "--save-model-type", "hf")) == read_tensors(source)


def test_rows_of_query_key_value_and_of_gate_and_up(tmp_path):
    """The values themselves, by the rules of Megatron; all else compares a way with its own way back."""
    source, tensors = write_folder(tmp_path / "model", CONFIGS["qwen2"])
    with CheckpointReader(source, read_manifest(source)) as reader:
        start = "language_model.encoder.layers.1"
        q, k, v = (tensors[f"model.layers.1.self_attn.{name}_proj.weight"].reshape(2, -1, 32) for name in "qkv")
        expected = np.concatenate([q, k, v], axis=1).reshape(-1, 32)
        np.testing.assert_array_equal(reader.read_whole(f"{start}.attention.qkv_proj.weight"), expected)
        gate_up = np.concatenate([tensors[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")])
        np.testing.assert_array_equal(reader.read_whole(f"{start}.mlp.mapping.weight"), gate_up)
    source, tensors = write_folder(tmp_path / "gpt2", CONFIGS["gpt2"])
    with CheckpointReader(source, read_manifest(source)) as reader:
        packed = tensors["transformer.h.1.attn.c_attn.weight"].T.reshape(3, 4, 8, 32)
        weight = reader.read_whole(f"{start}.attention.qkv_proj.weight")
        np.testing.assert_array_equal(weight, packed.transpose(1, 0, 2, 3).reshape(-1, 32))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_another_dtype(tmp_path, dtype):
    config = {**CONFIGS["qwen2"], "torch_dtype": "float32"}
    source, tensors = write_folder(tmp_path / "model", config)
    native = convert(source, tmp_path / "n", "--save-model-type", "native", "--params-dtype", dtype, "--verify")
    back = convert(native, tmp_path / "back", "--save-model-type", "hf")
    direct = read_json(convert(source, tmp_path / "hf", "--save-model-type", "hf", "--params-dtype", dtype))
    assert direct == read_json(back)
    name, bits = {"bf16": ("bfloat16", np.uint16), "fp16": ("float16", np.float16)}[dtype]
    assert read_json(back)["torch_dtype"] == read_manifest(back).args["model_config"]["params_dtype"] == name
    for key, (found, _, data) in read_tensors(back).items():
        values = np.frombuffer(data, bits)
        exact = (values.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else values.astype(np.float32)
        np.testing.assert_allclose(exact, tensors[key].reshape(-1), rtol=2**-8, atol=1e-7)
        assert found == name


def test_files_of_a_limited_size_and_an_index(tmp_path):
    source, _ = write_folder(tmp_path / "model", CONFIGS["llama"], files=3)
    again = convert(source, tmp_path / "again", "--save-model-type", "hf", "--max-file-size", "0.00004", "--verify")
    index = read_json(again, "model.safetensors.index.json")
    sizes = [os.path.getsize(os.path.join(again, name)) for name in sorted(set(index["weight_map"].values()))]
    assert len(sizes) > 3 and max(sizes) < 40_000 + 3_000
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in read_tensors(again).values())
    assert read_tensors(again) == read_tensors(source) and read_json(again) == CONFIGS["llama"]


def test_a_whole_file_is_taken_before_an_index(tmp_path):
    """As transformers takes them."""
    other, _ = write_folder(tmp_path / "other", CONFIGS["llama"], files=2)
    source, _ = write_folder(other, CONFIGS["llama"], tensors_of(CONFIGS["llama"], seed=1))
    assert {place.file for place in read_folder(source).values()} == {"model.safetensors"}


def test_bin_files(tmp_path):
    expected, tensors = write_folder(tmp_path / "safe", CONFIGS["gpt2"])
    source = tmp_path / "model"
    source.mkdir()
    shutil.copy(os.path.join(expected, "config.json"), source)
    tree = {
        name: TensorToWrite("float32", array.shape, lambda array=array: np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        for name, array in tensors.items()
    }
    path = str(source / "pytorch_model.bin")
    name = "transformer.h.1.mlp.c_fc.weight"
    tree[name] = replace(tree[name], shape=tree[name].shape[::-1], data=np.ascontiguousarray(tensors[name].T))
    write_torch_file(path, tree)
    tree = read_torch_file(path)
    view = tree[name]
    tree[name] = replace(view, shape=view.shape[::-1], stride=(1, view.shape[1]), name="")  # a transposed view
    write_torch_file(path, tree)
    assert read_tensors(convert(source, tmp_path / "again", "--save-model-type", "hf")) == read_tensors(expected)
    tree[name] = replace(view, shape=(4, 4), stride=(8, 1), name="")
    write_torch_file(path, tree)
    with pytest.raises(CheckpointError, match=rf"pytorch_model.bin: tensor {name} has the strides \[8, 1\]: save it contig"):
        read_folder(source)
    # safetensors beside it are taken
    shutil.copy(os.path.join(expected, "model.safetensors"), source)
    assert {place.file for place in read_folder(source).values()} == {"model.safetensors"}


def test_tied_heads_buffers_and_missing_prefixes(tmp_path, monkeypatch):
    monkeypatch.setattr(hugging_face_manifest, "_BLOCK_BYTES", 64)
    tensors = tensors_of(CONFIGS["gpt2"])
    tensors = {name.removeprefix("transformer."): array for name, array in tensors.items()}
    tensors["h.2.attn.bias"] = np.ones((1, 1, 64, 64), np.float32)
    tensors["h.2.attn.masked_bias"] = np.ones((), np.float32)
    tensors["lm_head.weight"] = tensors["wte.weight"].copy()
    source, _ = write_folder(tmp_path / "model", CONFIGS["gpt2"], tensors)
    manifest = read_manifest(source)
    assert set(manifest.left_out) == {"h.2.attn.bias", "h.2.attn.masked_bias", "lm_head.weight"}
    frequencies = {f"{name}.inv_freq": np.ones(4, np.float32) for name in ROTARY}
    source, _ = write_folder(tmp_path / "llama", CONFIGS["llama"], {**tensors_of(CONFIGS["llama"]), **frequencies})
    assert set(read_manifest(source).left_out) == set(frequencies)
    tensors["lm_head.weight"][3, 3] += 1
    for head in (tensors["lm_head.weight"], tensors["wte.weight"][:63]):
        source, _ = write_folder(tmp_path / "other", CONFIGS["gpt2"], {**tensors, "lm_head.weight": head})
        with pytest.raises(CheckpointError, match=r"model.safetensors: tensor lm_head.weight is not transformer.wte.weight"):
            read_manifest(source)


def _without_vocabulary(folder):
    """Take `vocab_size` out of Megatron's args, as some tokenizers leave it."""
    for rank in ("mp_rank_00", "mp_rank_01"):
        path = os.path.join(folder, "release", rank, "model_optim_rng.pt")
        tree = read_torch_file(path)
        tree["args"].vocab_size = None
        write_torch_file(f"{path}.new", tree)
        os.replace(f"{path}.new", path)
    return folder


def test_rows_of_the_vocabulary_are_those_of_config_json(tmp_path, capsys, caplog):
    """Not fewer than are no padding, nor more than there are; without a config.json those that the checkpoint says."""
    source, _ = write_folder(tmp_path / "model", {**CONFIGS["llama_linear"], "vocab_size": 61})
    padding = ("--target-tensor-parallel-size", "2")
    native = convert(source, tmp_path / "native", "--save-model-type", "native", *padding)
    megatron = convert(source, tmp_path / "megatron", *padding)
    for rows, text in ((59, "says vocab_size 59, but the vocabulary of "), (63, "says vocab_size 63, but the vocabulary of ")):
        base, _ = write_folder(tmp_path / str(rows), {**CONFIGS["llama_linear"], "vocab_size": rows})
        for folder in (native, megatron):
            convert(folder, tmp_path / "no", "--save-model-type", "hf", "--hf-cfg-dir", base, code=2)
            assert text in capsys.readouterr().err
    less = ("--save-model-type", "hf", "--hf-cfg-dir", str(tmp_path / "59"), "--true-vocab-size", "59")
    assert read_tensors(convert(native, tmp_path / "to 59", *less))["lm_head.weight"][1] == (59, 32)
    convert(native, tmp_path / "no", "--true-vocab-size", "63", code=2)
    assert "--true-vocab-size 63: the vocabulary of " in capsys.readouterr().err
    convert(native, tmp_path / "of 10", "--true-vocab-size", "10")
    assert capsys.readouterr().out.count("(31,648 parameters)") == 2
    convert(_without_vocabulary(megatron), tmp_path / "warned", *less[:-2])
    assert "rows 59 to 61 of the vocabulary are left out as padding" in caplog.text
    shutil.rmtree(os.path.join(native, "hugging_face"))
    back = convert(native, tmp_path / "back", "--save-model-type", "hf", "--model-type-hf", "llama")
    assert read_tensors(back) == read_tensors(source)
    assert read_json(back)["vocab_size"] == 61 and read_json(back)["torch_dtype"] == "float32"


@pytest.mark.parametrize(
    "name, text, factor",
    [
        ("llama_linear", None, 2),
        ("llama_yarn", "no rope_scaling of the type yarn", None),
        ("llama3", "not original_max_position_embeddings 16", None),
        ("qwen2_windows", "window_attn_skip_freq", None),
        ("llama", None, None),
    ],
)
def test_what_megatron_computes_otherwise(tmp_path, caplog, name, text, factor):
    megatron = convert(write_folder(tmp_path / "model", CONFIGS[name])[0], tmp_path / "megatron")
    arguments = read_torch_file(os.path.join(megatron, "release", "mp_rank_00", "model_optim_rng.pt"))["args"]
    assert arguments.rotary_seq_len_interpolation_factor == factor
    assert (text in caplog.text and "Megatron computes otherwise" in caplog.text) if text else not caplog.records
    back = convert(megatron, tmp_path / "native", "--save-model-type", "native")
    scaling = CONFIGS[name].get("rope_scaling") or {"factor": None}
    with CheckpointReader(os.path.join(back, "iter_0000000")) as reader:
        found = reader.manifest.args["model_config"]
    assert found["rotary_seq_len_interpolation_factor"] is None
    assert (found["rope_scaling"] or {"factor": None})["factor"] == scaling["factor"]


def test_a_new_config_json(tmp_path):
    """Without the folder that it came from, a model gets a config.json of its family."""
    source, _ = write_folder(tmp_path / "model", CONFIGS["qwen2_windows"])
    native = convert(source, tmp_path / "native", "--save-model-type", "native")
    shutil.rmtree(os.path.join(native, "hugging_face"))
    back = convert(native, tmp_path / "back", "--save-model-type", "hf", "--model-type-hf", "qwen2", "--verify")
    config = read_json(back)
    assert (
        config["architectures"] == ["Qwen2ForCausalLM"]
        and config["layer_types"] == ["full_attention"] * 2 + ["sliding_attention"] * 2
    )
    assert read_tensors(back) == read_tensors(source)
    assert read_manifest(back).args == read_manifest(source).args


def test_a_trained_model_changes_what_its_config_json_says(tmp_path):
    source, _ = write_folder(tmp_path / "model", CONFIGS["llama3"])
    native = convert(source, tmp_path / "native", "--save-model-type", "native")
    path = os.path.join(native, "iter_0000000", "manifest.json")
    from mindspeed_ms.core.dist_checkpointing.manifest import Manifest

    manifest = Manifest.read(os.path.dirname(path))
    manifest.args["model_config"]["rotary_base"] = 2e6
    with open(path, "wb") as file:
        file.write(manifest.to_bytes())
    back = read_json(convert(native, tmp_path / "back", "--save-model-type", "hf", "--hf-cfg-dir", source))
    assert back.pop("rope_theta") == 2e6 and back == CONFIGS["llama3"]


# ---- errors ----------------------------------------------------------------------------------------------------------


def without(tensors, *names):
    return {name: array for name, array in tensors.items() if name not in names}


def _broken(folder, case):
    """A folder with a fault; returns what its message must name."""
    config, tensors = dict(CONFIGS["llama_linear"]), tensors_of(CONFIGS["llama_linear"])
    files = 2 if "index" in case or "file" in case else 1
    if case == "missing tensor":
        tensors = without(tensors, GATE)
    elif case == "unknown tensor":
        tensors["model.layers.1.mlp.extra.weight"] = np.ones((2, 2), np.float32)
    elif case == "shape":
        config["intermediate_size"] = 40
    elif case == "number of heads":
        config["num_key_value_heads"] = 4
    elif case == "mixed dtypes in one":
        tensors[KEY] = tensors[KEY].astype(np.float16)
    elif case == "mixed dtypes":
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float16)
    elif case == "unknown family":
        config["model_type"] = "lama"
    elif case == "no family":
        del config["model_type"]
    elif case == "unknown rope":
        config["rope_scaling"] = {"type": "dynamic", "factor": 2.0}
    elif case == "partial rotary":
        config["partial_rotary_factor"] = 0.5
    elif case == "missing field":
        del config["hidden_size"]
    elif case == "impossible field":
        config["num_attention_heads"] = "four"
    elif case == "activation":
        config["hidden_act"] = "gelu"
    path, _ = write_folder(folder, config, tensors, files)
    index = os.path.join(path, "model.safetensors.index.json")
    single, second = os.path.join(path, "model.safetensors"), os.path.join(path, "model-00002-of-00002.safetensors")
    if case == "no config.json":
        os.remove(os.path.join(path, "config.json"))
    elif case == "damaged config.json":
        with open(os.path.join(path, "config.json"), "w") as file:
            file.write("[" * 100_000)
    elif case == "missing file":
        os.remove(second)
    elif case == "index outside":
        content = read_json(path, "model.safetensors.index.json")
        content["weight_map"][GATE] = "../../etc/passwd"
        write_json(path, os.path.basename(index), content)
    elif case == "index of another file":
        content = read_json(path, "model.safetensors.index.json")
        content["weight_map"][GATE] = next(name for name in set(content["weight_map"].values()) - {content["weight_map"][GATE]})
        write_json(path, os.path.basename(index), content)
    elif case == "index of a tensor that no file has":
        content = read_json(path, "model.safetensors.index.json")
        content["weight_map"]["model.more.weight"] = "model-00002-of-00002.safetensors"
        write_json(path, os.path.basename(index), content)
    elif case == "truncated file":
        os.truncate(second, os.path.getsize(second) - 1000)
    elif case.startswith("header"):
        _break_header(single, case)
    return path


def _break_header(path, case):
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header, rest = json.loads(file.read(length)), file.read()
    entry = header[GATE]
    if case == "header with an absurd shape":
        entry["shape"] = [1 << 40, 1 << 40]
    elif case == "header with negative bytes":
        entry["data_offsets"] = [-8, entry["data_offsets"][1]]
    elif case == "header with shared bytes":
        entry["data_offsets"] = [offset - 4 for offset in entry["data_offsets"]]
    text = json.dumps(header).encode()
    size = 1 << 60 if case == "header of an absurd length" else len(text)
    with open(path, "wb") as file:
        file.write(size.to_bytes(8, "little") + text + rest)


@pytest.mark.parametrize(
    "case, texts",
    {
        "missing tensor": ("Tensors that are missing", GATE),
        "unknown tensor": ("does not have: model.layers.1.mlp.extra.weight (model.safetensors)",),
        "shape": ("model.safetensors: tensor model.layers.0.mlp.gate_proj.weight has the shape [48, 32]", "says [40, 32]"),
        "number of heads": ("model.safetensors: tensor model.layers.0.self_attn.k_proj.weight has the shape [16, 32]",),
        "mixed dtypes in one": (f"model.safetensors: tensor {KEY} is float16, but {QUERY} is float32",),
        "mixed dtypes": ("model.safetensors: tensor model.norm.weight is float16", "--params-dtype"),
        "unknown family": ("config.json: model_type 'lama'", "Did you mean 'llama'?"),
        "no family": ("config.json has no model_type",),
        "unknown rope": ("config.json: rope_scaling has the type 'dynamic'",),
        "partial rotary": ("config.json: partial_rotary_factor is 0.5",),
        "missing field": ("config.json: has no hidden_size",),
        "impossible field": ("config.json: num_attention_heads is 'four'",),
        "activation": ("config.json: hidden_act is 'gelu': expected 'silu'",),
        "no config.json": ("has no config.json",),
        "damaged config.json": ("config.json cannot be read as JSON",),
        "missing file": ("model-00002-of-00002.safetensors is missing",),
        "index outside": (f"index.json places tensor {GATE} in '../../etc/passwd'",),
        "index of another file": (f"holds tensor {GATE}, which model.safetensors.index.json places in",),
        "index of a tensor that no file has": ("model-00002-of-00002.safetensors does not hold tensor model.more.weight",),
        "truncated file": ("model-00002-of-00002.safetensors", "it ends within tensor"),
        "header of an absurd length": ("model.safetensors", "of them are its header"),
        "header with an absurd shape": ("model.safetensors", f"tensor '{GATE}', F32 [1099511627776, 1099511627776], has"),
        "header with negative bytes": ("model.safetensors", f"tensor '{GATE}' has shape"),
        "header with shared bytes": ("model.safetensors", "begins at byte"),
    }.items(),
)
def test_faults_name_file_and_tensor(tmp_path, capsys, case, texts):
    source = _broken(tmp_path / "model", case)
    convert(source, tmp_path / "native", "--save-model-type", "native", code=2)
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("convert_ckpt.py: ") and all(text in error for text in texts), error
    assert os.listdir(tmp_path) == ["model"]


def test_mixed_dtypes_can_be_converted_to_one(tmp_path):
    source = _broken(tmp_path / "model", "mixed dtypes")
    convert(source, tmp_path / "native", "--save-model-type", "native", "--params-dtype", "fp32", "--verify")


def test_the_config_json_of_another_model_is_refused(tmp_path, capsys):
    source, _ = write_folder(tmp_path / "model", CONFIGS["llama_linear"])
    other, _ = write_folder(tmp_path / "other", {**CONFIGS["llama_linear"], "num_hidden_layers": 3})
    gpt2, _ = write_folder(tmp_path / "gpt2", {**CONFIGS["gpt2"], "n_inner": 48})
    for target in ("native", "mg", "ckpt"):  # it is kept beside them
        for folder, text in ((other, "num_layers is 3 there"), (gpt2, "config.json is of another model")):
            convert(source, tmp_path / "again", "--save-model-type", target, "--hf-cfg-dir", folder, code=2)
            assert text in capsys.readouterr().err
        convert(source, tmp_path / target, "--save-model-type", target, "--hf-cfg-dir", source)
    convert(source, tmp_path / "again", "--save-model-type", "hf", "--hf-cfg-dir", other, code=2)
    assert "num_layers is 3 there and 4 in the checkpoint" in capsys.readouterr().err


def test_another_family_cannot_say_it(tmp_path, capsys):
    source, _ = write_folder(tmp_path / "model", CONFIGS["qwen3"])
    native = convert(source, tmp_path / "native", "--save-model-type", "native")
    shutil.rmtree(os.path.join(native, "hugging_face"))
    convert(native, tmp_path / "back", "--save-model-type", "hf", "--model-type-hf", "llama", code=2)
    assert "q_layernorm" in capsys.readouterr().err


def test_the_checkpoint_tool_opens_the_folder(tmp_path, capsys):
    source, _ = write_folder(tmp_path / "model", CONFIGS["qwen2"])
    native = convert(source, tmp_path / "native", "--save-model-type", "native", *TP2PP2)
    assert checkpoint_command(["diff", source, native, "--weights-only"]) == 0
    assert checkpoint_command(["verify", source]) == 0
    assert checkpoint_command(["inspect", source]) == 0
    assert "language_model.encoder.layers.3.attention.qkv_proj.bias" in capsys.readouterr().out
    merged = str(tmp_path / "merged")
    assert checkpoint_command(["reshard", source, merged, "--tensor-model-parallel-size", "2"]) == 0
    assert checkpoint_command(["diff", merged, native]) == 0


def test_a_family_is_registered_once():
    family = families()["llama"]
    assert register_family(family) is family
    with pytest.raises(ValueError, match="'llama' has a family already"):
        register_family(Family(name="llama", architecture="Mine", weights=(), settings={}, rules=()))
    assert set(SIZES) & {"vocab_size"}
