"""DeepSeek's layers of multi-token prediction in Hugging Face folders. No MindSpore."""

import logging

import pytest

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.models.hugging_face.manifest import read_manifest
from mindspeed_ms.tools.converter.__main__ import main
from tests.conversion.test_hugging_face import read_tensors
from tests.conversion.tiny_models import CONFIGS, read_json, tensors_of, write_folder

CONFIG = CONFIGS["deepseek_v3_further"]
LAST = "model.layers.5."
WORDS, HEAD = f"{LAST}embed_tokens.weight", f"{LAST}shared_head.head.weight"


def convert(source, target, kind, *words):
    assert main(["--load-dir", str(source), "--save-dir", str(target), "--save-model-type", kind, *words]) == 0


def test_every_tensor_comes_back(tmp_path, caplog):
    """Through our format, cut, and through Megatron's: the same tensors, copies of embedding and head included."""
    source, tensors = write_folder(tmp_path / "model", CONFIG)
    names = {name.removeprefix(LAST) for name in tensors if name.startswith(LAST)}
    assert {"embed_tokens.weight", "enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} <= names
    assert {"shared_head.head.weight", "mlp.experts.3.down_proj.weight", "mlp.gate.e_score_correction_bias"} <= names
    sizes = ("--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2", "--mtp-num-layers", "2")
    convert(source, tmp_path / "native", "native", *sizes, "--verify")
    convert(tmp_path / "native", tmp_path / "megatron", "mg", *sizes)
    convert(tmp_path / "megatron", tmp_path / "back", "hf", "--model-type-hf", "deepseek_v3", "--hf-cfg-dir", source)
    assert read_tensors(tmp_path / "back") == read_tensors(source)
    assert read_json(tmp_path / "back") == read_json(source)
    assert not [one for one in caplog.records if "multi-token" in one.message]


def test_copies_may_be_missing_and_others_are_told(tmp_path, caplog):
    tensors = tensors_of(CONFIG)
    without = {name: array for name, array in tensors.items() if name not in (WORDS, HEAD)}
    assert WORDS not in read_manifest(write_folder(tmp_path / "without", CONFIG, without)[0]).left_out
    source = write_folder(tmp_path / "other", CONFIG, {**tensors, WORDS: tensors[WORDS] + 1})[0]
    with caplog.at_level(logging.WARNING):
        manifest = read_manifest(source)
    assert "copy" in manifest.left_out[HEAD] and "use language_model.embedding" in manifest.left_out[WORDS]
    (told,) = [one.getMessage() for one in caplog.records if "left out" in one.getMessage()]
    assert WORDS in told and HEAD not in told


def test_a_folder_may_lack_the_layers(tmp_path):
    """As transformers saves one: config.json names them all the same."""
    own = {name: array for name, array in tensors_of(CONFIG).items() if not name.startswith(("model.layers.4.", LAST))}
    source = write_folder(tmp_path / "model", CONFIG, own)[0]
    assert read_manifest(source).args["model_config"]["mtp_num_layers"] is None
    convert(source, tmp_path / "back", "hf", "--mtp-num-layers", "0")
    assert read_tensors(tmp_path / "back") == read_tensors(source)
    assert read_json(tmp_path / "back")["num_nextn_predict_layers"] == 0


def test_a_part_of_a_layer_is_no_layer(tmp_path):
    tensors = {name: array for name, array in tensors_of(CONFIG).items() if name != f"{LAST}enorm.weight"}
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.5\.enorm\.weight"):
        read_manifest(write_folder(tmp_path / "model", CONFIG, tensors)[0])
    none = {**CONFIG, "num_nextn_predict_layers": 0}
    with pytest.raises(CheckpointError, match=r"does not have: model\.layers\.[45]\."):
        read_manifest(write_folder(tmp_path / "none", none, tensors)[0])


def test_the_number_is_compared(tmp_path, capsys):
    source = write_folder(tmp_path / "model", CONFIG)[0]
    for number in ("0", "1"):
        words = ["--load-dir", source, "--save-dir", str(tmp_path / "out"), "--save-model-type", "native"]
        assert main([*words, "--mtp-num-layers", number]) != 0
        assert f"--mtp-num-layers {number} does not fit" in capsys.readouterr().err
