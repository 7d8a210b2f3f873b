"""Head of a reward model or a critic in a checkpoint: whether it is there, what is left without it, and what of a language
model a reward model starts from."""

import copy

from mindspeed_ms.core.dist_checkpointing.manifest import OPTIMIZER_PREFIX
from mindspeed_ms.layout.describers.gpt import OUTPUT_LAYER, REWARD_HEAD


def is_reward_head(key):
    """Whether a key of the state dictionary is of the head of a reward model."""
    return key.startswith(f"{REWARD_HEAD}.")


def has_reward_head(manifest):
    """Whether a checkpoint holds a reward model."""
    return any(is_reward_head(key) for key in manifest.tensors)


def without_language_head(manifest):
    """The Manifest without the weight of the vocabulary's head and the optimizer's state."""
    kept = copy.copy(manifest)
    kept.tensors = {
        key: stored
        for key, stored in manifest.tensors.items()
        if key != OUTPUT_LAYER and not (key.startswith(OPTIMIZER_PREFIX) and key.endswith(OUTPUT_LAYER))
    }
    return kept


def without_critic(manifest):
    """The Manifest of a policy (stage trl_ppo) without its critic's head, and without the optimizer's state; others as they
    are."""
    stage = ((manifest.args or {}).get("training_config") or {}).get("stage")
    if stage != "trl_ppo" or not has_reward_head(manifest):
        return manifest
    kept = copy.copy(manifest)
    kept.tensors = {
        key: stored
        for key, stored in manifest.tensors.items()
        if not is_reward_head(key) and not key.startswith(OPTIMIZER_PREFIX)
    }
    kept.states = {**manifest.states, "optimizer": None, "opt_param_scheduler": None}
    return kept
