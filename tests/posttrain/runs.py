"""Runs of post-training on a small model and small data; everything here runs in a rank of a forked world."""

import os
from unittest import mock

import numpy as np

from mindspeed_ms.testing.small_trainings import TIED, UNTIED
from tests.datasets.instruction_data import write_field

LENGTH, VOCABULARY = 16, 64
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_grouped_gemm": True}
BASES = {"TIED": TIED, "UNTIED": UNTIED}


def write_conversations(prefix, count=16, seed=0, masked=()):
    """`count` samples of different lengths; those in `masked` have no label."""
    random, fields = np.random.RandomState(seed), {"input_ids": [], "labels": [], "attention_mask": []}
    for number in range(count):
        source, target = random.randint(2, 6), random.randint(1, LENGTH - 6)
        ids = random.randint(1, VOCABULARY, source + target).tolist()
        fields["input_ids"].append(ids)
        fields["labels"].append([-100] * len(ids) if number in masked else [-100] * source + ids[source:])
        fields["attention_mask"].append([1] * len(ids))
    return _write(prefix, fields)


def write_pairs(prefix, count=16, seed=0, vocabulary=VOCABULARY):
    """`count` pairs of different lengths."""
    random, fields = np.random.RandomState(seed), {}
    for _ in range(count):
        prompt = random.randint(1, vocabulary, random.randint(2, 6)).tolist()
        for kind in ("chosen", "rejected"):
            answer = random.randint(1, vocabulary, random.randint(2, LENGTH - 6)).tolist()
            fields.setdefault(f"{kind}_input_ids", []).append(prompt + answer)
            fields.setdefault(f"{kind}_labels", []).append([-100] * len(prompt) + answer)
    return _write(prefix, fields)


PLACEHOLDER, GOOD, BAD = 5, 7, 40  # the labels are on different tensor-parallel ranks


def write_steps(prefix, count=16, seed=0):
    """`count` texts of some steps, each of which ends with the placeholder."""
    random, fields = np.random.RandomState(seed), {"input_ids": [], "labels": [], "attention_mask": []}
    for _ in range(count):
        ids, labels = [], []
        for _ in range(random.randint(1, 4)):
            step = random.randint(10, 40, random.randint(1, 4)).tolist()
            ids += [*step, PLACEHOLDER]
            labels += [-100] * len(step) + [int(random.choice([GOOD, BAD]))]
        fields["input_ids"].append(ids)
        fields["labels"].append(labels)
        fields["attention_mask"].append([1] * len(ids))
    return _write(prefix, fields)


def _write(prefix, fields):
    os.makedirs(os.path.dirname(prefix), exist_ok=True)
    for field, sequences in fields.items():
        write_field(prefix, field, sequences)
    return str(prefix)


def configuration(stage, folder, data, parallel=None, base="UNTIED", **sections):
    """AllConfig of a run: global batch 4, sections as keywords (training, dataset, optimizer, model, lora, moe)."""
    from mindspeed_ms.config import init_configs_from_dict

    return init_configs_from_dict(
        {
            "model_config": {**BASES[base], **sections.get("model", {})},
            "parallel_config": parallel or {},
            "moe_config": sections.get("moe", {}),
            "dataset_config": {
                "batch_size": 2,
                "global_batch_size": 4,
                "data_path": [data],
                "split": "1,0,0",
                "pad_token_id": 0,
                **sections.get("dataset", {}),
            },
            "training_config": {
                "seed": 7,
                "training_iters": 3,
                "output_dir": os.fspath(folder),
                "save_enabled": False,
                "eval_iters": 0,
                "stage": stage,
                **sections.get("training", {}),
            },
            "optimizer_config": {
                "learning_rate": 0.01,
                "weight_decay": 0.1,
                "clip_grad": 1.0,
                "eps": 1e-3,
                **sections.get("optimizer", {}),
            },
            "lora_config": sections.get("lora", {}),
        }
    )


def reset():
    """Forget the groups and batch sizes of the call before."""
    from mindspeed_ms.core import num_microbatches_calculator as calculator
    from mindspeed_ms.core import parallel_state

    parallel_state.destroy_model_parallel()
    calculator.destroy_num_microbatches_calculator()


