"""The command convert_ckpt.py: plan, vocabulary, upstream's files, interruption."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import optimizer_key
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.models.hugging_face.manifest import read_manifest
from mindspeed_ms.tools.checkpoint.diff import differences
from mindspeed_ms.tools.checkpoint.source import open_checkpoint
from mindspeed_ms.tools.converter import convert as conversion
from mindspeed_ms.tools.converter.__main__ import main
from mindspeed_ms.tools.converter.converted import cast
from tests.checkpoint.test_megatron import made_up
from tests.conversion.test_hugging_face import convert, read_tensors
from tests.conversion.tiny_models import CONFIGS, read_json, write_folder, write_json

ROOT = Path(__file__).resolve().parents[2]
WORDS = "language_model.embedding.word_embeddings.weight"
TWO_STAGES = ("--target-pipeline-parallel-size", "2")
FOLDERS = ["--load-dir", "model", "--save-dir", "result"]


@pytest.fixture
def qwen(tmp_path):
    folder, _ = write_folder(tmp_path / "Qwen2.5", {**CONFIGS["qwen2"], "torch_dtype": "bfloat16"}, dtype="bfloat16")
    write_json(folder, "tokenizer.json", {})
    return folder


def test_mg2hf_is_beside_the_model(qwen, tmp_path):
    """MindSpeed-LLM's way back: --save-dir is the folder that the model came from."""
    native = convert(qwen, tmp_path / "native", "--save-model-type", "native")
    # mg, with which MindSpeed-LLM names what a training saves, is a native checkpoint too
    convert(native, qwen, "--load-model-type", "mg", "--save-model-type", "hf", "--model-type-hf", "llama2", "--verify")
    back = os.path.join(qwen, "mg2hf")
    assert read_tensors(back) == read_tensors(qwen) and read_json(back) == read_json(qwen)


def test_what_the_user_says_is_compared(qwen, tmp_path, capsys):
    for words, text in (
        (("--add-dense-bias",), "--add-dense-bias does not fit: the model has model_config.out_proj_has_bias False"),
        (("--iteration", "3"), "--iteration 3: "),
        (("--num-layers", "0"), "0: expected an integer above 0"),
        (("--max-file-size", "0"), "0: expected a number above 0"),
        (("--expert-tensor-parallel-size", "3"), "--expert-tensor-parallel-size: expected 1 or the tensor parallel size"),
        ((*TWO_STAGES, "--num-layer-list", "1,3", "--num-layers-per-virtual-pipeline-stage", "1"), "exclude each other"),
        (("--first-k-dense-replace", "2"), "--first-k-dense-replace 2 does not fit"),
        (("--moe-grouped-gemm", "--load-model-type", "native"), "is a Hugging Face checkpoint, not a native one"),
        (("--num-layers", "5"), "--num-layers 5 does not fit: the model has model_config.num_layers 4"),
        (("--model-type-hf", "mixtral"), "config.json says qwen2"),
        (("--load-model-type", "mg"), "is a Hugging Face checkpoint, not a Megatron one"),
        (("--tokenizer-model", "nowhere.json"), "--tokenizer-model nowhere.json does not exist"),
        (("--save-dir", ""), "--save-dir is empty: expected a folder."),
        (("--load-dir", ""), "--load-dir is empty: expected a folder."),
        (("--load-dir", os.path.join(qwen, "config.json")), "config.json is a file: expected a folder, or a file that ends"),
        (("--target-tensor-parallel-size", "3"), "--target-tensor-parallel-size"),
        (("--target-pipeline-parallel-size", "5"), "--target-pipeline-parallel-size"),
        (("--target-pipeline-parallel-size", "2", "--num-layer-list", "1,2"), "--num-layer-list"),
        (("--target-pipeline-parallel-size", "2", "--num-layer-list", "4"), "--num-layer-list has 1 numbers"),
        (("--save-model-type", "hf", "--hf-cfg-dir", str(tmp_path)), "has no config.json"),
    ):
        kind = () if "--save-model-type" in words else ("--save-model-type", "native")
        convert(qwen, tmp_path / "native", *kind, *words, code=2)
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("convert_ckpt.py: ") and text in error, error
    assert os.listdir(tmp_path) == ["Qwen2.5"]


