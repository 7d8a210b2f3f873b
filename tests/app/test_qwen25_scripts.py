"""Scripts of examples/mcore/qwen25: the full size is checked, a small one runs from the weights to the chat."""

import json
import subprocess

import pytest

from tests.app.job import REPOSITORY, environment
from tests.comm.test_world import free_port
from tests.conversion.tiny_models import CONFIGS
from tests.documented.sandbox import Sandbox, write_chat_model, write_texts

FOLDER = REPOSITORY / "examples" / "mcore" / "qwen25"
SMALL = {
    "NUM_LAYERS": "4",
    "HIDDEN_SIZE": "32",
    "FFN_HIDDEN_SIZE": "48",
    "NUM_ATTENTION_HEADS": "4",
    "NUM_QUERY_GROUPS": "2",
    "VOCAB_SIZE": "512",
    "SEQ_LEN": "64",
    "GBS": "2",
    "TRAIN_ITERS": "3",
    "TP": "2",
    "NPUS_PER_NODE": "2",
    "LR": "1e-3",
    "HF_DIR": "Qwen2.5",
    "DATA_PATH": "texts",
    "MAX_NEW_TOKENS": "4",
}


def _run(name, folder, variables, *flags, typed=None):
    return subprocess.run(
        ["/bin/bash", str(FOLDER / name), *flags],
        cwd=folder,
        env={**environment(), **variables},
        input=typed or "",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("name", ["pretrain.sh", "tune.sh"])
def test_the_full_size_is_qwen25_7b(tmp_path, name):
    done = _run(name, tmp_path, {"CHECK": "1"})
    assert done.returncode == 0, done.stdout
    assert "7,615,616,512 parameters, kept in bfloat16" in done.stdout and "no effect" not in done.stdout
    assert "8 ranks: dp2 tp4 pp1" in done.stdout
    done = _run(name, tmp_path, {"CHECK": "1", "TP": "3"})
    assert done.returncode and "3" in done.stdout.splitlines()[-1], done.stdout


@pytest.mark.parametrize("name", ["pretrain.sh", "tune.sh"])
def test_without_data(tmp_path, name):
    done = _run(name, tmp_path, {})
    assert (done.returncode, done.stdout.count("\n")) == (2, 1) and "DATA_PATH is not set" in done.stdout


@pytest.mark.slow
def test_a_small_one_runs(tmp_path):
    assert CONFIGS["qwen2"]["num_hidden_layers"] == 4
    sandbox = Sandbox(tmp_path)
    write_chat_model(sandbox, "Qwen2.5")
    write_texts(sandbox, "texts")
    variables = {**SMALL, "MASTER_PORT": str(free_port())}
    done = _run("ckpt_convert.sh", tmp_path, variables)
    assert done.returncode == 0 and (tmp_path / "Qwen2.5" / "mcore_tp2_pp1").is_dir(), done.stdout
    done = _run("pretrain.sh", tmp_path, variables)
    assert done.returncode == 0 and "Training success! 3 iterations" in done.stdout, done.stdout[-3000:]
    assert "loaded the weights of" in done.stdout
    records = [{"instruction": "Which?", "output": word} for word in ("this", "that")]
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    for steps in ("2", "3"):  # the second call goes on
        flags = ("--train-iters", "3", "--exit-interval", steps)
        done = _run("tune.sh", tmp_path, {**variables, "DATA_PATH": "chats.jsonl"}, *flags)
        assert done.returncode == 0, done.stdout[-3000:]
    assert "Iteration: 3/3" in done.stdout and "Iteration: 2/3" not in done.stdout
    assert "resumed" in done.stdout
    for weights in ({}, {"CKPT_DIR": "output/qwen25"}, {"CKPT_DIR": "output/qwen25_sft"}):
        done = _run("generate.sh", tmp_path, {**variables, **weights, "PROMPT": "import"})
        assert done.returncode == 0, done.stdout
    done = _run("chat.sh", tmp_path, {**variables, "CKPT_DIR": "output/qwen25"}, typed="hello\nq\n")
    assert done.returncode == 0, done.stdout
