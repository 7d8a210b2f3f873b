"""What a training consists of, and its set-up, loading and saving."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mindspeed_ms.core import comm, parallel_state
from mindspeed_ms.core import num_microbatches_calculator as calculator
from mindspeed_ms.core.logging import logger
from mindspeed_ms.training import checkpointing
from mindspeed_ms.training.checkpoint_settings import check_same_model, tell_what_changed
from mindspeed_ms.training.data import (
    build_pretraining_data_loader,
    get_train_valid_test_num_samples,
    global_batch_size,
    training_iters_of_config,
)
from mindspeed_ms.training.data_sources import MicroBatches, as_loader, make_stream, steps_per_epoch
from mindspeed_ms.training.train_state import TrainState


@dataclass
class TrainingRun:
    """The parts of a training.

    Attributes:
        all_config (AllConfig): the configuration.
        training_iters (int): steps of the whole training.
        train_state (TrainState): where it stands.
        train_stream, train_data, valid_data, test_data: batches, and iterators of micro-batches (None: no such data).
        model, optimizer, opt_param_scheduler, step: see their classes.
        forward_step_func (Callable): of every micro-batch.
        draws_ahead (bool): the micro-batches of a step are read before it starts.
        metrics (MetricsLogger): reports.
        last_saved (Optional[int]): iteration of the newest checkpoint of this run.
        load_from (Optional[str]): folder of the checkpoint that the run starts from.
        resumes (bool): it goes on where that checkpoint was saved; else it takes the weights only.
        savers (dict[bool, CheckpointSaver]): write the checkpoints that stay (True) and the spare ones (False).
    """

    all_config: Any
    training_iters: int = 0
    train_state: TrainState = field(default_factory=TrainState)
    train_stream: Any = None
    train_data: Any = None
    valid_data: Any = None
    test_data: Any = None
    model: list = field(default_factory=list)
    optimizer: Any = None
    opt_param_scheduler: Any = None
    step: Any = None
    forward_step_func: Callable | None = None
    process_non_loss_data_func: Callable | None = None
    draws_ahead: bool = True
    metrics: Any = None
    last_saved: int | None = None
    load_from: str | None = None
    resumes: bool = False
    savers: dict = field(default_factory=dict)
    start_time: float = field(default_factory=time.monotonic)

    def data(self):
        """Iterators of micro-batches whose position belongs to a checkpoint."""
        present = {"train": self.train_data, "valid": self.valid_data}
        return {name: data for name, data in present.items() if data is not None}

    def save(self, persistent=True):
        """Write a checkpoint of the present iteration, unless there is one or saving is switched off.

        Args:
            persistent (bool): False: a spare one, which the next spare one replaces.
        """
        settings = self.all_config.training_config
        if not settings.save_enabled or self.last_saved == self.train_state.iteration:
            return
        self.complete_save()
        checkpointing.save_checkpoint(
            self._saver(persistent),
            self.train_state,
            self.model,
            None if settings.no_save_optim else self.optimizer,
            None if settings.no_save_optim else self.opt_param_scheduler,
            {name: data.stream.position() for name, data in self.data().items()},
            not settings.no_save_rng,
            self.all_config,
        )
        if persistent:
            self.last_saved = self.train_state.iteration

    def _saver(self, persistent):
        if persistent not in self.savers:
            settings = self.all_config.training_config
            folder = settings.output_dir if persistent else checkpointing.spare_folder(settings.output_dir)
            self.savers[persistent] = checkpointing.CheckpointSaver(
                folder,
                settings.keep_checkpoint_max if persistent else 1,
                settings.async_save,
                settings.crc_check,
                settings.ckpt_format,
                settings.prefix,
            )
        return self.savers[persistent]

    def poll_save(self):
        """Between steps: complete a checkpoint that was written beside the training."""
        for saver in self.savers.values():
            saver.poll()

    def complete_save(self):
        """Before the training ends: wait for a checkpoint that is being written."""
        for saver in self.savers.values():
            saver.wait()


def init_batch_sizes(all_config):
    """Set up the number of micro-batches of a step."""
    settings = all_config.dataset_config
    calculator.init_num_microbatches_calculator(
        comm.get_rank(),
        settings.rampup_batch_size,
        global_batch_size(all_config),
        settings.batch_size,
        parallel_state.get_data_parallel_world_size(),
        settings.decrease_batch_size_if_needed,
    )


def build_data(run, datasets_provider, train_loader, valid_loader, test_loader, get_batch_func):
    """Make the streams of training, evaluation and test data of a run, and the length of the training.

    A loader that is given goes before the provider's dataset of that kind.
    """
    all_config = run.all_config
    loaders = [train_loader, valid_loader, test_loader]
    if datasets_provider is not None:
        datasets = _provide(datasets_provider, all_config)
        loaders = [
            loader if loader is not None else build_pretraining_data_loader(dataset, 0, all_config)
            for loader, dataset in zip(loaders, datasets)
        ]
    loaders = [as_loader(loader, all_config) for loader in loaders]
    run.training_iters = resolve_training_iters(all_config, loaders[0])
    run.train_stream = make_stream(loaders[0], all_config, all_config.training_config.epochs)
    run.train_data = MicroBatches(run.train_stream, get_batch_func)
    run.valid_data, run.test_data = (
        MicroBatches(make_stream(loader, all_config, name=name), get_batch_func) if _anyone_has(loader) else None
        for loader, name in zip(loaders[1:], ("valid_data_loader", "test_data_loader"))
    )


def _provide(datasets_provider, all_config):
    if not any(get_train_valid_test_num_samples(all_config)[:1]):
        raise ValueError(
            "train_valid_test_datasets_provider needs the number of samples: set training_iters "
            "(--train-iters) or train_samples (--train-samples)."
        )
    datasets = datasets_provider(get_train_valid_test_num_samples(all_config))
    if not isinstance(datasets, (tuple, list)) or len(datasets) != 3:
        raise ValueError(
            "train_valid_test_datasets_provider must return three datasets (training, validation, test; "
            f"None for one that does not exist), but returned {type(datasets).__name__}."
        )
    return datasets


def _anyone_has(loader):
    group = parallel_state.get_tensor_model_parallel_group()
    return any(group.all_gather_object(loader is not None)) if group.size > 1 else loader is not None


def resolve_training_iters(all_config, loader):
    """Steps of the training: training_iters, else from train_samples, else from epochs and the length of the data.

    Raises:
        ValueError: none of them is set, or the data does not say how long it is.
    """
    training, dataset = all_config.training_config, all_config.dataset_config
    iterations = training_iters_of_config(all_config)
    if iterations:
        return iterations
    if dataset.train_samples:
        raise ValueError(
            f"train_samples is {dataset.train_samples}, less than the first global batch of "
            f"{calculator.get_current_global_batch_size()}: there is nothing to train. Raise it."
        )
    if not training.epochs:
        raise ValueError(
            "there is nothing to train: training_iters is 0 and neither train_samples nor epochs is set. "
            "Set training_iters (--train-iters)."
        )
    lengths = [
        length
        for length in comm.world_group().all_gather_object(steps_per_epoch(loader) if loader is not None else None)
        if length is not None
    ]
    if not lengths:
        raise ValueError(
            f"epochs is {training.epochs}, but the training data does not say how many steps an epoch "
            "has: set training_iters (--train-iters) too."
        )
    return training.epochs * min(lengths)


def find_checkpoint(run):
    """Set `run.load_from` and `run.resumes`, before anything is built: a checkpoint that is missing shows at once.

    Raises:
        CheckpointError: the named checkpoint does not exist or is damaged, or no complete one is left; or nothing can be
            written to output_dir, or another job saves there.
    """
    settings = run.all_config.training_config
    saves = settings.save_enabled and not settings.skip_train
    checkpointing.check_output_folder(settings.output_dir, saves, makes=False)
    folder, run.resumes = _folder_to_load(settings)
    if folder:
        run.load_from = checkpointing.find_checkpoint(folder, settings.ckpt_step, settings.crc_check)
        if run.resumes and not settings.no_load_optim and checkpointing.is_upstream_folder(run.load_from):
            _check_upstreams_optimizer(run)
    checkpointing.check_output_folder(settings.output_dir, saves)


def _check_upstreams_optimizer(run):
    with checkpointing.open_checkpoint(run.load_from, run.all_config, run.all_config.training_config.ckpt_step) as reader:
        if reader.manifest.not_resumable:
            raise checkpointing.CheckpointError(
                f"{run.load_from} was written by upstream, and its optimizer's state cannot be continued: "
                f"{reader.manifest.not_resumable}. Load its weights, without resume_training (--finetune), or start the "
                "optimizer afresh (--no-load-optim)."
            )


def load(run):
    """Load weights, or a whole training with `resume_training`; does nothing if there is no checkpoint to load.

    Raises:
        CheckpointError: the checkpoint is damaged or does not fit the model.
    """
    settings, path = run.all_config.training_config, run.load_from
    if path is None:
        return
    with_optimizer = run.resumes and not settings.no_load_optim
    with checkpointing.open_checkpoint(path, run.all_config, settings.ckpt_step) as reader:
        checkpointing.load_checkpoint(
            reader,
            run.model,
            run.optimizer if with_optimizer else None,
            run.opt_param_scheduler if with_optimizer else None,
            settings.load_strict,
            checkpointing.true_vocab_size(run.all_config),
        )
        check_same_model(reader.manifest.args, run.all_config, run.resumes and settings.load_strict)
        if not with_optimizer:
            run.optimizer.reload_model_params()
        if not run.resumes:
            logger.info("loaded the weights of %s", path)
            return
        tell_what_changed(reader.manifest, run.all_config, checkpointing.true_vocab_size(run.all_config))
        _resume(run, reader, with_optimizer)
    logger.info("resumed from %s at iteration %d", path, run.train_state.iteration)


def _resume(run, reader, with_optimizer):
    """Counters, random states and the position in the data."""
    settings = run.all_config.training_config
    run.train_state = TrainState.from_dict(reader.manifest.states["train_state"])
    if not with_optimizer:
        run.opt_param_scheduler.step(run.train_state.consumed_train_samples)
    if not settings.no_load_rng:
        checkpointing.restore_random_states(reader, settings.seed)
    if os.path.abspath(os.path.dirname(run.load_from)) == os.path.abspath(settings.output_dir):
        run.last_saved = run.train_state.iteration
    if settings.new_dataset:
        return
    consumed = {"train": run.train_state.consumed_train_samples, "valid": run.train_state.consumed_valid_samples}
    positions = checkpointing.saved_data_position(reader)
    for name, data in run.data().items():
        data.stream.go_to(positions.get(name, {"epoch": 0, "batches": 0}), consumed[name])


def _folder_to_load(settings):
    """`checkpoint_to_start_from` of these settings; what a user may not expect of it is logged.

    Raises:
        CheckpointError: there is none to resume from and `exit_on_missing_checkpoint` is set.
    """
    wanted, own = settings.resume_training and not settings.finetune, settings.output_dir
    folder, resumes = checkpointing.checkpoint_to_start_from(
        settings.load_checkpoint, own, settings.pretrained_checkpoint, wanted
    )
    if wanted and not resumes:
        if settings.exit_on_missing_checkpoint:
            raise checkpointing.CheckpointError(f"{own} holds no checkpoint to resume from (exit_on_missing_checkpoint).")
        logger.info("resume_training: %s holds no checkpoint yet, the training starts from the beginning", own)
    elif resumes and folder != own and checkpointing.has_checkpoints(own) and comm.get_rank() == 0:
        logger.warning(
            "load_checkpoint (--load) %s is continued although %s has checkpoints of its own: without --load those would be",
            folder,
            own,
        )
    elif not wanted and not settings.load_checkpoint:
        _warn_of_older_checkpoints(own)
    return folder, resumes


def _warn_of_older_checkpoints(folder):
    newest = checkpointing.latest_iteration(folder)
    if newest is not None and comm.get_rank() == 0:
        logger.warning(
            "%s holds checkpoints of an earlier training (up to iteration %d); resume_training "
            "(--resume-training) would continue it, this run starts anew and replaces them as it goes",
            folder,
            newest,
        )
