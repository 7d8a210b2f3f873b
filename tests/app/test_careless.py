"""Careless commands: the real script says in one line what is wrong before a rank starts; nothing of the user is lost."""

import contextlib
import io
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from mindspeed_ms.core.dist_checkpointing import job_lock
from mindspeed_ms.tools.checkpoint.__main__ import main as merge
from tests.app.job import CPU_DEFAULT, SCRIPT, environment

SIZES = (
    "--num-layers 1 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--padded-vocab-size 320 --vocab-size 320 --micro-batch-size 4 --eval-iters 1 --no-sample --data-path text.txt"
).split()
MODEL = [*SIZES, "--lr", "1e-3", "--train-iters", "2"]
SAVED = [*MODEL, "--save", "saved", "--load", "saved"]


def script(folder, arguments, device="CPU"):
    """(exit code, what was printed to the error stream) of gpt/pretrain_gpt.py, run in this rank as a script."""
    from mindspeed_ms.core import num_microbatches_calculator as calculator
    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.core.dist_checkpointing import job_lock
    from mindspeed_ms.training import initialize, tensorboard

    os.chdir(folder)
    variables = {name: value for name, value in os.environ.items() if name != "MINDSPEED_MS_DEVICE"}
    variables |= {"MINDSPEED_MS_DEVICE": device} if device else {}
    parallel_state.destroy_model_parallel()
    calculator.destroy_num_microbatches_calculator()
    code, errors = 0, io.StringIO()
    try:
        with (
            contextlib.redirect_stderr(errors),
            mock.patch.object(sys, "argv", [str(SCRIPT.with_suffix(".py")), *arguments]),
            mock.patch.object(job_lock, "LINGER_SECONDS", 0.0),
            mock.patch.object(tensorboard, "find_spec", lambda _name: None),  # a machine without TensorBoard
            mock.patch.dict(os.environ, variables, clear=True),
        ):
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    finally:
        initialize.unset_global_variables()
    return code, errors.getvalue()


@pytest.fixture(scope="module")
def users_folder(world, tmp_path_factory):
    """A user's files: a text, a training of two steps, configurations, checkpoints of other programs."""
    folder = tmp_path_factory.mktemp("careless")
    shutil.copy(os.__file__, folder / "text.txt")
    ((code, errors),) = world(1)(script, folder, SAVED)
    assert code == 0, errors
    for name in ("megatron/iter_0000005/mp_rank_00/model_optim_rng.pt", "distributed/iter_0000005/__0_0.distcp",
                 "hf/model.safetensors", "hf/config.json", "wrong/pytorch_model.bin", "wrong/more/notes"):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    for name in ("megatron", "distributed"):
        (folder / name / "latest_checkpointed_iteration.txt").write_text("5")
    assert merge(["merge", str(folder / "saved"), str(folder / "weights"), "--weights-only"]) == 0
    (folder / "bad.yaml").write_text("train_conf: {ms_training_config: {training_iters: 3}}\n")
    (folder / "lora.yaml").write_text("lora_config: {lora_rank: 4}\n")
    (folder / "empty.txt").touch()
    (folder / "locked").mkdir()
    job_lock.hold(folder / "locked")
    yield folder
    job_lock.release(folder / "locked")