def train(stage, folder, data, trainer=None, caught=False, **settings):
    """Train a stage: metrics.jsonl's lines, the weights of this rank by name, which of them changed, order of the samples.

    Args:
        trainer (Optional[Callable]): gives the class to use.
        caught (bool): a training that learns nothing is no error.
    """
    from mindspeed_ms.core import comm
    from mindspeed_ms.tasks.posttrain.launcher import get_trainer
    from mindspeed_ms.training import metrics
    from mindspeed_ms.training.initialize import set_all_config
    from mindspeed_ms.training.train_step import NothingLearntError

    reset()
    set_all_config(configuration(stage, folder, data, **settings))
    run = get_trainer(stage) if trainer is None else trainer()()
    before = weights_of(run.trainer)
    try:
        with mock.patch.object(metrics, "draw_loss_curve"):  # half of a run's time
            run.train()
    except NothingLearntError:
        if not caught:
            raise
    comm.world_group().barrier()
    weights = weights_of(run.trainer)
    path = os.path.join(folder, "metrics.jsonl")
    lines = [line for line in metrics.read_metrics(path) if "loss" in line]
    dataset = run.train_valid_test_datasets_provider.datasets[0]
    return {
        "lines": lines,
        "weights": weights,
        "changed": sorted(name for name, (_, values) in weights.items() if (values != before[name][1]).any()),
        "tied": settings.get("base") == "TIED",
        "order": [dataset.stored_index(number) for number in range(len(dataset))],
    }


def weights_of(run):
    """(sharding, copy of the values) of this rank's parameters by name."""
    from mindspeed_ms.training.checkpointing import whole_parameters

    with whole_parameters(run.model):
        return {
            name: (param.sharding, param.asnumpy().copy())
            for chunk in run.model
            for name, param in chunk.module.parameters_and_names()
        }


def logits_of(folder, data, numbers, stage="sft", base="UNTIED", load=None, **settings):
    """Logits float64 `[n, s, v]` of stored samples in the weights that a run of stage sft starts from (or values, of stage
    orm), with the batch of them."""
    from mindspore import Tensor

    from mindspeed_ms.core.datasets.instruction_builder import build_instruction_datasets
    from mindspeed_ms.core.dist_checkpointing.load import find_checkpoint, open_checkpoint
    from mindspeed_ms.legacy.model.gpt_model import GPTModel
    from mindspeed_ms.testing.parity.runner import start
    from mindspeed_ms.training.checkpointing import load_checkpoint
    from mindspeed_ms.training.model_setup import get_model

    reset()
    all_config = configuration(stage, folder, data, base=base, **settings)
    start(all_config, all_config.training_config.seed)
    model = get_model(lambda pre_process, post_process: GPTModel(all_config.model_config, parallel_output=False), all_config)[0]
    model.set_train(False)
    if load is not None:
        path = find_checkpoint(load)
        with open_checkpoint(path, all_config) as reader:
            load_checkpoint(reader, [model], strict=False)
    batch = build_instruction_datasets(all_config, (len(numbers), 0, 0))[0].stored_batch(numbers)

    def forward(tokens):
        return model(Tensor(tokens), Tensor(batch["position_ids"]), None).asnumpy().astype(np.float64)

    if "tokens" in batch:
        return forward(batch["tokens"]), batch
    return {kind: forward(batch[f"{kind}_tokens"]) for kind in ("chosen", "rejected")}, batch


def log_probabilities(logits, labels):
    """Of the labels: float64 `[n, s]`."""
    shifted = logits - logits.max(-1, keepdims=True)
    normal = np.log(np.exp(shifted).sum(-1, keepdims=True))
    return np.take_along_axis(shifted - normal, labels[..., None].astype(np.int64), -1)[..., 0]


def curve(result, name="loss"):
    """Values of a name by step."""
    return [line[name] for line in result["lines"]]


def with_curves(result):
    """A result with the curves that `small_trainings.assert_equal_trainings` compares."""
    return {**result, "loss": curve(result), "grad_norm": curve(result, "grad_norm")}


def sft_trainer():
    """Class of stage sft."""
    from mindspeed_ms.tasks.posttrain.sft_trainer import SFTTrainer

    return SFTTrainer


def train_without_model(stage, folder, data, **settings):
    """`train`, where a model that is built is an error."""
    from mindspeed_ms.legacy.model import gpt_model
    from mindspeed_ms.tasks.posttrain import base_trainer

    def build(*_, **__):
        raise AssertionError("a model was built")

    base_trainer.GPTModel, before = build, gpt_model.GPTModel
    try:
        return train(stage, folder, data, **settings)
    finally:
        base_trainer.GPTModel = before
