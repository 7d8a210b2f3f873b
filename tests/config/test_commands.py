"""python -m mindspeed_ms.config: check, explain, schema, convert, docs; and what importing the package costs."""

import glob
import os
import subprocess
import sys
import time

import pytest

from mindspeed_ms.config import ConfigError, init_configs_from_yaml
from mindspeed_ms.config.__main__ import main
from mindspeed_ms.config.argument_table import TABLE
from mindspeed_ms.config.convert import convert_script, launch_words
from mindspeed_ms.config.docs import write_generated
from mindspeed_ms.config.explain import explain
from mindspeed_ms.config.json_schema import build_schema
from mindspeed_ms.config.trio_table import TRIO

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
TRIO_FILES = sorted(glob.glob(os.path.join(ROOT, "configs", "38BV3", "*.yaml")))
SCRIPTS = os.path.join(os.path.dirname(__file__), "scripts")


def run(*words):
    """A command in a fresh process: (exit code, stdout, stderr, seconds of processor time)."""
    before = os.times()
    result = subprocess.run(
        [sys.executable, "-m", "mindspeed_ms.config", *words], capture_output=True, text=True, cwd=ROOT, check=False
    )
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return result.returncode, result.stdout, result.stderr, spent


def test_check_of_the_trio_as_a_command():
    code, out, err, seconds = run("check", *TRIO_FILES, "--world", "128")
    assert (code, err) == (0, "")
    assert "128 ranks: dp4 tp8 pp4" in out and "15/16/16/15" in out and "39,093,884,928 parameters" in out
    assert "distributed optimizer" in out or "not available" not in out
    assert seconds < 1.0


def test_check_of_a_wrong_world():
    code, out, err, _ = run("check", *TRIO_FILES, "--world", "8")
    assert code == 1 and out == "" and "needs a multiple of 32" in err


