"""Head of a reward model in a checkpoint: whether it is there, and what is left of a language model that a reward model starts
from."""

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
