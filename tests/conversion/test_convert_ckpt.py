"""The command convert_ckpt.py: flags of other converters, plan, vocabulary, upstream's files, interruption."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.models.hugging_face.manifest import read_manifest
from mindspeed_ms.tools.checkpoint.diff import differences
from mindspeed_ms.tools.checkpoint.source import open_checkpoint
from mindspeed_ms.tools.converter import flags
from mindspeed_ms.tools.converter.__main__ import main
from mindspeed_ms.tools.converter.arguments import parse
from mindspeed_ms.tools.converter.errors import ConversionError
from tests.conversion.test_hugging_face import convert, read_tensors
from tests.conversion.tiny_models import CONFIGS, read_json, write_folder, write_json

ROOT = Path(__file__).resolve().parents[2]
WORDS = "language_model.embedding.word_embeddings.weight"
FOLDERS = ["--load-dir", "model", "--save-dir", "result"]


@pytest.fixture
def qwen(tmp_path):
    folder, _ = write_folder(tmp_path / "Qwen2.5", {**CONFIGS["qwen2"], "torch_dtype": "bfloat16"}, dtype="bfloat16")
    write_json(folder, "tokenizer.json", {})
    return folder


def test_mg2hf_is_beside_the_model(qwen, tmp_path):
    """MindSpeed-LLM's way back: --save-dir is the folder that the model came from."""
    native = convert(qwen, tmp_path / "native", "--save-model-type", "native")
    convert(native, qwen, "--save-model-type", "hf", "--model-type-hf", "llama2", "--verify")
    back = os.path.join(qwen, "mg2hf")
    assert read_tensors(back) == read_tensors(qwen) and read_json(back) == read_json(qwen)


def test_what_the_user_says_is_compared(qwen, tmp_path, capsys):
    for words, text in (
        (("--add-dense-bias",), "--add-dense-bias does not fit: the model has model_config.out_proj_has_bias False"),
        (("--num-layers", "5"), "--num-layers 5 does not fit: the model has model_config.num_layers 4"),
        (("--model-type-hf", "mixtral"), "config.json says qwen2"),
        (("--load-model-type", "mg"), "is a Hugging Face checkpoint, not a Megatron one"),
        (("--tokenizer-model", "nowhere.json"), "--tokenizer-model nowhere.json does not exist"),
        (("--target-tensor-parallel-size", "3"), "--target-tensor-parallel-size"),
        (("--target-pipeline-parallel-size", "5"), "--target-pipeline-parallel-size"),
        (("--target-pipeline-parallel-size", "2", "--num-layer-list", "1,2"), "--num-layer-list"),
        (("--target-pipeline-parallel-size", "2", "--num-layer-list", "4"), "--num-layer-list has 1 numbers"),
        (("--save-model-type", "hf", "--hf-cfg-dir", str(tmp_path)), "has no config.json"),
    ):
        kind = () if "--save-model-type" in words else ("--save-model-type", "native")
        convert(qwen, tmp_path / "native", *kind, *words, code=1)
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("convert_ckpt.py: ") and text in error, error
    assert os.listdir(tmp_path) == ["Qwen2.5"]


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


def test_megatrons_format_torch_dist(qwen, tmp_path, capsys):
    """Written, compared, and converted back; refused where Megatron has none."""
    mg = convert(
        qwen,
        tmp_path / "mg",
        "--ckpt-format",
        "torch_dist",
        "--target-tensor-parallel-size",
        "2",
        "--verify",
        "--save-model-type",
        "mg",
    )
    assert sorted(os.listdir(tmp_path / "mg" / "release"))[0] == ".metadata"
    back = convert(mg, tmp_path / "hf", "--save-model-type", "hf")
    assert read_tensors(back) == read_tensors(qwen)
    for words, text in (
        (("--save-model-type", "hf"), "--ckpt-format torch_dist: it is Megatron's"),
        (("--save-to-legacy",), "--ckpt-format torch_dist: Megatron has only the format torch for its legacy models"),
        (("--noop-layers", "1"), "Leave --noop-layers out"),
    ):
        convert(qwen, tmp_path / "no", "--save-ckpt-format", "torch_dist", *words, code=1)
        assert text in capsys.readouterr().err.splitlines()[-1]


