"""Curves of SFT and DPO of a small llama against transformers and torch, ten steps (needs the `[peer]` extra)."""

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests.conversion.tiny_models import CONFIGS, write_folder
from tests.posttrain import runs

pytestmark = pytest.mark.peer
STEPS, LR, BETA = 10, 1e-3, 0.3


def trained(stage, folder, base, data):
    """(losses of the steps, the stored samples of each of them)."""
    from mindspeed_ms.tasks.posttrain.stages import trainer_class
    from mindspeed_ms.training import metrics
    from mindspeed_ms.training.initialize import initialize_megatron, unset_global_variables

    runs.reset()
    words = (
        f"--stage {stage} --use-checkpoint-args --pretrained-checkpoint {base} --save {folder} --data-path {data} --split 1,0,0"
    )
    words += f" --seq-length {runs.LENGTH} --micro-batch-size 2 --global-batch-size 4 --train-iters {STEPS} --lr {LR}"
    words += " --lr-decay-style constant --weight-decay 0 --adam-beta2 0.999 --clip-grad 1 --eval-iters 0"
    words += f" --dpo-beta {BETA}" if stage == "dpo" else ""
    initialize_megatron(argv=words.split())
    try:
        run = trainer_class(stage)()
        with mock.patch.object(metrics, "draw_loss_curve"):
            run.train()
    finally:
        unset_global_variables()
    dataset = run.train_valid_test_datasets_provider.datasets[0]
    rows = [dataset.files[dataset.stored_index(number)] for number in range(4 * STEPS)]
    rows = [{name: values.tolist() for name, values in row.items()} for row in rows]
    lines = metrics.read_metrics(f"{folder}/metrics.jsonl")
    return [line["loss"] for line in lines], [rows[4 * step : 4 * step + 4] for step in range(STEPS)]


def test_curves_are_those_of_torch(world, tmp_path):
    base, _ = write_folder(tmp_path / "base", CONFIGS["llama3"])
    data = {"sft": runs.write_conversations(str(tmp_path / "chats")), "dpo": runs.write_pairs(str(tmp_path / "pairs"))}
    found, steps = {}, {}
    for stage, prefix in data.items():
        ((found[stage], steps[stage]),) = world(1)(trained, stage, str(tmp_path / stage), base, prefix)
    question = {"folder": base, "lr": LR, "beta": BETA, "steps": steps}
    (tmp_path / "question.json").write_text(json.dumps(question))
    script = Path(__file__).with_name("torch_posttrain.py")
    subprocess.run([sys.executable, str(script), str(tmp_path / "question.json"), str(tmp_path / "out.npz")], check=True)
    answer = np.load(tmp_path / "out.npz")
    for stage, curve in found.items():
        np.testing.assert_allclose(curve, answer[stage], rtol=1e-5, err_msg=stage)
        assert curve[-1] < curve[0]
