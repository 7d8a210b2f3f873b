"""Registry of the stages of post-training: the trainer of each, imported on first use."""

import importlib

from mindspeed_ms.config.sections.posttrain import STAGES
from mindspeed_ms.spelling import did_you_mean

_PACKAGE = __name__.rpartition(".")[0]
# stage -> (module of this package, class), or a class of the user's own
_TRAINERS = {
    "sft": ("sft_trainer", "SFTTrainer"),
    "dpo": ("dpo_trainer", "DPOTrainer"),
    "simpo": ("simpo_trainer", "SimPOTrainer"),
    "orm": ("orm_trainer", "ORMTrainer"),
    "prm": ("prm_trainer", "PRMTrainer"),
    "trl_ppo": ("ppo_trainer", "PPOTrainer"),
    "grpo": ("grpo_trainer", "GRPOTrainer"),
}


class StageError(ValueError):
    """Error: no such stage of post-training, or none is given."""


def register_trainer(stage, trainer):
    """Let `AutoTrainer` use another class (a subclass of BaseTrainer) for a stage."""
    _check(stage)
    _TRAINERS[stage] = trainer


def trainer_class(stage):
    """Class of the trainer of a stage.

    Raises:
        StageError: no such stage; names near ones.
    """
    _check(stage)
    entry = _TRAINERS[stage]
    if isinstance(entry, tuple):
        return getattr(importlib.import_module(f"{_PACKAGE}.{entry[0]}"), entry[1])
    return entry


def _check(stage):
    if stage is None:
        raise StageError(f"stage (--stage) is not given: expected one of {', '.join(STAGES)}.")
    if stage not in _TRAINERS:
        raise StageError(f"stage (--stage) is {stage!r}: expected one of {', '.join(STAGES)}.{did_you_mean(stage, STAGES)}")
