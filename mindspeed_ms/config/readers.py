"""Readers: nested yaml, the 38BV3 yaml trio, dicts and Megatron arguments to an AllConfig."""

import argparse

from mindspeed_ms.config.arguments import settings_of_arguments
from mindspeed_ms.config.beneath import documents_beneath
from mindspeed_ms.config.errors import ConfigError, Problem
from mindspeed_ms.config.from_checkpoint import ask_checkpoint, ask_vocabulary
from mindspeed_ms.config.from_tokenizer import ask_tokenizer
from mindspeed_ms.config.resolve import check, complete, environment_world_size
from mindspeed_ms.config.schema import SECTIONS
from mindspeed_ms.config.settings import Settings, build, nested_settings
from mindspeed_ms.config.trio import is_trio, trio_settings
from mindspeed_ms.config.yaml_loader import Document, load_yaml


def init_configs_from_yaml(file_path, config_classes=None, **kwargs):
    """Read one or several yaml files: nested sections, the 38BV3 trio, or both.

    Args:
        file_path (str | list[str]): yaml file or files; a later file wins, key by key.
        config_classes (list | None): classes to return instead of an AllConfig.
        kwargs: replace or extend top-level keys of the (first) file.

    Returns:
        AllConfig, or the list of instances of `config_classes` in their order.

    Raises:
        ConfigError: all problems together, each with file, line, key path, value and expected value.
        FileNotFoundError: if a file does not exist.
    """
    paths = list(file_path) if isinstance(file_path, (list, tuple)) else [file_path]
    if not paths:
        raise ConfigError(Problem("file_path", "expects at least one yaml file", file_path))
    documents = [load_yaml(path) for path in paths]
    for name, value in kwargs.items():
        documents[0].data[name] = value
    return _finish(settings_of_documents(documents), config_classes)


def init_configs_from_dict(raw_dict, config_classes=None):
    """Read a nested dict `{section: {field: value}}` (or a dict of the 38BV3 form); it is not changed.

    Args, returns and errors as `init_configs_from_yaml`.
    """
    if not isinstance(raw_dict, dict):
        raise ConfigError(Problem("raw_dict", "expects a mapping of sections", raw_dict))
    return _finish(settings_of_documents([Document("", raw_dict)]), config_classes)


def init_configs_from_args(args, config_classes=None):
    """Read Megatron arguments, and the yaml files of `--config` below them (see `beneath`).

    Args:
        args (argparse.Namespace): of `mindspeed_ms.config.argument_parser` or of Megatron's own;
            not changed. Names it lacks count as not given.
        config_classes (list | None): classes to return instead of an AllConfig.

    Returns:
        AllConfig, or the list of instances of `config_classes` in their order.

    Raises:
        ConfigError: all problems together, each with flag, value and expected value.
    """
    if not isinstance(args, argparse.Namespace):
        raise ConfigError(Problem("args", "expects an argparse.Namespace", args))
    documents = documents_beneath(args)
    settings = settings_of_arguments(args, settings_of_documents(documents) if documents else None)
    world_size = environment_world_size()
    if world_size and settings.value("parallel_config.world_size") is None:
        settings.add("parallel_config.world_size", world_size, place="launcher")
    return _finish(settings, config_classes)


def settings_of_documents(documents):
    """Settings of several documents laid over each other, the last one on top."""
    settings = Settings()
    for document in documents:
        if not document.data and document.name:
            settings.notices.append(f"{document.name}: holds no settings")
        if is_trio(document.data):
            settings.update(trio_settings(document))
        else:
            settings.update(nested_settings(document.data, document.places, document.name))
    return settings


def _finish(settings, config_classes):
    wanted = [] if config_classes is None else list(config_classes)
    names = [getattr(kind, "config_name", None) for kind in wanted]
    unknown = [kind for kind, name in zip(wanted, names) if name not in SECTIONS]
    if unknown:
        raise ConfigError(Problem("config_classes", f"expects classes of {', '.join(SECTIONS)}", unknown))
    # not in complete: a launch script is converted without the files that it names
    checkpoint = ask_checkpoint(settings)
    ask_tokenizer(settings)
    ask_vocabulary(settings, checkpoint)
    complete(settings)
    result = build(settings, required=names)
    check(result, settings)
    return result if config_classes is None else [getattr(result, name) for name in names]
