"""Rewards of generated answers by a reward model (a checkpoint of stage orm), in the layout of the training."""

import numpy as np

from mindspeed_ms.config import ConfigError, argument_parser, init_configs_from_args, require_available, spelled
from mindspeed_ms.core import comm
from mindspeed_ms.core.dist_checkpointing.load import load_tensors, open_checkpoint
from mindspeed_ms.core.dist_checkpointing.state import model_tensors
from mindspeed_ms.core.logging import logger
from mindspeed_ms.core.tensor_parallel.cell import allocate_parameters
from mindspeed_ms.inference.checkpoint import find_checkpoint, stored_vocabulary
from mindspeed_ms.inference.loading import build_chunks
from mindspeed_ms.models.adapter_files import with_adapters
from mindspeed_ms.models.adapters import MergedReader
from mindspeed_ms.models.reward_head import has_reward_head
from mindspeed_ms.tasks.posttrain.rewards import RewardError
from mindspeed_ms.tasks.posttrain.rollout_forward import forward_only

_DTYPES = {"bfloat16": ["--bf16"], "float16": ["--fp16"]}


def check_reward_model(all_config):
    """(folder, Manifest, adapters, AllConfig) of the checkpoint `reward_model`, before anything is built.

    Raises:
        RewardError: no reward model, or one of a smaller vocabulary.
        CheckpointError, ConfigError: no checkpoint; a model that does not fit the layout.
    """
    folder, option = all_config.training_config.reward_model, spelled(all_config, "training_config.reward_model")
    place, manifest, adapters = with_adapters(*find_checkpoint(folder, None), None)
    stage = (manifest.args.get("training_config") or {}).get("stage")
    if stage not in (None, "orm") or not has_reward_head(manifest):
        raise RewardError(f"{option} is {folder}, which holds no reward model: train one with --stage orm.")
    config = _configuration(all_config, place, manifest)
    rows, wanted = stored_vocabulary(config, manifest), all_config.model_config.vocab_size
    if rows < wanted and (manifest.vocab_size or rows) < (all_config.dataset_config.vocab_size or wanted):
        raise RewardError(
            f"{option} is {folder}, whose vocabulary has {rows} ids, and the policy's {wanted}: expected the same."
        )
    return place, manifest, adapters, config


def _configuration(all_config, place, manifest):
    parallel, saved = all_config.parallel_config, manifest.args["model_config"]
    words = ["--stage", "orm", "--use-checkpoint-args", "--load", place, "--finetune", "--train-iters", 1, "--lr", 1]
    words += ["--seq-length", all_config.model_config.seq_length, "--micro-batch-size", 1]
    words += ["--tensor-model-parallel-size", parallel.tensor_model_parallel_size]
    words += ["--pipeline-model-parallel-size", parallel.pipeline_model_parallel_size]
    if parallel.num_layers_per_virtual_pipeline_stage:
        words += ["--num-layers-per-virtual-pipeline-stage", parallel.num_layers_per_virtual_pipeline_stage]
    if (manifest.args.get("moe_config") or {}).get("num_experts", 1) > 1:
        words += ["--expert-model-parallel-size", parallel.expert_model_parallel_size]
    words += _DTYPES.get(saved.get("compute_dtype") or saved.get("params_dtype"), [])
    try:
        config = init_configs_from_args(argument_parser().parse_args([str(word) for word in words]))
        require_available(config)
    except ConfigError as error:
        raise ConfigError(error.problems[0]) from None
    return config


class RewardModel:
    """A reward model: the value at the last token of prompt and answer is the reward. Each rank holds its part of it.

    Args:
        all_config (AllConfig): of the training.
        checked (tuple): what `check_reward_model` gives.
    """

    def __init__(self, all_config, checked):
        place, manifest, adapters, self.config = checked
        self.chunks = build_chunks(self.config, allocate_parameters)
        opened = open_checkpoint(place, self.config) if adapters is None else MergedReader(place, manifest, adapters)
        with opened as reader:
            load_tensors(reader, list(model_tensors(self.chunks)), vocab_size=stored_vocabulary(self.config, manifest))
        self.name = all_config.training_config.reward_model
        if comm.get_rank() == 0:
            logger.info("rewards by the model %s", place)

    def scores(self, rollout, places):
        """Rewards float32 `[n]` of the answers of a rollout; on all ranks, the same.

        Raises:
            RewardError: one is not finite; `places` names the records.
        """
        (values,) = forward_only(self.chunks, _forward, rollout, 1)
        mask = rollout["loss_mask"]
        last = mask.shape[1] - mask[:, ::-1].argmax(1)  # the token that the last label is
        found = values[np.arange(len(mask)), last]
        wrong = np.flatnonzero(~np.isfinite(found))
        if wrong.size:
            raise RewardError(
                f"{self.name} gave {found[wrong[0]]} for an answer to {places[wrong[0]]}: its weights are damaged."
            )
        return found


def _forward(batch, model):
    return model(batch["tokens"], batch["position_ids"], None)
