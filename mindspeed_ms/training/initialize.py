"""Start-up of a training script: command line, and the arguments and configuration of this process (`get_args`)."""

from mindspeed_ms.config import argument_parser, init_configs_from_args
from mindspeed_ms.core.device import request_device
from mindspeed_ms.core.logging import setup_logging
from mindspeed_ms.training.user_errors import install

_args = None
_all_config = None


def initialize_megatron(extra_args_provider=None, args_defaults=None, ignore_unknown_args=False, argv=None):
    """Parse the command line and make it available through `get_args()`.

    Device, communication and seeds follow in `set_parallel_context` and `set_seed`, or in `pretrain`, so that a script
    may set its own MindSpore context in between.

    Args:
        extra_args_provider, args_defaults, ignore_unknown_args, argv: see `parse_args`.

    Returns:
        argparse.Namespace
    """
    setup_logging()
    install()
    args = parse_args(extra_args_provider, args_defaults, ignore_unknown_args, argv)
    request_device(getattr(args, "device", None))
    set_args(args)
    return args


def parse_args(extra_args_provider=None, args_defaults=None, ignore_unknown_args=False, argv=None):
    """Parse the command line.

    Args:
        extra_args_provider (Optional[Callable]): `(parser) -> parser` adds a script's own arguments.
        args_defaults (Optional[dict]): values of arguments that were not typed.
        ignore_unknown_args (bool): leave unknown arguments alone instead of ending with an error.
        argv (Optional[list[str]]): the arguments; None: the process's own.

    Returns:
        argparse.Namespace

    Raises:
        ValueError: `args_defaults` names an argument that does not exist.
    """
    parser = argument_parser(extra_args_provider)
    known = {action.dest for action in parser._actions}
    unknown = [name for name in args_defaults or {} if name not in known]
    if unknown:
        raise ValueError(f"args_defaults has {', '.join(unknown)}: no such argument of the command line.")
    parser.set_defaults(**(args_defaults or {}))
    return parser.parse_known_args(argv)[0] if ignore_unknown_args else parser.parse_args(argv)


def set_args(args):
    """Set the parsed command line (argparse.Namespace)."""
    global _args, _all_config
    _args = args
    _all_config = None


def get_args():
    """Parsed command line (argparse.Namespace).

    Raises:
        RuntimeError: `initialize_megatron` was not called.
    """
    if _args is None:
        raise RuntimeError(
            "there are no arguments yet: call initialize_megatron() first. A run that is configured by "
            "yaml alone has none; use its all_config."
        )
    return _args


def has_args():
    """Whether the command line was parsed."""
    return _args is not None


def set_all_config(all_config):
    """Set the configuration of this process."""
    global _all_config
    _all_config = all_config


def get_all_config():
    """Configuration of this process: that of `pretrain`, else the one that the arguments describe.

    Raises:
        RuntimeError: there is neither.
    """
    global _all_config
    if _all_config is None:
        if _args is None:
            raise RuntimeError("there is no configuration yet: pass all_config, or call initialize_megatron() first.")
        _all_config = init_configs_from_args(_args)
    return _all_config


def unset_global_variables():
    """Remove arguments and configuration."""
    set_args(None)