def test_the_plan_writes_nothing(qwen, tmp_path, capsys):
    convert(qwen, tmp_path / "x" / "native", "--save-model-type", "native", "--dry-run", "--target-tensor-parallel-size", "2")
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if "layers.2.attention.qkv_proj.weight" in line]
    for text in ("layers.2.self_attn.k_proj.weight in model.safetensors", "bfloat16", "[64, 32]", "state of rank 0, 1"):
        assert text in line
    assert "35,360 parameters" in lines[-1] and os.listdir(tmp_path) == ["Qwen2.5"]


def test_closing_line_counts_both_sides(qwen, tmp_path, capsys):
    convert(qwen, tmp_path / "native", "--save-model-type", "native", "--verify")
    verified, closing = capsys.readouterr().out.splitlines()
    assert verified.startswith("verified: 31 tensors are equal")
    assert closing.count("(35,360 parameters)") == 2 and re.search(r"\d GB/s$", closing)


def test_vocabulary_padding_copies_the_last_row(tmp_path, caplog):
    """As MindSpeed-LLM does: up to a multiple of the flag times the tensor parallel size; without need it stays."""
    folder, tensors = write_folder(tmp_path / "model", {**CONFIGS["qwen2"], "vocab_size": 61})
    table = tensors["model.embed_tokens.weight"]
    for words, rows in (
        ((), 61),
        (("--target-tensor-parallel-size", "2"), 62),
        (("--target-tensor-parallel-size", "2", "--make-vocab-size-divisible-by", "32"), 64),
    ):
        native = convert(folder, tmp_path / str(rows), "--save-model-type", "native", "--verify", *words)
        with open_checkpoint(native) as reader:
            padded = reader.read_whole(WORDS)
            assert reader.manifest.vocab_size == 61
        assert padded.shape == (rows, 32)
        np.testing.assert_array_equal(padded[:61], table)
        np.testing.assert_array_equal(padded[61:], np.repeat(table[60:], rows - 61, axis=0))
        back = convert(native, tmp_path / f"back{rows}", "--save-model-type", "hf")
        assert read_tensors(back) == read_tensors(folder)


@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
def test_upstreams_files(qwen, tmp_path, kind):
    words = ("--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2")
    target = convert(qwen, tmp_path / "ms", "--save-model-type", kind, *words)
    assert sorted(os.listdir(target)) == ["hugging_face", *(f"rank_{rank}" for rank in range(4))]
    native = convert(qwen, tmp_path / "native", "--save-model-type", "native")
    config = tmp_path / "model.yaml"
    with open_checkpoint(native) as reader:
        write_json(tmp_path, "model.yaml", {"model_config": reader.manifest.args["model_config"]})
    back = convert(target, tmp_path / "back", "--save-model-type", "hf", "--config", str(config), "--verify")
    assert read_tensors(back) == read_tensors(qwen)


