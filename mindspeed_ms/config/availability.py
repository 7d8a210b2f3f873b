"""Features that are in the schema but do not run (`later=` or `refused=` of a field): refused at start and by a model."""

from dataclasses import replace

from mindspeed_ms.config.argument_table import rows_with_path
from mindspeed_ms.config.errors import ConfigError, Problem
from mindspeed_ms.config.resolve import settings_of_config
from mindspeed_ms.config.schema import all_fields
from mindspeed_ms.config.sections.field import default_of, option_of
from mindspeed_ms.config.settings import Setting

_MODEL_SECTIONS = ("parallel_config", "lora_config", "moe_config")
_OFF = (None, False, 0, "", "none", [])


def missing_features(all_config):
    """Features that `all_config` asks for and that do not run yet.

    A feature is asked for by its own setting, and by every setting and flag that only this feature reads, unless its own
    was switched off beside them.

    Args:
        all_config (AllConfig): configuration to run.

    Returns:
        dict[str, list[Setting]]: feature -> the settings that ask for it.
    """
    settings = all_config.settings or settings_of_config(all_config)
    asked, switched_off = {}, set()
    for path, info in all_fields():
        option = option_of(info)
        if not option.later or _value(all_config, path.split(".")[0]) is None:
            continue
        parts = [row.path for row in rows_with_path() if row.path != path and row.path.startswith(option.later_parts or "\0")]
        found = [part for part in parts if settings.was_set(part) and _value(all_config, part) not in _OFF]
        is_asked = _value(all_config, path) != default_of(info)
        if is_asked and (settings.was_set(path) or not (found or path in settings.by_path)):
            found.insert(0, path)
        elif settings.was_set(path) and not is_asked:
            switched_off.add(option.later)
        if found:
            asked[option.later] = [_setting(all_config, settings, part) for part in found]
    for feature, flags in settings.later.items():
        asked[feature] = [*asked.get(feature, ()), *flags]
    return {feature: found for feature, found in asked.items() if feature not in switched_off}


def _value(all_config, path):
    value = all_config
    for name in path.split("."):
        value = getattr(value, name) if value is not None else None
    return value


def _setting(all_config, settings, path):
    setting = settings.by_path.get(path, Setting(path, None, path, ""))
    return replace(setting, value=_value(all_config, path))


def require_model_available(model):
    """Called when a model is built, which may have a configuration that no reader checked.

    Args:
        model (TransformerConfig): with its parallel_config, lora_config and moe_config.

    Raises:
        ConfigError: every feature that is asked for and that this framework does not have, or not yet.
    """
    sections = {"model_config": model, **{name: getattr(model, name) for name in _MODEL_SECTIONS}}
    problems = []
    for path, info in all_fields():
        section, name = path.split(".")
        option, value = option_of(info), sections[section][name] if section in sections else default_of(info)
        if value == default_of(info):
            continue
        if option.later:
            problems.append(not_available_yet(option.later, [Setting(path, value, path, "")]))
        elif option.refused:
            problems.append(Problem(path, f"is not available: {option.refused[0]}", value))
    if problems:
        raise ConfigError(problems)


def not_available_yet(feature, asked):
    """The Problem with a feature that does not run yet, and with the settings (list[Setting]) that ask for it."""
    names = list(dict.fromkeys(setting.key for setting in asked))
    message = f"{feature} is not available yet; leave {'it' if len(names) == 1 else 'them'} out"
    return Problem(", ".join(names), message, *[asked[0].value] * (len(names) == 1), place=asked[0].place)


def require_available(all_config):
    """Raise an error if the configuration asks for features that do not run yet; called when a run starts, not by checks.

    Args:
        all_config (AllConfig): configuration to run.

    Raises:
        ConfigError: every feature that is asked for and does not run yet.
    """
    problems = [not_available_yet(*found) for found in missing_features(all_config).items()]
    if all_config.training_config.use_checkpoint_args and all_config.settings is None:
        message = "comes too late for a model_config that was made by hand; use init_configs_from_yaml, _dict or _args"
        problems.append(Problem("training_config.use_checkpoint_args", message, True))
    if all_config.model_config is None:
        problems.append(Problem("model_config", "is missing: give the model's size"))
    if problems:
        raise ConfigError(problems)