def test_nothing_heavy_is_imported():
    program = (
        "import sys\n"
        "from mindspeed_ms.config.__main__ import main\n"
        f"assert main(['check', *{TRIO_FILES!r}, '--world', '128']) == 0\n"
        "heavy = {'mindspore', 'numba', 'torch', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_reading_in_process_is_quick():
    init_configs_from_yaml(TRIO_FILES)
    times = []
    for _ in range(5):
        start = time.process_time()
        init_configs_from_yaml(TRIO_FILES)
        times.append(time.process_time() - start)
    assert min(times) < 0.1


def test_check_with_flags(capsys):
    words = "check --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --padded-vocab-size 128"
    assert main([*words.split(), "--world", "2", "--tensor-model-parallel-size", "2"]) == 0
    out = capsys.readouterr().out
    assert "2 ranks: dp1 tp2" in out and "Megatron's default" in out
    assert main(["check"]) == 1
    assert main(["chek"]) == 2 and "'check'" in capsys.readouterr().err
    assert main(["check", "nowhere.yaml"]) == 1


def test_explain_knows_every_name(capsys):
    for row in TABLE:
        for key in (row.path, row.name, *row.flags, *row.off_flags):
            assert not key or explain(key)
    for key in TRIO:
        assert key in explain(key)
    assert "number of key/value groups" in explain("kv_group_size")
    with pytest.raises(ConfigError, match="hidden_size"):
        explain("hiden_size")
    assert main(["explain", "--lr"]) == 0 and "learning_rate" in capsys.readouterr().out


def test_the_schema_accepts_our_files():
    for path in TRIO_FILES:
        with open(path, encoding="utf-8") as file:
            first = file.readline()
        assert first.startswith("# yaml-language-server: $schema="), path
        target = os.path.join(os.path.dirname(path), first.split("$schema=")[1].strip())
        assert os.path.exists(target), path
    schema, files = build_schema(), glob.glob(os.path.join(ROOT, "configs", "*", "*.yaml"))
    assert len(files) > 3
    for path in files:
        assert not _unknown_keys(schema, schema, _data(path), ())


def _data(path):
    from mindspeed_ms.config.yaml_loader import load_yaml

    return load_yaml(path).data


def _unknown_keys(schema, whole, data, path):
    if "$ref" in schema:
        schema = whole["$defs"][schema["$ref"].rpartition("/")[2]]
    if not isinstance(data, dict) or "properties" not in schema:
        return []
    found = [".".join((*path, key)) for key in data if key not in schema["properties"]]
    for key, value in data.items():
        if key in schema["properties"]:
            found += _unknown_keys(schema["properties"][key], whole, value, (*path, key))
    return found


def test_generated_files_are_current(tmp_path):
    assert write_generated(ROOT, only_check=True) == []
    assert len(write_generated(str(tmp_path))) == 3 and write_generated(str(tmp_path)) == []
    text = (tmp_path / "docs" / "arguments_zh.md").read_text(encoding="utf-8")
    assert "张量并行" in text and "kv_group_size" in text


def test_convert_a_dense_script(tmp_path):
    result = convert_script(os.path.join(SCRIPTS, "dense_72b.sh"), {})
    path = tmp_path / "dense.yaml"
    path.write_text(result.yaml_text, encoding="utf-8")
    all_config = init_configs_from_yaml(str(path))
    model, parallel, training = all_config.model_config, all_config.parallel_config, all_config.training_config
    assert (model.num_layers, model.vocab_size, model.normalization, model.rotary_base) == (80, 152064, "FusedRMSNorm", 1e6)
    assert (model.qkv_has_bias, model.out_proj_has_bias, model.add_bias_linear) == (True, False, False)
    assert (parallel.tensor_model_parallel_size, parallel.virtual_pipeline_model_parallel_size) == (8, 5)
    assert (training.load_checkpoint, training.resume_training, training.no_load_rng) == ("model ckpt", True, True)
    assert all_config.dataset_config.tokenizer_name_or_path == "./tokenizer"
    fate = dict(result.fate)
    assert fate["--use-mcore-models"].startswith("ignored") and fate["--distributed-backend nccl"].startswith("ignored")
    assert fate["--lr 1.25e-6"] == "-> optimizer_config.learning_rate"
    assert not [text for text in fate.values() if "UNKNOWN" in text or "LEFT OUT" in text]


def test_convert_a_script_with_what_we_lack(tmp_path):
    result = convert_script(os.path.join(SCRIPTS, "experts_lora.sh"), {})
    fate = dict(result.fate)
    assert fate["--sequence-parallel"].startswith("left out") and fate["--not-a-flag"].startswith("UNKNOWN")
    assert fate["--mla-mm-split"].startswith("LEFT OUT") and "MLA" in fate["--mla-mm-split"]
    assert fate["--mtp-num-layers 0"] == "-> model_config.mtp_num_layers"
    path = tmp_path / "experts.yaml"
    path.write_text(result.yaml_text, encoding="utf-8")
    all_config = init_configs_from_yaml(str(path))
    moe = all_config.moe_config
    assert (moe.num_experts, moe.moe_router_topk, moe.moe_router_enable_expert_bias) == (128, 8, True)
    assert all_config.model_config.rope_scaling.factor == 40.0
    assert all_config.lora_config.use_lora and all_config.lora_config.lora_rank == 16
    assert main(["convert", os.path.join(SCRIPTS, "dense_72b.sh"), str(tmp_path / "out" / "new.yaml")]) == 0
    assert (tmp_path / "out" / "new.yaml").exists()


def test_scripts_without_a_call_are_refused(tmp_path):
    path = tmp_path / "empty.sh"
    path.write_text("echo hello\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="calls no Python"):
        convert_script(str(path))


def test_shell_words():
    words, unknown = launch_words('A=2\nB=$((A*3))\nX="--seed $B"\ntorchrun t.py $X --lr ${LR} --save "a b" | tee x\n', {})
    assert words == ["--seed", "6", "--lr", "${LR}", "--save", "a b"] and unknown == ["LR"]


def test_a_file_of_the_user_is_not_replaced(tmp_path, capsys):
    """Neither another file nor the script itself; the same content again is fine."""
    script, target = tmp_path / "a.sh", tmp_path / "a.yaml"
    script.write_text("torchrun pretrain_gpt.py --num-layers 2\n")
    assert main(["convert", str(script), str(target)]) == main(["convert", str(script), str(target)]) == 0
    target.write_text("mine")
    for path in (target, script):
        before = path.read_text()
        assert main(["convert", str(script), str(path)]) == 1 and path.read_text() == before
        assert f"{path} exists already and holds something else" in capsys.readouterr().err
    assert main(["convert", str(script), str(tmp_path)]) == main(["schema", f"{script}/x"]) == 1
    assert capsys.readouterr().err.count("cannot be written") == 2
