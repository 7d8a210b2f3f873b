"""The command line in Megatron's words."""

from mindspeed_ms.config import argument_parser


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
