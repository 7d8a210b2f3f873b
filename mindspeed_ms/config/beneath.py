"""Default yaml files of a command line: those of `--config`, or a script's own defaults unless a flag of the model is given."""

from mindspeed_ms.config.argument_table import TABLE, row_of_name
from mindspeed_ms.config.sections.field import option_of
from mindspeed_ms.config.yaml_loader import load_yaml

DEFAULT_CONFIGURATION = "the default configuration"


def documents_beneath(args):
    """Documents (list[Document]) of the yaml files below the arguments `args` (argparse.Namespace).

    `default_config` lies below a command line that names neither files nor a model: the values of such files have
    DEFAULT_CONFIGURATION as their place, since the user did not name them.
    """
    files = getattr(args, "config", None) or []
    if files:
        return [load_yaml(path) for path in ([files] if isinstance(files, str) else files)]
    defaults = getattr(args, "default_config", None) or []
    if not defaults or flags_of_a_model(args):
        return []
    documents = [load_yaml(path) for path in defaults]
    for document in documents:
        document.name = DEFAULT_CONFIGURATION
        document.places = dict.fromkeys(document.places, DEFAULT_CONFIGURATION)
    return documents


def flags_of_a_model(args):
    """Typed flags (list[str]) that say what the model is: with them the other settings of a model are Megatron's."""
    typed = getattr(args, "typed_flags", {})
    return [flag for name, flag in typed.items() if (row := row_of_name(name)) is not None and changes_the_model(row)]


def changes_the_model(row):
    """Whether an option changes a model's parameters or output."""
    if row.section != "model_config" or row.path.startswith(_later_parts()):
        return False
    option = option_of(row.info)
    return bool(option.checkpoint) or option.seen in ("parameters", "output")


def _later_parts():
    options = [(row.path, option_of(row.info)) for row in TABLE if row.path]
    return tuple(part for path, option in options if option.later for part in (path, *option.later_parts))