def test_nothing_is_overwritten(qwen, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    convert(qwen, tmp_path / "mine", "--save-model-type", "native", code=1)
    assert "exists already" in capsys.readouterr().err and os.listdir(tmp_path / "mine") == ["file"]
    (tmp_path / "empty").mkdir()
    convert(qwen, tmp_path / "empty", "--save-model-type", "native")


def test_a_full_disk_leaves_nothing(qwen, tmp_path, capsys, monkeypatch):
    from mindspeed_ms.core.dist_checkpointing import shard_file

    def full(file, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shard_file, "_write_all", full)
    for kind in ("native", "hf", "ckpt"):
        convert(qwen, tmp_path / "result", "--save-model-type", kind, code=1)
        assert "No space left on device" in capsys.readouterr().err
        assert os.listdir(tmp_path) == ["Qwen2.5"]


def test_a_damaged_result_is_deleted(qwen, tmp_path, capsys, monkeypatch):
    from mindspeed_ms.models.hugging_face import writer

    monkeypatch.setattr(writer, "write_json", lambda path, content: None)
    convert(qwen, tmp_path / "result", "--save-model-type", "hf", "--verify", code=1)
    assert "config.json" in capsys.readouterr().err and os.listdir(tmp_path) == ["Qwen2.5"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_nothing(qwen, tmp_path, number):
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with SIGINT ignored\n"
        "from mindspeed_ms.core.dist_checkpointing import shard_file\n"
        "from mindspeed_ms.tools.converter.__main__ import main\n"
        "def slowly(file, data):\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(60)\n"
        "shard_file._write_entry = lambda file, entry, *_: slowly(file, entry)\n"
        f"sys.exit(main(['--load-dir', {qwen!r}, '--save-dir', {str(tmp_path / 'result')!r}, '--save-model-type', 'hf']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "writing\n"
    process.send_signal(number)
    assert process.wait(20) == 130
    assert process.stderr.read().splitlines()[-1] == "convert_ckpt.py: interrupted. Nothing was written."
    assert os.listdir(tmp_path) == ["Qwen2.5"]


def test_it_needs_neither_mindspore_nor_torch(qwen, tmp_path):
    code = (
        "import sys\n"
        "from mindspeed_ms.tools.converter.__main__ import main\n"
        f"code = main(['--load-dir', {qwen!r}, '--save-dir', {str(tmp_path / 'result')!r}, '--save-model-type', 'native'])\n"
        "sys.exit(code or len({'mindspore', 'torch', 'transformers'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def seed_lines(folder, tensor_parallel):
    """The command of the guide of MindSpeed-LLM 2.2, as it is printed there: Qwen2.5 by the name llama2."""
    return f"""
model_path_hf={folder}
TP={tensor_parallel}
PP=1

# 设置需要的权重转换参数
python convert_ckpt.py \\
       --use-mcore-models \\
       --model-type GPT \\
       --load-model-type hf \\
       --save-model-type mg \\
       --target-tensor-parallel-size $TP \\
       --target-pipeline-parallel-size $PP \\
       --add-qkv-bias \\
       --load-dir $model_path_hf \\
       --save-dir $model_path_hf/mcore_tp${{TP}}_pp${{PP}}/ \\
       --tokenizer-model $model_path_hf/tokenizer.json \\
       --model-type-hf llama2 \\
       --params-dtype bf16 # --num-layer-list 11,13,19,21 参数根据需要添加
"""


def test_the_guides_command_runs_as_printed(qwen):
    done = subprocess.run(["bash", "-c", seed_lines(qwen, 2)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = os.path.join(qwen, "mcore_tp2_pp1")
    assert os.path.isfile(os.path.join(result, "release", "mp_rank_01", "model_optim_rng.pt"))
    with CheckpointReader(qwen, read_manifest(qwen)) as first, open_checkpoint(result) as second:
        assert not list(differences(first, second, weights_only=True))
    # and the way back
    convert(result, qwen, "--load-model-type", "mg", "--save-model-type", "hf", "--model-type-hf", "llama2")
    assert read_tensors(os.path.join(qwen, "mg2hf")) == read_tensors(qwen)
    assert read_json(os.path.join(qwen, "mg2hf")) == read_json(qwen)


@pytest.mark.skipif("MINDSPEED_MS_GOLDEN" not in os.environ, reason="needs the recorded checkpoints")
def test_upstreams_files_keep_the_optimizer(tmp_path):
    """Megatron -> upstream's -> Megatron with upstream's two converters: weights and moments bit for bit."""
    source = os.path.join(os.environ["MINDSPEED_MS_GOLDEN"], "ckpt", "llama_tp2pp2vpp2")
    sizes = ["--tp-size", "2", "--pp-size", "2", "--num-layers", "4"]
    paths = ["--megatron-path", source, "--ms-path", str(tmp_path / "ms"), "--file-prefix", "mine"]
    assert main([*paths, *sizes], "pt2ckpt") == 0
    assert os.listdir(tmp_path / "ms" / "rank_3") == ["mine.ckpt"]
    with open_checkpoint(source) as first:
        write_json(tmp_path, "model.yaml", {"model_config": first.manifest.args["model_config"]})
        back = tmp_path / "mg"
        paths = ["--ms-path", str(tmp_path / "ms"), "--megatron-path", str(back), "--config", str(tmp_path / "model.yaml")]
        assert main([*paths, *sizes, "--verify"], "ckpt2pt") == 0
        with open_checkpoint(back) as second:
            assert second.manifest.iteration == first.manifest.iteration == 10
            assert len(second.manifest.tensors) == 81
            found = [one for one in differences(first, second) if one.key in first.manifest.tensors]
            assert not found, found[0]
