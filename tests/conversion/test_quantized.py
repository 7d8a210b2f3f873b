"""Quantised weights of published models (MXFP4, FP8) are read as the numbers that they stand for. No MindSpore."""

import json
import os
import tracemalloc

import numpy as np
import pytest

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.core.dist_checkpointing.shard_file import SAFETENSORS_DTYPES
from mindspeed_ms.models.hugging_face.manifest import read_manifest
from mindspeed_ms.tools.converter.__main__ import main
from tests.conversion.test_hugging_face import read_tensors
from tests.conversion.tiny_models import CONFIGS, read_json, tensors_of, write_json

GPT_OSS = {**CONFIGS["gpt_oss"], "intermediate_size": 64, "torch_dtype": "bfloat16"}
DEEPSEEK = {**CONFIGS["deepseek_v3"], "torch_dtype": "bfloat16"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 8]}
_CODES = {**SAFETENSORS_DTYPES, "float8": "F8_E4M3"}


def write_raw(folder, config, tensors):
    """Folder of tensors {name: (dtype, array)}; "bfloat16" and "float8" arrays are bits."""
    os.makedirs(folder, exist_ok=True)
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        nbytes = array.tobytes()
        offsets = [len(data), len(data) + len(nbytes)]
        header[name] = {"dtype": _CODES[dtype], "shape": list(array.shape), "data_offsets": offsets}
        data += nbytes
    text = json.dumps(header).encode()
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data)
    write_json(folder, "config.json", config)
    return os.fspath(folder)


def bits(array):
    """bfloat16 bits of float32 values, rounded to nearest even."""
    as_float = np.asarray(array, np.float32)
    whole = as_float.view(np.uint32).astype(np.uint64)
    return ((whole + 0x7FFF + ((whole >> 16) & 1)) >> 16).astype(np.uint16)


def plain(config):
    return {name: ("bfloat16", bits(array)) for name, array in tensors_of(config).items()}


def mxfp4_model(seed=0):
    """(stored tensors, expected bfloat16 bits) of a gpt-oss model as it is published."""
    random, stored, expected = np.random.RandomState(seed), {}, {}
    lut = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    for name, (dtype, array) in plain(GPT_OSS).items():
        expected[name] = array
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = dtype, array
            continue
        experts, inputs, outputs = array.shape
        blocks = random.randint(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
        scales = random.randint(110, 130, blocks.shape[:-1]).astype(np.uint8)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = ("uint8", blocks), ("uint8", scales)
        values = np.zeros((experts, outputs, inputs))
        for column in range(inputs):  # element by element, as the format says
            byte = blocks[:, :, column // 32, column % 32 // 2]
            half = byte >> 4 if column % 2 else byte & 0xF
            values[:, :, column] = np.array(lut)[half] * 2.0 ** (scales[:, :, column // 32].astype(int) - 127)
        expected[name] = bits(values.swapaxes(1, 2))
    return stored, expected


def e4m3(byte):
    """Value of one FP8 number."""
    exponent, mantissa, sign = byte >> 3 & 15, byte & 7, -1.0 if byte & 128 else 1.0
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def fp8_model(seed=0):
    """(stored tensors, expected bfloat16 bits) of a DeepSeek V3 model as it is published."""
    random, stored, expected = np.random.RandomState(seed), {}, {}
    table = np.array([e4m3(byte) for byte in range(256)], np.float32)
    for name, (dtype, array) in plain(DEEPSEEK).items():
        expected[name], stored[name] = array, (dtype, array)
        if array.ndim == 1 or "_proj" not in name:
            continue
        rows, columns = array.shape
        numbers = random.choice([one for one in range(256) if one & 127 != 127], array.shape).astype(np.uint8)
        scales = random.uniform(1e-3, 0.1, (-(-rows // 16), -(-columns // 8))).astype(np.float32)
        stored[name], stored[f"{name}_scale_inv"] = ("float8", numbers), ("float32", scales)
        wide = np.repeat(np.repeat(scales, 16, 0), 8, 1)[:rows, :columns]
        expected[name] = bits(table[numbers] * wide)
    return stored, expected


MODELS = {
    "mxfp4": ({**GPT_OSS, "quantization_config": {"quant_method": "mxfp4"}}, mxfp4_model),
    "fp8": ({**DEEPSEEK, "quantization_config": FP8}, fp8_model),
}


@pytest.mark.parametrize("name", MODELS)
def test_read_exactly_and_written_in_full(tmp_path, name):
    config, model = MODELS[name]
    stored, expected = model()
    source = write_raw(tmp_path / "model", config, stored)
    words = ("--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2", "--verify")
    assert main(["--load-dir", source, "--save-dir", str(tmp_path / "native"), "--save-model-type", "native", *words]) == 0
    assert main(["--load-dir", str(tmp_path / "native"), "--save-dir", str(tmp_path / "back"), "--save-model-type", "hf"]) == 0
    found = read_tensors(tmp_path / "back")
    assert {key: value[0] for key, value in found.items()} == dict.fromkeys(expected, "bfloat16")
    for key, array in expected.items():
        assert found[key][1:] == (array.shape, array.tobytes()), key
    assert read_json(tmp_path / "back") == {key: value for key, value in config.items() if key != "quantization_config"}


def test_memory_is_that_of_one_expert(tmp_path):
    config = {**MODELS["mxfp4"][0], "num_local_experts": 64, "num_hidden_layers": 1}
    random, stored = np.random.RandomState(0), {}
    for name, array in tensors_of({**config, "quantization_config": None}).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = array.shape
            blocks = random.randint(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = ("uint8", blocks), ("uint8", blocks[..., 0])
        else:
            stored[name] = "bfloat16", bits(array)
    source = write_raw(tmp_path / "model", config, stored)
    with CheckpointReader(source, read_manifest(source)) as reader:
        key = "language_model.encoder.layers.0.mlp.experts.local_experts.63.mapping.weight"
        reader.read_whole(key)
        tracemalloc.start()
        reader.read_whole(key)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 24 * 128 * 32 * 2  # of all experts' 64


@pytest.mark.parametrize(
    "name, change, text",
    [
        ("mxfp4", lambda stored: stored.pop("model.layers.0.mlp.experts.down_proj_scales"), "down_proj_scales is not"),
        ("mxfp4", lambda stored: _cut(stored, "model.layers.0.mlp.experts.down_proj_blocks"), "has the shape"),
        ("fp8", lambda stored: stored.pop("model.layers.1.self_attn.o_proj.weight_scale_inv"), "no model.layers.1.self_attn"),
        ("fp8", lambda stored: _cut(stored, "model.layers.1.self_attn.o_proj.weight_scale_inv"), "has the shape"),
        ("fp8", lambda stored: stored.pop("model.layers.1.self_attn.o_proj.weight"), "does not have: model.layers.1.self_attn"),
    ],
)
def test_faults_name_the_tensor(tmp_path, name, change, text):
    config, model = MODELS[name]
    stored, _ = model()
    change(stored)
    with pytest.raises(CheckpointError) as error:
        read_manifest(write_raw(tmp_path / "model", config, stored))
    assert text in str(error.value) and "\n" not in str(error.value)


def _cut(stored, name):
    dtype, array = stored[name]
    stored[name] = dtype, array[:-1]
