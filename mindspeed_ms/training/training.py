"""Pretraining (`pretrain`): configuration to trained model. Names and order: Megatron's training.py, upstream, the guide."""

import time
from contextlib import contextmanager
from dataclasses import fields
from functools import partial

from mindspeed_ms.config import fit_to_world, page, require_available, require_pretraining, require_startable
from mindspeed_ms.config.errors import WarningNotice
from mindspeed_ms.core import comm
from mindspeed_ms.core.device import request_device
from mindspeed_ms.core.launch_environment import launch_environment
from mindspeed_ms.core.logging import logger, setup_logging
from mindspeed_ms.training import initialize, user_errors
from mindspeed_ms.training.checkpoint_manager import CheckpointManager, find_starting_point
from mindspeed_ms.training.checkpointing import release_output_folders
from mindspeed_ms.training.data import build_data, init_batch_sizes
from mindspeed_ms.training.evaluation import Evaluation, evaluate
from mindspeed_ms.training.forward_step import forward_step as default_forward_step
from mindspeed_ms.training.gpt_datasets import fingerprint_of_own_program
from mindspeed_ms.training.metrics import MetricsLogger
from mindspeed_ms.training.model_setup import get_model, get_optimizer, get_optimizer_param_scheduler
from mindspeed_ms.training.tensorboard import require_tensorboard
from mindspeed_ms.training.timers import get_timers
from mindspeed_ms.training.train_step import TrainOneStep
from mindspeed_ms.training.trainer import Trainer, TrainState
from mindspeed_ms.training.utils import set_parallel_context, set_seed_unless_set

__all__ = ["Trainer", "build_trainer", "evaluate", "get_model", "pretrain", "start_up", "training_run"]


def pretrain(
    train_valid_test_datasets_provider,
    model_provider_func,
    model_type,
    forward_step_func=None,
    process_non_loss_data_func=None,
    extra_args_provider=None,
    args_defaults=None,
    all_config=None,
    train_data_loader=None,
    get_batch_func=None,
    valid_data_loader=None,
    test_data_loader=None,
):
    """Train a model.

    Args:
        train_valid_test_datasets_provider (Optional[Callable]): `((train, valid, test) numbers of samples) -> three
            datasets`, each None or with `__len__` and `__getitem__` (dicts of arrays).
        model_provider_func (Callable): `(pre_process, post_process) -> nn.Cell`.
        model_type: Megatron's ModelType; None and `encoder_or_decoder` are the decoder models that exist here.
        forward_step_func (Optional[Callable]): `(data_iterator, model) -> (output, loss_func)` as in Megatron; None:
            the model returns its loss and is called with the entries of the batch, `model(**micro_batch)`.
        process_non_loss_data_func (Optional[Callable]): `(data, iteration, writer)`, called on the last rank after each
            evaluation with what the loss function returns for `non_loss_data=True` (default: the model's output).
        extra_args_provider (Optional[Callable]): `(parser) -> parser` with the script's own arguments, if the command
            line was not parsed before.
        args_defaults (Optional[dict]): defaults of arguments, if the command line was not parsed before.
        all_config (Optional[AllConfig]): the configuration; None: that of the command line.
        train_data_loader: batches: an iterable of dicts, a MindSpore dataset, or samples by index; goes before the
            provider's training data. None on ranks with a tensor-parallel rank above 0: they get the batches of rank 0.
        get_batch_func (Optional[Callable]): `(data_iterator) -> dict` keyed by the names of the model's construct: the
            full local batch, or one micro-batch; None: batches are used as they are.
        valid_data_loader, test_data_loader: like train_data_loader, for evaluations.

    Returns:
        Trainer: the trained `model`, `optimizer`, `train_state`.

    Raises:
        ConfigError: a setting that is wrong or not available.
        ValueError: arguments that do not fit together, a batch that does not fit the model.
        NonFiniteLossError: a loss was NaN or infinite.
    """
    start_time = time.monotonic()
    all_config = _configuration(all_config, extra_args_provider, args_defaults)
    require_pretraining(all_config)
    require_startable(all_config)
    require_tensorboard(all_config.training_config)
    _check_arguments(model_provider_func, model_type)
    with training_run(all_config):
        trainer = build_trainer(
            all_config,
            model_provider_func,
            train_valid_test_datasets_provider,
            forward_step_func,
            process_non_loss_data_func,
            (train_data_loader, valid_data_loader, test_data_loader),
            get_batch_func,
            start_time=start_time,
        )
        trainer.run()
    return trainer


