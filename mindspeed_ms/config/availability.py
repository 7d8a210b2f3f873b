"""Features that are in the schema but do not run (`later=` or `refused=` of a field): refused at start and by a model."""

from mindspeed_ms.config.errors import ConfigError, Problem
from mindspeed_ms.config.schema import SECTIONS, all_fields
from mindspeed_ms.config.sections.field import default_of, option_of

_MODEL_SECTIONS = ("parallel_config", "lora_config", "moe_config")


def missing_features(all_config):
    """Features that `all_config` asks for and that do not run yet: list of (path, feature, value)."""
    return [
        (path, option.later, value)
        for path, option, value in _asked({name: getattr(all_config, name) for name in SECTIONS})
        if option.later and not _only_megatron_s_default(path, all_config.settings)
    ]


def _asked(sections):
    """(path, option, value) of every setting that is not at its default, of the fields with `later=` or `refused=`."""
    for path, info in all_fields():
        section, name = path.split(".")
        holder, option = sections.get(section), option_of(info)
        if holder is not None and (option.later or option.refused) and holder[name] != default_of(info):
            yield path, option, holder[name]


def _only_megatron_s_default(path, settings):
    return settings is not None and path in settings.by_path and not settings.was_set(path)


def require_model_available(model):
    """Called when a model is built, which may have a configuration that no reader checked.

    Args:
        model (TransformerConfig): with its parallel_config, lora_config and moe_config.

    Raises:
        ConfigError: every feature that is asked for and that this framework does not have, or not yet.
    """
    sections = {"model_config": model, **{name: getattr(model, name) for name in _MODEL_SECTIONS}}
    problems = [
        _unavailable(path, option.later, value)
        if option.later
        else Problem(path, f"is not available: {option.refused[0]}", value)
        for path, option, value in _asked(sections)
        if value is not None
    ]
    if problems:
        raise ConfigError(problems)


def _unavailable(path, feature, value):
    return Problem(path, f"{feature} is not available yet; leave it at its default", value)


def require_available(all_config):
    """Raise an error if the configuration asks for features that do not run yet; called when a run starts, not by checks.

    Args:
        all_config (AllConfig): configuration to run.

    Raises:
        ConfigError: every feature that is asked for and does not run yet.
    """
    problems = [_unavailable(*found) for found in missing_features(all_config)]
    if all_config.training_config.use_checkpoint_args and all_config.settings is None:
        message = "comes too late for a model_config that was made by hand; use init_configs_from_yaml, _dict or _args"
        problems.append(Problem("training_config.use_checkpoint_args", message, True))
    if all_config.model_config is None:
        problems.append(Problem("model_config", "is missing: give the model's size"))
    if problems:
        raise ConfigError(problems)
