"""What is set once per process and asked for from everywhere: arguments, configuration, TensorBoard writer."""

_args = None
_all_config = None
_tensorboard_writer = None


def set_args(args):
    """Set the parsed command line (argparse.Namespace)."""
    global _args, _all_config
    _args = args
    _all_config = None


def get_args():
    """The parsed command line.

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
    """Make a configuration the one that this process trains with."""
    global _all_config
    _all_config = all_config


def get_all_config():
    """The configuration of this process: the one that `pretrain` was given, else the one that the arguments describe.

    Raises:
        RuntimeError: there is neither.
    """
    global _all_config
    if _all_config is None:
        if _args is None:
            raise RuntimeError("there is no configuration yet: pass all_config, or call initialize_megatron() first.")
        from mindspeed_ms.config import init_configs_from_args

        _all_config = init_configs_from_args(_args)
    return _all_config


def set_tensorboard_writer(writer):
    """Set the writer of this rank (None: it writes no event files)."""
    global _tensorboard_writer
    _tensorboard_writer = writer


def get_tensorboard_writer():
    """The TensorBoard writer, or None on ranks that have none."""
    return _tensorboard_writer


def unset_global_variables():
    """Forget everything."""
    global _args, _all_config, _tensorboard_writer
    _args = _all_config = _tensorboard_writer = None