def contents(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


LATER = "is not available yet"
CARELESS = [
    # over the default configuration
    (["--data-path", "nowhere"], ["nowhere does not exist"]),
    (["--data-path", "empty.txt"], ["there is no text in empty.txt"]),
    (["--data-path", "0.5", "text.txt"], ["text must be preprocessed first, and only indexed files take weights"]),
    (["--data-path", "chat", "--is-instruction-dataset"], ["there is no chat_packed_input_ids_document.bin"]),
    ([*MODEL, "--seq-length", "1048576", "--max-position-embeddings", "1048576"],
     ["fewer than one micro-batch"]),
    ([*MODEL, "--num-attention-heads", "3"], ["--num-attention-heads = 3"]),
    (["--load", "nowhere"], ["load_checkpoint (--load) is nowhere: there is no such folder"]),
    (["--save", "text.txt/folder"], ["--save", "text.txt/folder"]),
    (["--lora-r", "9"], ["--lora-r = 9", "has no effect without use_lora"]),
    (["--lora-target-modules", "linear_qvk", "--lora-alpha", "16"], ["--lora-target-modules", "near is", "qkv_proj'"]),
    (["--config", *CPU_DEFAULT, "lora.yaml"], ["lora.yaml:1: lora_config.lora_rank = 4", "has no effect without use_lora"]),
    (["--num-experts", "4", "--moe-router-topk", "8"], ["--moe-router-topk = 8", "--num-experts = 4"]),
    (["--num-experts", "4", "--expert-model-parallel-size", "3"], ["--num-experts = 4", "multiple of 3"]),
    (["--context-parallel-size", "4"], ["--context-parallel-size = 4", "multiple of 8 = tp * ulysses degree 4"]),
    (["--context-parallel-size", "2", "--context-parallel-algo", "adaptive_cp_algo"], ["use that", "megatron_cp_algo"]),
    (["--mla-mm-split"], ["--mla-mm-split", "not available"]),
    *(([*flag.split()], ["--is-instruction-dataset", "--variable-seq-lengths", "--reset-attention-mask"])
      for flag in ("--no-pad-to-seq-lengths", "--padded-samples", "--cut-max-seqlen")),
    (["--stage", "sft"], ["--stage = 'sft'", "which posttrain_gpt.py trains"]),
    (["--tensorboard-dir", "events"], ["--tensorboard-dir", "pip install tensorboardX"]),
    (["--trian-iters", "3"], ["--trian-iters", "Did you mean '--train-iters'?"]),
    (["--split", "nan,1,1"], ["--split = 'nan,1,1'"]),
    (["--tensor-model-parallel-size", "2", "--world", "3"], ["--world = 3", "multiple of 2"]),
    (["--micro-batch-size", "4", "--global-batch-size", "10"], ["--global-batch-size = 10", "8 or 12"]),
    (["--train-iters", "0"], ["--train-iters = 0", "nothing to train"]),
    (["--decoder-last-pipeline-num-layers", "1"], ["--decoder-last-pipeline-num-layers = 1"]),
    (["--lr-warmup-iters", "400"], ["--lr-warmup-iters = 400", "300"]),
    (["--config", "nowhere.yaml"], ["nowhere.yaml"]),
    (["--config", "bad.yaml"], ["bad.yaml:1: train_conf", "Did you mean 'train_config'?"]),
    # Megatron's model
    (["--num-layers", "2", "--fp16"], ["--hidden-size, --num-attention-heads", "must be given", "--micro-batch-size, --lr"]),
    ([*SIZES, "--train-iters", "2"], ["--lr: must be given"]),
    ([*MODEL, "--fp16", "--bf16"], ["fp16", "bf16"]),
    # over an earlier training
    ([*SAVED, "--hidden-size", "64"], ["saved/iter_0000002 holds another model", "--hidden-size is 64 here and 32 there"]),
    ([*SAVED, "--num-layers", "2"],
     ["--num-layers is 2 here and 1 there. Take the checkpoint's values (--use-checkpoint-args), or set load_strict"]),
    ([*SAVED, "--num-attention-heads", "8"], ["8 here and 4 there. Take", "load its weights alone (--finetune)"]),
    ([*SAVED, "--rotary-base", "5", "--position-embedding-type", "rope"], ["another model", "--position-embedding-type"]),
    ([*SAVED, "--lr", "5e-3"], ["saved/iter_0000002", "--lr is 0.005 here and 0.001 there", "--override-opt-param-scheduler"]),
    ([*SAVED, "--train-iters", "9"], ["--train-iters is 9 here and 2 there", "--use-checkpoint-opt-param-scheduler"]),
    ([*SAVED, "--min-lr", "1e-5"], ["--min-lr is 1e-05 here and 0.0 there"]),
    ([*SAVED, "--lr-decay-iters", "9"], ["--lr-decay-iters is 9 here and None there"]),
    ([*SAVED, "--lr-warmup-iters", "1"], ["--lr-warmup-iters is 1 here and 0 there"]),
    ([*MODEL, "--save", "locked"], ["another job saves into locked: process"]),
    ([*SAVED, "--ckpt-step", "7"], ["no checkpoint of iteration 7"]),
    ([*MODEL, "--load", "megatron"], ["megatron/iter_0000005/mp_rank_00/model_optim_rng.pt", "damaged"]),
    ([*MODEL, "--load", "distributed"], ["distributed/iter_0000005/common.pt is missing"]),
    ([*MODEL, "--load", "weights", "--finetune", "--ffn-hidden-size", "96"],
     ["weights holds another model: language_model.encoder.layers.0.mlp.mapping.weight is [96, 32] here and [64, 32] there"]),
    ([*MODEL, "--load", "weights", "--num-layers", "2"], ["it does not have language_model.encoder.layers.1."]),
    ([*MODEL, "--load", "weights", "--swiglu"], ["weights holds another model"]),
    ([*MODEL, "--load", "wrong"],
     ["wrong holds no checkpoint: there is more/, pytorch_model.bin in it", "Hugging Face (config.json"]),
    ([*MODEL, "--load", "hf"], ["hf/config.json has no model_type", "qwen2"]),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), CARELESS, ids=lambda value: " ".join(value)[-60:])
def test_one_line_says_what_is_wrong(world, users_folder, arguments, said):
    before = contents(users_folder)
    ((code, errors),) = world(1)(script, users_folder, ["--prepare", "--default-config", *CPU_DEFAULT, *arguments])
    lines = [line for line in errors.splitlines() if " - INFO - " not in line]
    assert code == 2 and len(lines) == 1 and lines[0].startswith("pretrain_gpt.py: error: "), errors
    assert all(word in lines[0] for word in said), lines[0]
    after = contents(users_folder)
    assert before == {path: after[path] for path in before}


@pytest.mark.parametrize(("words", "variable"), [(["--device", "Ascend"], None), ([], "Ascend")])
def test_without_ascend_it_is_refused_at_once(tmp_path, words, variable):
    """In a process of its own, since others work on CPU already."""
    variables = {name: value for name, value in environment().items() if name != "MINDSPEED_MS_DEVICE"}
    result = subprocess.run(
        [sys.executable, SCRIPT.with_suffix(".py"), "--prepare", *MODEL, *words],
        cwd=tmp_path,
        env=variables | ({"MINDSPEED_MS_DEVICE": variable} if variable else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2 and "no Ascend was found: there is no /dev/davinci*" in result.stderr, result.stderr
    assert len([line for line in result.stderr.splitlines() if "error" in line]) == 1 and "Traceback" not in result.stderr
