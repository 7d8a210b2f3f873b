"""Flags of convert_ckpt.py that cannot take effect are refused or noted, never taken in silence."""

import os

import pytest

from mindspeed_ms.tools.converter.arguments import parse
from mindspeed_ms.tools.converter.errors import ConversionError
from tests.conversion.test_hugging_face import convert
from tests.conversion.tiny_models import CONFIGS, write_folder, write_json

FOLDERS = ["--load-dir", "model", "--save-dir", "result", "--save-model-type"]


@pytest.mark.parametrize(
    "target, words",
    [
        *(
            ("hf", words)
            for words in (
                *(("--target-tensor-parallel-size", "2"), ("--target-pipeline-parallel-size", "2")),
                *(("--target-expert-parallel-size", "2"), ("--target-data-parallel-size", "2")),
                *(("--num-layers-per-virtual-pipeline-stage", "2"), ("--num-layer-list", "4"), ("--noop-layers", "1")),
                *(("--make-vocab-size-divisible-by", "64"), ("--moe-grouped-gemm",), ("--experts", "grouped")),
                ("--save-to-legacy",),
            )
        ),
        *((target, ("--save-to-legacy",)) for target in ("native", "ckpt")),
        *((target, ("--max-file-size", "1")) for target in ("native", "safetensors", "mg")),
        ("mg", ("--use-mcore-models", "--save-to-legacy")),
    ],
)
def test_refused(target, words):
    with pytest.raises(ConversionError, match=rf"^{words[0]}\b.*(Leave it out|exclude each other)\.$"):
        parse([*FOLDERS, target, *words])


@pytest.mark.parametrize(
    "target, words",
    [
        *(("hf", (flag,)) for flag in ("--use-mcore-models", "--no-save-optim", "--load-from-legacy")),
        *((target, ("--use-mcore-models",)) for target in ("native", "ckpt")),
        ("mg", ("--target-data-parallel-size", "2")),
        ("mg", ("--verify", "--dry-run")),
    ],
)
def test_noted(target, words):
    (note,) = parse([*FOLDERS, target, *words]).notes
    assert note.startswith(f"{words[0]} has no effect: ")


def test_sizes_of_one_ask_for_nothing():
    """MindSpeed-LLM's line for the way to Hugging Face gives them."""
    words = ("--target-tensor-parallel-size", "1", "--target-pipeline-parallel-size", "1", "--experts", "sequential")
    assert parse([*FOLDERS, "hf", *words]).notes == ()


def test_of_a_gguf_file():
    for words in (("--params-dtype", "bf16"), ("--verify",), ("--num-layers", "4"), ("--max-file-size", "1")):
        with pytest.raises(ConversionError, match=f"^{words[0]}: a GGUF file is converted as it is"):
            parse(["--load-dir", "a.gguf", "--save-dir", "b", "--save-model-type", "hf", *words])


@pytest.mark.parametrize("form, word", [("pt2ckpt", "--cp-size"), ("ckpt2pt", "--dp-size"), ("ckpt2pt", "--cp-size")])
def test_of_upstreams_converters(form, word):
    (note,) = parse(["--megatron-path", "a", "--ms-path", "b", word, "2"], form).notes
    assert note.startswith(f"{word} has no effect")


def test_for_a_source(tmp_path, capsys):
    source, _ = write_folder(tmp_path / "model", CONFIGS["llama"])
    write_json(source, "vocab.json", {})
    write_json(tmp_path, "tokenizer.json", {})
    for words, text in (
        (("--iteration", "5"), "--iteration 5: "),
        (("--config", "x.yaml"), "--config x.yaml: "),
        (("--expert-tensor-parallel-size", "1", "--target-tensor-parallel-size", "2"), "--expert-tensor-parallel-size 1: "),
        (("--tokenizer-model", source), f"--tokenizer-model {source}: expected a file"),
        (("--save-model-type", "hf", "--true-vocab-size", "60"), "--true-vocab-size 60: the config.json of"),
    ):
        convert(source, tmp_path / "result", *words, code=2)
        assert text in capsys.readouterr().err
    words = ("--save-model-type", "native", "--target-data-parallel-size", "2", "--no-save-optim")
    tokenizer = ("--tokenizer-model", str(tmp_path / "tokenizer.json"), "--vocab-file", os.path.join(source, "vocab.json"))
    native = convert(source, tmp_path / "native", *words, *tokenizer)
    said = capsys.readouterr().out
    for flag in ("--target-data-parallel-size", "--no-save-optim"):
        assert f"{flag} has no effect" in said
    assert {"tokenizer.json", "vocab.json"} <= set(os.listdir(os.path.join(native, "hugging_face")))
    convert(native, tmp_path / "result", "--save-model-type", "hf", "--model-type-hf", "qwen3", code=2)
    assert "--model-type-hf qwen3: " in capsys.readouterr().err