@pytest.mark.parametrize("words", [("mg",), ("mg", "--ckpt-format", "torch_dist"), ("native",)])
def test_a_stated_layout_of_the_source_is_compared(qwen, tmp_path, capsys, words):
    """Flags of MindSpeed-LLM's `*_mcore2hf.py`."""
    cut = ("--target-tensor-parallel-size", "2", *TWO_STAGES)
    source = convert(qwen, tmp_path / "cut", "--save-model-type", *words, *cut)
    right = ("--source-tensor-parallel-size", "2", "--source-pipeline-parallel-size", "2", "--source-expert-parallel-size", "1")
    convert(source, tmp_path / "back", "--save-model-type", "hf", "--verify", *right)
    for name, size in (("tensor", "1"), ("pipeline", "4"), ("expert", "2")):
        convert(source, tmp_path / "new", "--save-model-type", "hf", f"--source-{name}-parallel-size", size, code=2)
        found = 1 if name == "expert" else 2
        error = capsys.readouterr().err
        assert f"--source-{name}-parallel-size {size} does not fit: {source}/" in error
        assert f"has {name}_model_parallel_size {found}." in error
    convert(qwen, tmp_path / "new", "--save-model-type", "native", *right, code=2)
    assert f"{qwen} (Hugging Face) is not cut over ranks" in capsys.readouterr().err
    convert(qwen, tmp_path / "new", "--save-model-type", "native", *right[4:])


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
        convert(qwen, tmp_path / "no", "--save-ckpt-format", "torch_dist", *words, code=2)
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

    less = convert(native, tmp_path / "less", "--save-model-type", "native", "--make-vocab-size-divisible-by", "1")
    told = convert(native, tmp_path / "told", "--save-model-type", "native", "--true-vocab-size", "60")
    for path, rows, true_rows in ((less, 61, 61), (told, 64, 60)):
        with open_checkpoint(path) as reader:
            assert (reader.tensor(WORDS).shape[0], reader.manifest.vocab_size) == (rows, true_rows)


def test_optimizer_of_a_megatron_checkpoint(tmp_path, capsys):
    """It goes with the weights in its own dtype, unless it is left out; it cannot be padded."""
    source = made_up("core").write(str(tmp_path / "source"))
    to_megatron = ("--save-model-type", "mg", "--save-to-legacy")
    convert(source, tmp_path / "half", *to_megatron, "--params-dtype", "bf16", "--dry-run")
    assert optimizer_key("fp32_param", WORDS) in capsys.readouterr().out
    half = open_checkpoint(convert(source, tmp_path / "half", *to_megatron, "--params-dtype", "bf16", "--verify"))
    without = open_checkpoint(convert(source, tmp_path / "without", *to_megatron, "--no-save-optim"))
    with half, without:
        assert half.manifest.style == without.manifest.style == "legacy"
        assert half.tensor(WORDS).dtype == "bfloat16" and half.tensor(optimizer_key("exp_avg", WORDS)).dtype == "float32"
        masters = half.read_whole(optimizer_key("fp32_param", WORDS))
        np.testing.assert_array_equal(masters, without.read_whole(WORDS))
        assert not any("exp_avg" in key for key in without.manifest.tensors) and without.manifest.not_resumable
    for name, words in (("whole", ()), ("weights", ("--no-save-optim",))):
        again = convert(tmp_path / "half", tmp_path / name, *to_megatron, "--params-dtype", "fp32", "--verify", *words)
        with open_checkpoint(again) as whole:  # not rounded: from the optimizer's copies
            np.testing.assert_array_equal(whole.read_whole(WORDS), masters)
            assert not any("fp32_param" in key for key in whole.manifest.tensors)
    native = open_checkpoint(convert(source, tmp_path / "native", "--save-model-type", "native", "--no-save-optim"))
    with native:
        assert native.manifest.states["optimizer"] is None and native.manifest.states["opt_param_scheduler"] is None
    convert(source, tmp_path / "no", "--save-model-type", "native", "--make-vocab-size-divisible-by", "64", code=2)
    assert "the optimizer's state has 32 rows of the vocabulary, the target 64" in capsys.readouterr().err


def test_rounding_of_dtypes():
    """To the nearest, ties to even; what is not finite stays, and nothing else becomes so."""

    def bits_of(values, wanted="bfloat16"):
        out = np.empty(len(values), {"bfloat16": np.uint16, "float16": np.float16}[wanted])
        cast(np.array(values, np.float32), "float32", out, wanted, "w")
        return out

    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF807FFF], np.uint32).view(np.float32)
    assert bits_of(ties).tolist() == [0x3F80, 0x3F82, 0x3F81, 0xBF80]
    special = bits_of([np.inf, -np.inf])
    assert special.tolist() == [0x7F80, 0xFF80]
    odd_nan = np.array([0x7FFFFFFF, 0x7F800001], np.uint32).view(np.float32)  # neither wraps nor becomes infinite
    assert np.isnan((bits_of(odd_nan).astype(np.uint32) << 16).view(np.float32)).all()
    assert np.isinf(bits_of([np.inf], "float16")).all()
    for value, wanted in ((3.4e38, "bfloat16"), (1e5, "float16")):
        with pytest.raises(CheckpointError, match=f"w has values that {wanted} cannot hold"):
            bits_of([value], wanted)


@pytest.mark.parametrize("check", ["CheckedSource", "check_space"])
def test_nothing_is_written_before_the_checks(qwen, tmp_path, capsys, monkeypatch, check):
    def refuse(*arguments):
        raise CheckpointError("it cannot be done")

    monkeypatch.setattr(conversion, check, refuse)
    convert(qwen, tmp_path / "native", "--save-model-type", "native", code=2)
    assert "it cannot be done" in capsys.readouterr().err and os.listdir(tmp_path) == ["Qwen2.5"]


