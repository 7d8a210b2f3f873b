"""Small trainings on rewards of generated answers; everything here runs in a rank of a forked world."""

import os
from unittest import mock

from mindspeed_ms.testing.small_trainings import UNTIED
from tests.datasets.instruction_data import write_field
from tests.posttrain import runs

LORA = {"use_lora": True, "lora_rank": 2, "target_cells": [{"target_cells": [r".*\.mapping"]}]}
SEVERAL = {"rollout_batch_size": 16, "ppo_epochs": 2, "training_iters": 6}  # steps of a rollout: 4
LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "vpp2": {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
    "dp2": {},
}
WANTED = 9
SMALL = {**UNTIED, "num_layers": 2, "vocab_size": 32, "init_method_std": 0.05}
REWARDS = f"""
def count(answer_ids):
    return [ids.count({WANTED}) for ids in answer_ids]
def dense(answer_ids):
    return [sum(ids) / 32 for ids in answer_ids]
def raises(answer_ids, records):
    if any(3 in record["input_ids"] for record in records):
        raise KeyError("three")
    return [0.0] * len(answer_ids)
def nan(answer_ids):
    return [float("nan")] * len(answer_ids)
def short(answer_ids):
    return [1.0]
def odd(texts):
    return texts
def huge(answer_ids):
    return [1e39] * len(answer_ids)
def endless(answer_ids):
    return [10**400] * len(answer_ids)
def leaves(answer_ids):
    raise SystemExit(0)
def lazy(answer_ids):
    return (1 / 0 for _ in answer_ids)
def named(answer_ids):
    return dict.fromkeys(range(len(answer_ids)), 1.0)
builtin = max
"""


def write_prompts(folder, prompts=((1, 2), (3, 4, 5), (6,), (7, 8))):
    """Prefix of prompts, and rewards.py beside it."""
    os.makedirs(folder, exist_ok=True)
    prefix = os.path.join(folder, "prompts")
    write_field(prefix, "input_ids", [list(one) for one in prompts])
    write_field(prefix, "attention_mask", [[1] * len(one) for one in prompts])
    with open(os.path.join(folder, "rewards.py"), "w", encoding="utf-8") as file:
        file.write(REWARDS)
    return prefix


def train(stage, folder, data, reward="count", scored=False, **settings):
    """Train: lines of metrics.jsonl, weights by name, rollout of the last step, and if they are `scored` the log-probabilities
    of its answers by the engine."""
    from mindspeed_ms.core import comm
    from mindspeed_ms.tasks.posttrain import rollout
    from mindspeed_ms.tasks.posttrain.launcher import get_trainer
    from mindspeed_ms.training import metrics
    from mindspeed_ms.training.initialize import set_all_config

    runs.reset()
    training = {
        "training_iters": 3,
        "num_generations": 4,
        "max_new_tokens": 6,
        "reward_function": f"{os.path.dirname(data)}/rewards.py:{reward}",
        **settings.pop("training", {}),
    }
    dataset = {"batch_size": 4, "global_batch_size": 8, "eos_token_id": 31, "split": None, **settings.pop("dataset", {})}
    optimizer = {"weight_decay": 0.0, **settings.pop("optimizer", {})}
    model = {**SMALL, **settings.pop("model", {})}
    sections = {"training": training, "dataset": dataset, "optimizer": optimizer, "model": model, **settings}
    set_all_config(runs.configuration(stage, folder, data, **sections))
    run = get_trainer(stage)
    scores = []
    engine = _recording(rollout.Engine, scores) if scored else rollout.Engine
    with mock.patch.object(rollout, "Engine", engine), mock.patch.object(metrics, "draw_loss_curve"):  # half of a run's time
        run.train()
    comm.world_group().barrier()
    lines = [line for line in metrics.read_metrics(os.path.join(folder, "metrics.jsonl")) if "loss" in line]
    return {"lines": lines, "weights": runs.weights_of(run.trainer), "rollout": run.trainer.data.rollout, "scores": scores}


def _recording(engine, scores):
    """Class of an engine whose every generation leaves the log-probabilities of its answers in `scores`."""
    from dataclasses import replace

    class Recording(engine):
        def generate(self, prompts, params):
            answers = super().generate(prompts, [replace(one, logprobs=0) for one in params])
            scores[:] = [[score.logprob for score in answer.logprobs] for answer in answers]
            return answers

    return Recording
