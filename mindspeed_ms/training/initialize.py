"""Start-up of a training script."""

from mindspeed_ms.core.device import request_device
from mindspeed_ms.core.logging import setup_logging
from mindspeed_ms.training.arguments import parse_args
from mindspeed_ms.training.global_vars import set_args

__all__ = ["initialize_megatron"]


def initialize_megatron(extra_args_provider=None, args_defaults=None, ignore_unknown_args=False, argv=None):
    """Parse the command line and make it available through `get_args()`.

    Device, communication and seeds follow in `set_parallel_context` and `set_seed`, or in `pretrain`, so that a script
    may set its own MindSpore context in between.

    Args:
        extra_args_provider (Optional[Callable]): `(parser) -> parser` adds a script's own arguments.
        args_defaults (Optional[dict]): values of arguments that were not typed.
        ignore_unknown_args (bool): leave unknown arguments alone.
        argv (Optional[list[str]]): the arguments; None: the process's own.

    Returns:
        argparse.Namespace
    """
    setup_logging()
    args = parse_args(extra_args_provider, args_defaults, ignore_unknown_args, argv)
    request_device(getattr(args, "device", None))
    set_args(args)
    return args
