"""Features that are in the schema but do not run yet (`later=` of a field): refused when a run starts."""

from mindspeed_ms.config.errors import ConfigError, Problem
from mindspeed_ms.config.schema import all_fields
from mindspeed_ms.config.sections.field import default_of, option_of


def later_paths():
    """Config paths that ask for a feature which does not run yet, and beginnings of the paths that belong to it."""
    options = [(path, option_of(info)) for path, info in all_fields()]
    return tuple(part for path, option in options if option.later for part in (path, *option.later_parts))


def missing_features(all_config):
    """Features that `all_config` asks for and that do not run yet: list of (path, feature, value)."""
    found = []
    for path, info in all_fields():
        section, name = path.split(".")
        holder = getattr(all_config, section)
        asked = option_of(info).later and holder is not None and holder[name] != default_of(info)
        if asked and not _only_megatron_s_default(path, all_config.settings):
            found.append((path, option_of(info).later, holder[name]))
    return found


def _only_megatron_s_default(path, settings):
    return settings is not None and path in settings.by_path and not settings.was_set(path)


def require_available(all_config):
    """Raise an error if the configuration asks for features that do not run yet; called when a run starts, not by checks.

    Args:
        all_config (AllConfig): configuration to run.

    Raises:
        ConfigError: every feature that is asked for and does not run yet.
    """
    problems = [
        Problem(path, f"{feature} is not available yet; leave it at its default", value)
        for path, feature, value in missing_features(all_config)
    ]
    if all_config.training_config.use_checkpoint_args and all_config.settings is None:
        message = "comes too late for a model_config that was made by hand; use init_configs_from_yaml, _dict or _args"
        problems.append(Problem("training_config.use_checkpoint_args", message, True))
    if all_config.model_config is None:
        problems.append(Problem("model_config", "is missing: give the model's size"))
    if problems:
        raise ConfigError(problems)
