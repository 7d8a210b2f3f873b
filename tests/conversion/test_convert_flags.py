"""Flags of convert_ckpt.py: those of other converters are used, ignored with a note, or refused with the reason."""

import os
import re

import pytest

from mindspeed_ms.tools.converter import flags
from mindspeed_ms.tools.converter.__main__ import main
from mindspeed_ms.tools.converter.arguments import parse
from mindspeed_ms.tools.converter.errors import ConversionError
from mindspeed_ms.tools.converter.sides import accepts_family

FOLDERS = ["--load-dir", "model", "--save-dir", "result"]


def test_unknown_flags_are_refused_with_a_suggestion():
    with pytest.raises(
        ConversionError, match=r"--target-tensor-model-parallel-size.*Did you mean '--target-tensor-parallel-size'"
    ):
        parse([*FOLDERS, "--target-tensor-model-parallel-size", "2"])
    with pytest.raises(ConversionError, match=r"--model-type-hf quen3: .*Did you mean 'qwen3'"):
        parse([*FOLDERS, "--model-type-hf", "quen3"])


def test_flags_of_other_converters():
    """Each is used, ignored with a note, or refused with the reason."""
    for name, reason in flags.IGNORED.items():
        flag = "--process_timeout" if name == "process_timeout" else f"--{name.replace('_', '-')}"
        words = [flag] if name in flags.IGNORED_WITHOUT_VALUE else [flag, "1"]
        assert f"{flag} has no effect: {reason}" in parse([*FOLDERS, *words]).notes
    for name, reason in flags.REFUSED.items():
        flag = f"--{name.replace('_', '-')}"
        with pytest.raises(ConversionError, match=re.escape(f"{flag}: {reason}")):
            parse([*FOLDERS, flag] if name in flags.REFUSED_WITHOUT_VALUE else [*FOLDERS, flag, "1"])
    assert not parse([*FOLDERS, "--mtp-num-layers", "0"]).notes
    with pytest.raises(ConversionError, match="BERT"):
        parse([*FOLDERS, "--model-type", "BERT"])


def test_workers(capsys):
    assert parse([*FOLDERS, "--workers", "3"]).workers == 3
    assert parse(FOLDERS).workers == min(4, len(os.sched_getaffinity(0)))
    assert main([*FOLDERS, "--workers", "0"]) == 2
    assert "--workers: 0: expected an integer above 0" in capsys.readouterr().err


def test_flags_become_a_conversion(tmp_path):
    (tmp_path / "vocab.json").touch()
    for words, wanted in (
        (["--no-save-optim", "--iteration", "4"], {"with_optimizer": False, "iteration": 4}),
        (["--target-data-parallel-size", "4", "--true-vocab-size", "9"], {"data_parallel_size": 4, "true_vocab_size": 9}),
        (["--vocab-file", str(tmp_path / "vocab.json")], {"tokenizer": (str(tmp_path / "vocab.json"),)}),
        (["--noop-layers", "0,3"], {"most_bytes": 5 * 10**9}),
        (["--save-model-type", "hf", "--max-file-size", "0.5"], {"most_bytes": 5 * 10**8}),
        (["--save-to-legacy"], {"legacy_names": True}),
        (["--moe-grouped-gemm"], {"experts": "grouped"}),
    ):
        asked = parse([*FOLDERS, *words])
        assert {name: getattr(asked, name) for name in wanted} == wanted
        assert asked.parallel.get("noop_layers") == ([0, 3] if "--noop-layers" in words else None)
    words = ["--megatron-path", "a", "--ms-path", "b", "--noop", "1", "--convert-param-only"]
    asked = parse(words, "ckpt2pt")
    assert (asked.parallel["noop_layers"], asked.with_optimizer) == ([1], False)
    assert accepts_family("qwen2-moe", "qwen2_moe") and not accepts_family("qwen2", "qwen2_moe")


def test_upstreams_flags():
    asked = parse(
        ["--megatron-path", "a", "--ms-path", "b", "--tp-size", "2", "--stage-list", "3", "5", "--pp-size", "2"], "pt2ckpt"
    )
    assert (asked.load_dir, asked.save_dir, asked.target) == ("a", "b", "ckpt")
    assert asked.parallel == {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "num_layer_list": [3, 5]}
    asked = parse(
        ["--megatron-path", "a", "--ms-path", "b", "--num-layers", "8", "--vpp-size", "2", "--pp-size", "2"], "ckpt2pt"
    )
    assert (asked.load_dir, asked.save_dir, asked.target) == ("b", "a", "mg")
    assert asked.parallel["num_layers_per_virtual_pipeline_stage"] == 2