def test_biases_of_all_linears_are_biases_of_query_key_and_value(tmp_path):
    """A tokenizer's file goes along under its own name."""
    folder, _ = write_folder(tmp_path / "model", CONFIGS["gpt2"])
    (tmp_path / "mine.model").write_text("x")
    words = ("--add-qkv-bias", "--add-dense-bias", "--tokenizer-model", str(tmp_path / "mine.model"))
    convert(folder, tmp_path / "again", "--save-model-type", "hf", *words)
    assert (tmp_path / "again" / "mine.model").read_text() == "x"


def test_a_tokenizer_alone_goes_along_too(qwen, tmp_path, capsys):
    """Beside a checkpoint whose config.json is not kept; the way back asks for the family."""
    native = convert(qwen, tmp_path / "native", "--save-model-type", "native")
    os.remove(os.path.join(native, "hugging_face", "config.json"))
    for name in ("tokenizer.json", "tokenizer.model"):
        (tmp_path / "native" / "hugging_face" / name).write_text("x")
    again = convert(native, tmp_path / "again", "--save-model-type", "native")
    assert sorted(os.listdir(os.path.join(again, "hugging_face"))) == ["tokenizer.json", "tokenizer.model"]
    convert(again, tmp_path / "back", "--save-model-type", "hf", code=2)
    assert "needs the model's config.json: give its folder with --hf-cfg-dir" in capsys.readouterr().err
    back = convert(again, tmp_path / "back", "--save-model-type", "hf", "--model-type-hf", "qwen2")
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "x" and read_tensors(back) == read_tensors(qwen)
    cfg = convert(again, tmp_path / "cfg", "--save-model-type", "hf", "--hf-cfg-dir", qwen)
    assert not os.path.exists(os.path.join(cfg, "tokenizer.model"))  # that of the named folder counts


def test_a_damaged_tracker_is_named(qwen, tmp_path, capsys):
    native = convert(qwen, tmp_path / "native", "--save-model-type", "native")
    (tmp_path / "native" / "latest_checkpointed_iteration.txt").write_text("foo")
    convert(native, tmp_path / "again", "--save-model-type", "native", code=2)
    error = capsys.readouterr().err
    assert "holds 'foo': expected the number of an iteration" in error and "--ckpt-step" not in error


@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
def test_upstreams_files(qwen, tmp_path, kind):
    words = ("--target-tensor-parallel-size", "2", "--target-data-parallel-size", "2")
    target = convert(qwen, tmp_path / "ms", "--save-model-type", kind, *words, "--verify")
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
    convert(qwen, tmp_path / "mine", "--save-model-type", "native", code=2)
    assert "exists already" in capsys.readouterr().err and os.listdir(tmp_path / "mine") == ["file"]
    (tmp_path / "empty").mkdir()
    convert(qwen, tmp_path / "empty", "--save-model-type", "native")


def test_a_full_disk_leaves_nothing(qwen, tmp_path, capsys, monkeypatch):
    from mindspeed_ms.core.dist_checkpointing import shard_file

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shard_file, "_write_all", full)
    for kind in ("native", "hf", "ckpt"):
        convert(qwen, tmp_path / "result", "--save-model-type", kind, code=2)
        assert "No space left on device" in capsys.readouterr().err
        assert os.listdir(tmp_path) == ["Qwen2.5"]


def test_a_damaged_result_is_deleted(qwen, tmp_path, capsys, monkeypatch):
    from mindspeed_ms.models.hugging_face import writer

    monkeypatch.setattr(writer, "write_json", lambda path, content: None)
    convert(qwen, tmp_path / "result", "--save-model-type", "hf", "--verify", code=2)
    assert "config.json" in capsys.readouterr().err and os.listdir(tmp_path) == ["Qwen2.5"]


def test_a_folder_of_no_format_is_named_with_what_was_looked_for(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tiny.gguf").touch()
    convert(tmp_path / "model", tmp_path / "result", "--save-model-type", "hf", code=2)
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("convert_ckpt.py: --load-dir ") and "there is tiny.gguf in it. Looked for: " in error
    assert all(
        title in error for title in ("Hugging Face (", "Megatron (", "plain weights (", "upstream's (", "model/tiny.gguf.")
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_leaves_nothing(qwen, tmp_path, number):
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with SIGINT ignored\n"
        "from mindspeed_ms.core.dist_checkpointing import by_tensor\n"
        "from mindspeed_ms.tools.converter.__main__ import main\n"
        "def slowly(path, entry, data, with_sums, progress):\n"
        "    os.write(1, b'writing\\n')\n"
        "    while True:\n"
        "        time.sleep(0.1)\n"
        "        progress(0)  # other threads see the interruption here\n"
        "by_tensor.write_values = slowly\n"
        f"sys.exit(main(['--load-dir', {qwen!r}, '--save-dir', {str(tmp_path / 'result')!r}, '--save-model-type', 'hf']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(number)
        assert process.wait(20) == 130
    finally:
        process.kill()
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
    assert read_json(os.path.join(result, "hugging_face"))["model_type"] == "qwen2"
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