def build_trainer(
    all_config,
    model_provider_func,
    train_valid_test_datasets_provider=None,
    forward_step_func=None,
    process_non_loss_data_func=None,
    loaders=(None, None, None),
    get_batch_func=None,
    transforms=(),
    reads_ahead=None,
    **parts,
):
    """The `Trainer` of a configuration; inside `training_run`.

    Args:
        all_config (AllConfig): the configuration.
        model_provider_func, train_valid_test_datasets_provider, forward_step_func, process_non_loss_data_func,
            get_batch_func: see `pretrain`; what only serves a part that is given is not used.
        loaders (tuple): train_data_loader, valid_data_loader, test_data_loader.
        transforms (sequence[Callable]): see `get_model`.
        reads_ahead (Optional[bool]): see `TrainingData`; None: only without a `forward_step_func`.
        parts: fields of `Trainer`. A part that is given replaces the one that would be built, and those built after it work
            with it.

    Raises:
        TypeError: `parts` names no field of `Trainer`.
    """
    unknown = sorted(parts.keys() - {field.name for field in fields(Trainer)})
    if unknown:
        raise TypeError(
            f"{', '.join(unknown)}: no part of a Trainer; its parts are {', '.join(f.name for f in fields(Trainer))}."
        )

    def part(name, build):
        if name not in parts:
            parts[name] = build()
        return parts[name]

    # before anything is built: a checkpoint that is missing shows at once
    describe = getattr(train_valid_test_datasets_provider, "fingerprint", None)
    if describe is None or loaders[0] is not None:
        describe = partial(fingerprint_of_own_program, all_config, loaders[0] is not None)
    start = find_starting_point(all_config, describe) if "checkpoints" not in parts else None
    state = part("train_state", TrainState)
    provider, ahead = train_valid_test_datasets_provider, forward_step_func is None if reads_ahead is None else reads_ahead
    data = part("data", lambda: build_data(all_config, provider, loaders, get_batch_func, ahead))
    iterations = part("training_iters", lambda: data.training_iters)
    model = part("model", lambda: get_model(model_provider_func, all_config, transforms))
    optimizer = part("optimizer", lambda: get_optimizer(all_config, model))
    scheduler = part("opt_param_scheduler", lambda: get_optimizer_param_scheduler(optimizer, all_config, iterations))
    forward_step = forward_step_func or default_forward_step
    metrics = part("metrics", lambda: MetricsLogger.of(all_config, iterations))
    part("train_step", lambda: TrainOneStep.of(all_config, model, optimizer, scheduler, forward_step))
    part("checkpoints", lambda: CheckpointManager(all_config, start, state, model, optimizer, scheduler, data))
    evaluation = all_config.training_config, forward_step, model, data, metrics, process_non_loss_data_func
    part("evaluation", lambda: Evaluation(*evaluation))
    return Trainer(all_config=all_config, **parts)


@contextmanager
def training_run(all_config):
    """Inside, a training of this configuration runs: `start_up` comes before, the release of its output folder after."""
    start_up(all_config)
    try:
        yield
    finally:
        release_output_folders()


def start_up(all_config):
    """Start device, communication, parallel grid, seeds and batch sizes of a configuration; logs it on rank 0.

    Raises:
        ConfigError: a setting that is not available, or does not fit the world.
    """
    training = all_config.training_config
    setup_logging(training.log_level.upper())
    require_available(all_config)
    request_device(training.device_target)
    # before the scheduler of msrun serves ranks that end with this error
    fit_to_world(all_config, launch_environment().world_size)
    comm.leave_if_scheduler(comm.backend_name(all_config.parallel_config.communication_backend))
    set_parallel_context(all_config.parallel_config)
    if comm.get_rank() == 0:
        logger.info("the configuration, and who set it:\n%s", page(all_config))
        for notice in all_config.notices:
            if isinstance(notice, WarningNotice):
                logger.warning("%s", notice)
    set_seed_unless_set(training.seed)
    get_timers().configure(training.timing_log_level, training.timing_log_option)
    init_batch_sizes(all_config)


def _configuration(all_config, extra_args_provider, args_defaults):
    """Configuration of the run, set as the one of this process."""
    setup_logging()
    user_errors.install()
    if not initialize.has_args() and (all_config is None or extra_args_provider is not None or args_defaults):
        initialize.initialize_megatron(extra_args_provider, args_defaults)
    if all_config is not None:
        initialize.set_all_config(all_config)
    return initialize.get_all_config()


def _check_arguments(model_provider_func, model_type):
    if not callable(model_provider_func):
        raise ValueError(
            f"model_provider_func is {model_provider_func!r}: expected a function (pre_process, "
            "post_process) that returns the model."
        )
    name = getattr(model_type, "name", model_type)
    if name is not None and name != "encoder_or_decoder":
        raise ValueError(f"model_type is {name!r}: only decoder models exist here, expected encoder_or_decoder or None.")
