"""Required settings of a training: its length, and those that Megatron has no default for."""

from mindspeed_ms.config.availability import require_available
from mindspeed_ms.config.errors import ConfigError, Problem
from mindspeed_ms.config.settings import COMMAND_LINE, LENGTHS, missing_flags


def start_problems(all_config):
    """Problems (list[Problem]) that stop a start of a configuration which is valid otherwise."""
    training, dataset, settings = all_config.training_config, all_config.dataset_config, all_config.settings
    if settings is not None and settings.starts_from_megatron and missing_flags(settings):
        return [Problem(", ".join(missing_flags(settings)), "must be given: Megatron has no default", place=COMMAND_LINE)]
    if training.training_iters or dataset.train_samples or training.epochs:
        return []
    message = (
        "there is nothing to train: training_iters is 0 and neither train_samples nor epochs is set. Set training_iters "
        "(--train-iters), train_samples (--train-samples) or epochs (--epochs)"
    )
    problem = Problem(LENGTHS[0], message, training.training_iters)
    return [settings.locate(problem) if settings is not None else problem]


def require_pretraining(all_config):
    """Raise ConfigError if the configuration names a stage of post-training."""
    stage, settings = all_config.training_config.stage, all_config.settings
    if stage is not None:
        problem = Problem("training_config.stage", "is a stage of post-training, which posttrain_gpt.py trains", stage)
        raise ConfigError([settings.locate(problem) if settings is not None else problem])


def require_startable(all_config):
    """Raise an error if a start of a training would fail; called before anything is built, not by checks.

    Raises:
        ConfigError: a feature that does not run yet (`require_available`), or what a start needs and is not there.
    """
    require_available(all_config)
    problems = start_problems(all_config)
    if problems:
        raise ConfigError(problems)
