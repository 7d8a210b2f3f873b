"""Training runs of a very small GPT with saving and resuming; everything runs in a rank of a forked world."""

import json
import logging
import os

import numpy as np

from mindspeed_ms.core.logging import logger
from mindspeed_ms.testing import small_trainings as job

GLOBAL_BATCH = 12
STEPS = 4
DIST = {"use_distributed_optimizer": True}
MODELS = {"tied": {**job.TIED, "num_layers": 4}, "untied": {**job.UNTIED, "num_layers": 4}}
MODELS |= {"experts": MODELS["untied"], "grouped experts": MODELS["untied"]}
MODELS["further tokens"] = {**MODELS["untied"], "mtp_num_layers": 2}
_EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,
    "first_k_dense_replace": 1,
}
MIXTURES = {"experts": _EXPERTS, "grouped experts": {**_EXPERTS, "moe_grouped_gemm": True}, "further tokens": _EXPERTS}


class Rows:
    """Text rows by index; notes which rows were read."""

    def __init__(self, rows=STEPS * GLOBAL_BATCH):
        data = job.batches(1, rows=rows, seed=3)
        self.data = {name: values[0] for name, values in data.items()}
        self.read = []

    def __len__(self):
        return len(self.data["tokens"])

    def __getitem__(self, index):
        self.read.append(int(index))
        return {name: values[index] for name, values in self.data.items()}


class Messages(logging.Handler):
    """Context manager that notes the package's log messages."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())

    def __enter__(self):
        logger.addHandler(self)
        return self.texts

    def __exit__(self, *exception):
        logger.removeHandler(self)


def make_config(folder, model="tied", parallel=None, training=None, dataset=None, optimizer=None, sizes=None, lora=None):
    """AllConfig: micro-batch 1, saves at step 2 and at the end. Adam's epsilon hides the rounding noise of gradients that
    are truly zero."""
    from mindspeed_ms.config import init_configs_from_dict

    length = {} if "train_samples" in (dataset or {}) else {"training_iters": STEPS}
    return init_configs_from_dict(
        {
            "model_config": {**MODELS[model], **(sizes or {})},
            "moe_config": MIXTURES.get(model, {}),
            "parallel_config": parallel or {},
            "training_config": {
                "output_dir": str(folder),
                "save_interval": 2,
                "keep_checkpoint_max": None,
                "seed": 7,
                **length,
                **(training or {}),
            },
            "dataset_config": {"batch_size": 1, "global_batch_size": GLOBAL_BATCH, **(dataset or {})},
            "optimizer_config": {
                "learning_rate": 0.01,
                "lr_decay_style": "linear",
                "weight_decay": 0.1,
                "clip_grad": 1.0,
                "eps": 1e-3,
                **(optimizer or {}),
            },
            "lora_config": lora or {},
        }
    )


def train(folder, rows=None, look=None, **settings):
    """Train; returns a dict of `losses`, `norms`, `lr` by iteration, `rows` that were read, `weights`, `log`, and what
    `look(Trainer)` gives."""
    from mindspeed_ms.core import comm, parallel_state
    from mindspeed_ms.core import num_microbatches_calculator as calculator
    from mindspeed_ms.core.tensor_parallel.cell import global_name
    from mindspeed_ms.legacy.model.gpt_model import GPTModel
    from mindspeed_ms.training.checkpointing import whole_parameters
    from mindspeed_ms.training.training import pretrain
    from mindspeed_ms.training.utils import set_parallel_context, set_seed

    parallel_state.destroy_model_parallel()
    calculator.destroy_num_microbatches_calculator()
    all_config = make_config(folder, **settings)
    set_parallel_context(all_config.parallel_config)
    set_seed(all_config.training_config.seed)
    rows = rows if rows is not None else Rows()

    def model_provider(pre_process=True, post_process=True):
        return GPTModel(all_config.model_config, pre_process=pre_process, post_process=post_process)

    with Messages() as texts:
        run = pretrain(lambda numbers: (rows, None, None), model_provider, None, all_config=all_config)
    comm.world_group().barrier()
    lines = []
    if os.path.exists(os.path.join(folder, "metrics.jsonl")):
        with open(os.path.join(folder, "metrics.jsonl"), encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
    with whole_parameters(run.model):
        weights = {
            global_name(name, param): (param.sharding, np.array(param.asnumpy()))
            for chunk in run.model
            for name, param in chunk.module.parameters_and_names()
        }
    return {
        "losses": {line["iteration"]: line["loss"] for line in lines if "loss" in line},
        "norms": {line["iteration"]: line["grad_norm"] for line in lines if "loss" in line},
        "lr": {line["iteration"]: line["learning_rate"] for line in lines if "loss" in line},
        "rows": rows.read,
        "look": look(run) if look is not None else None,
        "weights": weights,
        "log": texts,
        "scale": run.optimizer.get_loss_scale(),
        "iteration": run.train_state.iteration,
    }
