"""Layers without weights: given places on the way from Hugging Face, and left out on the way back."""

import pytest

from mindspeed_ms.tools.checkpoint.source import open_checkpoint
from tests.conversion.test_hugging_face import convert, read_tensors
from tests.conversion.tiny_models import CONFIGS, read_json, write_folder

PLACES = ("--target-pipeline-parallel-size", "2", "--noop-layers", "1,3")


@pytest.mark.parametrize("name", ["qwen2_windows", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("target", ["native", "mg"])
def test_there_and_back(tmp_path, name, target):
    source, _ = write_folder(tmp_path / "model", CONFIGS[name])
    there = convert(source, tmp_path / "there", "--save-model-type", target, *PLACES, "--num-layers", "6", "--verify")
    with open_checkpoint(there) as reader:
        assert reader.manifest.args["model_config"]["num_layers"] == 6
        assert reader.manifest.args["parallel_config"]["noop_layers"] == [1, 3]
    back = convert(there, tmp_path / "back", "--save-model-type", "hf", "--num-layers", "4")
    assert read_tensors(back) == read_tensors(source) and read_json(back) == CONFIGS[name]
    without = convert(there, tmp_path / "without", "--save-model-type", "native" if target == "mg" else "mg")
    with open_checkpoint(without) as reader:
        assert reader.manifest.args["model_config"]["num_layers"] == 4
        assert reader.manifest.args["parallel_config"]["noop_layers"] is None


def test_experts_in_another_form(tmp_path):
    source, _ = write_folder(tmp_path / "model", CONFIGS["qwen3_moe"])
    there = convert(source, tmp_path / "there", *PLACES, "--experts", "grouped")
    assert read_tensors(convert(there, tmp_path / "back", "--save-model-type", "hf")) == read_tensors(source)


@pytest.mark.parametrize(
    "words, text",
    [
        (("--num-layers", "5"), "--num-layers 5 does not fit: the model has model_config.num_layers 4"),
        (("--noop-layers", "1,7"), "--noop-layers = [1, 7]: has [7] outside 0..5"),
        (("--noop-layers", "1,1"), "--noop-layers [1, 1] names a layer twice"),
    ],
)
def test_mistakes(tmp_path, capsys, words, text):
    source, _ = write_folder(tmp_path / "model", CONFIGS["llama_linear"])
    convert(source, tmp_path / "there", *PLACES, *words, code=2)
    assert text in capsys.readouterr().err
