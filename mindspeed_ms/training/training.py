"""pretrain: from the configuration to a trained model. Names and order: Megatron's training.py, upstream, the guide."""

import time

from mindspeed_ms.config import fit_to_world, page, require_available
from mindspeed_ms.config.errors import WarningNotice
from mindspeed_ms.core import comm, rng
from mindspeed_ms.core import num_microbatches_calculator as calculator
from mindspeed_ms.core.device import launch_environment, request_device
from mindspeed_ms.core.logging import logger, setup_logging
from mindspeed_ms.core.profiler import make_profiler
from mindspeed_ms.training import checkpointing
from mindspeed_ms.training.data_sources import DataExhausted
from mindspeed_ms.training.evaluation import evaluate
from mindspeed_ms.training.forward_step import make_forward_step
from mindspeed_ms.training.global_vars import (
    get_all_config,
    get_tensorboard_writer,
    has_args,
    set_all_config,
    set_tensorboard_writer,
)
from mindspeed_ms.training.housekeeping import GarbageCollection, check_weights_across_data_parallel_ranks
from mindspeed_ms.training.initialize import initialize_megatron
from mindspeed_ms.training.metrics import MetricsLogger
from mindspeed_ms.training.model_setup import get_model, get_optimizer, get_optimizer_param_scheduler
from mindspeed_ms.training.run import TrainingRun, build_data, find_checkpoint, init_batch_sizes, load
from mindspeed_ms.training.signals import SignalHandler
from mindspeed_ms.training.tensorboard import TensorboardEvents, make_tensorboard_writer
from mindspeed_ms.training.throughput import model_flops_per_token
from mindspeed_ms.training.train_step import NonFiniteGradientError, NonFiniteLossError, TrainOneStep
from mindspeed_ms.training.utils import is_last_rank, set_parallel_context, set_seed

__all__ = ["TrainingRun", "evaluate", "evaluate_and_print_results", "get_model", "pretrain", "train"]


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
        TrainingRun: the trained model (`.model`), optimizer, counters.

    Raises:
        ConfigError: a setting that is wrong or not available.
        ValueError: arguments that do not fit together, a batch that does not fit the model.
        NonFiniteLossError: a loss was NaN or infinite.
    """
    setup_logging()
    all_config = _resolve_config(all_config, extra_args_provider, args_defaults)
    setup_logging(all_config.training_config.log_level.upper())
    _check_arguments(model_provider_func, model_type)
    require_available(all_config)
    request_device(all_config.training_config.device_target)
    comm.leave_if_scheduler(comm.backend_name(all_config.parallel_config.communication_backend))
    fit_to_world(all_config, launch_environment().world_size)
    set_parallel_context(all_config.parallel_config)
    if comm.get_rank() == 0:
        logger.info("the configuration, and who set it:\n%s", page(all_config))
        for notice in all_config.notices:
            if isinstance(notice, WarningNotice):
                logger.warning("%s", notice)
    if not rng.get_rng_tracker().is_initialized():
        set_seed(all_config.training_config.seed)
    init_batch_sizes(all_config)
    run = TrainingRun(all_config, process_non_loss_data_func=process_non_loss_data_func)
    try:
        find_checkpoint(run)
        build_data(
            run, train_valid_test_datasets_provider, train_data_loader, valid_data_loader, test_data_loader, get_batch_func
        )
        if all_config.training_config.skip_train and run.valid_data is None and run.test_data is None:
            raise ValueError("skip_train is set, but there is no validation or test data to evaluate.")
        _build_model(run, model_provider_func, forward_step_func)
        load(run)
        _train_or_evaluate(run)
    finally:
        checkpointing.release_output_folders()
    return run


def _train_or_evaluate(run):
    if run.all_config.training_config.skip_train:
        _only_evaluate(run)
        return
    if run.train_state.iteration >= run.training_iters:
        logger.info(
            "the training is complete: iteration %d of %d was reached before, nothing is left to do. Raise "
            "--train-iters (training_config.training_iters) to go on.",
            run.train_state.iteration,
            run.training_iters,
        )
        return
    _open_metrics(run)
    try:
        ending = train(run)
    finally:
        run.metrics.close()
    for chunk in run.model:
        chunk.finish_param_sync()
    logger.info(ending)


def _resolve_config(all_config, extra_args_provider, args_defaults):
    if not has_args() and (all_config is None or extra_args_provider is not None or args_defaults):
        initialize_megatron(extra_args_provider, args_defaults)
    if all_config is not None:
        set_all_config(all_config)
    return get_all_config()


def _check_arguments(model_provider_func, model_type):
    if not callable(model_provider_func):
        raise ValueError(
            f"model_provider_func is {model_provider_func!r}: expected a function (pre_process, "
            "post_process) that returns the model."
        )
    name = getattr(model_type, "name", model_type)
    if name is not None and name != "encoder_or_decoder":
        raise ValueError(f"model_type is {name!r}: only decoder models exist here, expected encoder_or_decoder or None.")


def _build_model(run, model_provider_func, forward_step_func):
    training = run.all_config.training_config
    run.model = get_model(model_provider_func, run.all_config)
    run.optimizer = get_optimizer(run.all_config, run.model)
    run.opt_param_scheduler = get_optimizer_param_scheduler(run.optimizer, run.all_config, run.training_iters)
    run.draws_ahead = forward_step_func is None
    run.forward_step_func = forward_step_func or make_forward_step(training.calculate_per_token_loss)
    run.step = TrainOneStep(
        run.model,
        run.optimizer,
        run.opt_param_scheduler,
        run.forward_step_func,
        training.calculate_per_token_loss,
        training.check_for_nan_in_loss,
        training.log_params_norm,
        run.all_config.model_config.seq_length,
    )
    for chunk in run.model:
        chunk.set_train(True)


def _open_metrics(run):
    training = run.all_config.training_config
    if training.tensorboard_dir and comm.get_rank() == 0 and get_tensorboard_writer() is None:
        set_tensorboard_writer(make_tensorboard_writer(training.tensorboard_dir, training.tensorboard_queue_size))
    events = TensorboardEvents(get_tensorboard_writer(), training)
    run.metrics = MetricsLogger(
        training.output_dir,
        run.training_iters,
        training.log_interval,
        events,
        run.train_state.iteration,
        model_flops_per_token(run.all_config.model_config) if training.log_throughput else None,
    )


def _only_evaluate(run):
    _open_metrics(run)
    try:
        _final_evaluations(run, always=True)
    finally:
        run.metrics.close()


def train(run):
    """Run the steps that are left, with evaluations and checkpoints; a signal ends it after a step, saved.

    Args:
        run (TrainingRun): as `pretrain` builds it.

    Returns:
        str: how it ended, for the last line of the log.
    """
    settings, state = run.all_config.training_config, run.train_state
    finite = any(comm.world_group().all_gather_object(bool(run.train_stream.is_finite)))
    with (
        SignalHandler(settings.exit_signal_handler) as signals,
        GarbageCollection(settings.manual_gc, settings.manual_gc_interval) as garbage,
        make_profiler(settings, comm.get_rank()) as profiler,
    ):
        while state.iteration < run.training_iters:
            calculator.update_num_microbatches(state.consumed_train_samples)
            profiler.before_step(state.iteration + 1)
            data, exhausted = _data_of_step(run, finite)
            if exhausted:
                _end_without_data(run, exhausted)
                break
            stop = signals.received is not None or _time_is_over(run)
            report, stop = _run_step(run, data, stop)
            _count(run, report)
            profiler.after_step(state.iteration)
            run.metrics.log_step(report, state)
            run.poll_save()
            _check_weights_if_due(run)
            garbage.after_step(state.iteration, _evaluate_if_due(run))
            _save_if_due(run)
            due = settings.exit_interval and state.iteration % settings.exit_interval == 0
            if (stop or due) and state.iteration < run.training_iters:
                cause = _cause_of_end(run, signals, bool(stop))
                run.save()
                run.complete_save()
                saved = (
                    "resume_training continues from here"
                    if settings.save_enabled
                    else "nothing was saved (save_enabled is off)"
                )
                return f"ended at iteration {state.iteration} of {run.training_iters} by {cause}, exit code 0; {saved}"
        run.save()
        _final_evaluations(run)
        run.complete_save()
    return f"Training success! {state.iteration} iterations, {state.consumed_train_samples} samples"


def _save_if_due(run):
    settings = run.all_config.training_config
    if settings.save_interval and run.train_state.iteration % settings.save_interval == 0:
        run.save()
    elif settings.non_persistent_save_interval and run.train_state.iteration % settings.non_persistent_save_interval == 0:
        run.save(persistent=False)


def _data_of_step(run, finite):
    """(iterator of the step's micro-batches, None), or (None, reason) on all ranks if one of them has no more data."""
    if not run.draws_ahead:
        return run.train_data, None
    reason, batches = None, []
    try:
        batches = run.train_data.take(calculator.get_num_microbatches())
    except DataExhausted as error:
        reason = str(error)
    if finite:
        reason = next((text for text in comm.world_group().all_gather_object(reason) if text), None)
    return (None, reason) if reason else (iter(batches), None)


def _run_step(run, data, stop):
    try:
        return run.step(data, run.train_state.iteration + 1, stop)
    except (NonFiniteLossError, NonFiniteGradientError):
        run.complete_save()
        raise
    except StopIteration as error:
        raise RuntimeError(
            f"the training data ran out within iteration {run.train_state.iteration + 1} of {run.training_iters}: {error}"
        ) from error


def _end_without_data(run, reason):
    if run.all_config.training_config.epochs is None:
        run.save()
        run.complete_save()
        raise RuntimeError(
            f"the training data ran out after iteration {run.train_state.iteration} of "
            f"{run.training_iters}: {reason}. The state was saved; give more data or set training_iters "
            f"(--train-iters) to {run.train_state.iteration}."
        )
    logger.info("%s after iteration %d", reason, run.train_state.iteration)


def _count(run, report):
    state, epoch = run.train_state, run.train_stream.epoch
    state.iteration += 1
    state.consumed_train_samples += calculator.get_current_global_batch_size()
    state.skipped_iterations += not report.finite_grads
    state.step_in_epoch = state.step_in_epoch + 1 if epoch == state.epoch else 1
    state.epoch = epoch


def _time_is_over(run):
    minutes = run.all_config.training_config.exit_duration_in_mins
    return minutes is not None and time.monotonic() - run.start_time > 60.0 * minutes


def _cause_of_end(run, signals, stop):
    """What ends the training before its last step (str), the same on all ranks: a signal may have come to one of them."""
    minutes, interval = (getattr(run.all_config.training_config, name) for name in ("exit_duration_in_mins", "exit_interval"))
    if not stop:
        return f"exit_interval {interval} (--exit-interval)"
    received = [text for text in comm.world_group().all_gather_object(signals.received) if text]
    return received[0] if received else f"exit_duration_in_mins {minutes:g} (--exit-duration-in-mins)"


def _check_weights_if_due(run):
    interval = run.all_config.training_config.check_weight_hash_across_dp_replicas_interval
    if interval and run.train_state.iteration % interval == 0:
        check_weights_across_data_parallel_ranks(run.model, run.train_state.iteration)


def _evaluate_if_due(run):
    interval = run.all_config.training_config.eval_interval
    if not interval or run.valid_data is None or run.train_state.iteration % interval:
        return False
    evaluate_and_print_results("valid", run, run.valid_data)
    run.train_state.consumed_valid_samples += _evaluation_samples(run)
    return True


def _evaluation_samples(run):
    with calculator.full_batch_size():
        return run.all_config.training_config.eval_iters * calculator.get_current_global_batch_size()


def _final_evaluations(run, always=False):
    """At the end: validation unless the last step had it, and the test data."""
    interval = run.all_config.training_config.eval_interval
    if not interval and not always:
        return
    if run.valid_data is not None and (always or run.train_state.iteration % interval):
        evaluate_and_print_results("valid", run, run.valid_data)
    if run.test_data is not None:
        evaluate_and_print_results("test", run, run.test_data)


def evaluate_and_print_results(name, run, data):
    """Evaluate `data` (called `name` in reports) for `eval_iters` global batches; returns the losses by name."""
    iterations = run.all_config.training_config.eval_iters
    if not iterations:
        return {}
    try:
        losses, non_loss_data = evaluate(run.forward_step_func, data, run.model, iterations, run.process_non_loss_data_func)
    except StopIteration as error:
        raise RuntimeError(
            f"the {name} data ran out before {iterations} global batches were evaluated ({error}): give "
            "data that can be read again, or lower eval_iters (--eval-iters)."
        ) from error
    if non_loss_data is not None and is_last_rank():
        run.process_non_loss_data_func(non_loss_data, run.train_state.iteration, get_tensorboard_writer())
    run.metrics.log_evaluation(name, losses, run.train_state)
    return losses
