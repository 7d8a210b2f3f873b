"""CheckpointManager: the starting point of a training, saves at their time, and the same-model check of a checkpoint."""

import os
from dataclasses import dataclass, field
from typing import Any

from mindspeed_ms.config.model_description import describe_model, vocab_size_of
from mindspeed_ms.config.same_model import differences
from mindspeed_ms.core import comm
from mindspeed_ms.core.datasets.errors import DatasetError
from mindspeed_ms.core.dist_checkpointing import folders
from mindspeed_ms.core.dist_checkpointing.agreement import on_rank_zero
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.foreign import foreign_format
from mindspeed_ms.core.dist_checkpointing.load import find_checkpoint, open_checkpoint
from mindspeed_ms.core.dist_checkpointing.save import CheckpointSaver
from mindspeed_ms.core.logging import logger
from mindspeed_ms.models.adapters import has_adapters, without_adapters
from mindspeed_ms.models.reward_head import has_reward_head, without_critic, without_language_head
from mindspeed_ms.training import checkpointing, model_folder, same_data
from mindspeed_ms.training.adapter_start import AdapterStart, find_adapter_start
from mindspeed_ms.training.gpt_datasets import names_indexed_files
from mindspeed_ms.training.start_checks import check_resumed
from mindspeed_ms.training.timers import get_timers

_ORDER = (("training_config", "seed"), ("dataset_config", "dataloader_type"), ("dataset_config", "shuffle"))  # of samples


@dataclass(frozen=True)
class StartingPoint:
    """Checkpoint that a training starts from.

    Attributes:
        path (Optional[str]): its folder; None: there is none.
        resumes (bool): the training goes on where it was saved; else it takes the weights only.
        fingerprint (Optional[dict]): of the run's tokenizer and data.
        adapters (AdapterStart): base or adapters that are loaded beside.
    """

    path: str | None = None
    resumes: bool = False
    fingerprint: dict | None = None
    adapters: AdapterStart = field(default_factory=AdapterStart)


def find_starting_point(all_config, describe_data=None):
    """Find the `StartingPoint` of a run before anything is built, so that a missing checkpoint shows at once.

    Args:
        all_config (AllConfig): of the run.
        describe_data (Optional[Callable]): gives the fingerprint of its tokenizer and data, see `same_data`; called on rank 0.

    Raises:
        CheckpointError: tokenizer or data are not those of the checkpoint.
        CheckpointError: the named checkpoint does not exist or is damaged, or no complete one is left; or nothing can be
            written to output_dir, or another job saves there.
    """
    settings = all_config.training_config
    saves = settings.save_enabled and not settings.skip_train
    checkpointing.check_output_folder(settings.output_dir, saves, makes=False)
    path, resumes = _folder_to_load(settings)
    manifest = None
    if path:
        path = find_checkpoint(path, settings.ckpt_step, settings.crc_check, all_config)
        with open_checkpoint(path, all_config, settings.ckpt_step) as reader:
            manifest = reader.manifest
        resumes = resumes and _can_resume(path, manifest, settings, all_config.lora_config.use_lora)
        check_resumed(path, manifest, all_config, resumes)
    adapters = on_rank_zero("the training was not started", find_adapter_start, path, manifest, all_config, resumes)
    fingerprint = on_rank_zero("the training was not started", _fingerprint, path, all_config, resumes, describe_data)
    if saves:
        on_rank_zero("nothing can be saved", _check_foreign_iterations, settings.output_dir, path if resumes else None)
    checkpointing.check_output_folder(settings.output_dir, saves)
    return StartingPoint(path, resumes, fingerprint, adapters)


def _fingerprint(path, all_config, resumes, describe_data):
    try:
        own = describe_data() if describe_data is not None else None
    except (DatasetError, OSError) as error:  # what needs the data raises it too
        logger.warning("tokenizer and data cannot be compared with those of a checkpoint: %s", error)
        own = None
    return own if path is None else same_data.check_at_start(path, own, all_config, resumes)


@dataclass
class CheckpointManager:
    """Loading of a training's state at its start, and saving.

    Attributes:
        all_config (AllConfig): read: training_config; kept in each checkpoint.
        start (StartingPoint): what `load` loads.
        state (TrainState), model (list[ShardedModel]), optimizer (Optimizer), opt_param_scheduler
            (OptimizerParamScheduler), data (TrainingData): what is saved and loaded.
    """

    all_config: Any
    start: StartingPoint
    state: Any
    model: list
    optimizer: Any
    opt_param_scheduler: Any
    data: Any
    _foreign: dict = field(default_factory=dict)
    _last_saved: int | None = None
    _savers: dict = field(default_factory=dict)  # False: of spare checkpoints

    @property
    def settings(self):
        """Section training_config."""
        return self.all_config.training_config

    def load(self):
        """Load weights, or with `resume_training` the whole state; without a checkpoint `lora_load` alone.

        Raises:
            CheckpointError: the checkpoint is damaged or does not fit the model.
        """
        settings, path = self.settings, self.start.path
        resumes, vocab_size = self.start.resumes, vocab_size_of(self.all_config)
        self._load_beside(vocab_size)
        if path is None:
            if self.start.adapters.adapters is not None:
                logger.warning("lora_load (--lora-load) without load_checkpoint: the base has its initial random weights")
                self.optimizer.reload_model_params()
            return
        with_optimizer = resumes and not settings.no_load_optim
        with open_checkpoint(path, self.all_config, settings.ckpt_step) as reader:
            described = describe_model(self.all_config)
            if described.gives_values and not has_reward_head(reader.manifest):
                logger.info("%s holds no reward model: its head starts anew", path)
                reader.manifest = without_language_head(reader.manifest)
            if not resumes and not described.has_critic and not described.gives_values:
                reader.manifest = without_critic(reader.manifest)
            checkpointing.load_checkpoint(
                reader,
                self.model,
                self.optimizer if with_optimizer else None,
                self.opt_param_scheduler if with_optimizer else None,
                settings.load_strict,
                vocab_size,
            )
            self._foreign = reader.manifest.foreign
            refused = getattr(reader.manifest, "refused", ())
            if refused and comm.get_rank() == 0:
                logger.warning("%s was trained with %s, which the model here does not have", path, ", ".join(refused))
            check_same_model(reader.manifest.args, self.all_config, resumes and settings.load_strict)
            if not with_optimizer:
                self.optimizer.reload_model_params()
            if not resumes:
                logger.info("loaded the weights of %s", path)
                return
            log_changes(reader.manifest, self.all_config, vocab_size)
            self._resume(reader)
            if not with_optimizer:
                logger.info("no_load_optim (--no-load-optim): optimizer and learning rate schedule start anew")
        logger.info("resumed from %s at iteration %d", path, self.state.iteration)

    def _load_beside(self, vocab_size):
        """Load the base of adapters, or adapters of another folder (see `AdapterStart`)."""
        start, settings = self.start.adapters, self.settings
        if start.base is not None:
            with open_checkpoint(start.base, self.all_config) as reader:
                reader.manifest = without_adapters(reader.manifest)
                checkpointing.load_checkpoint(reader, self.model, strict=settings.load_strict, vocab_size=vocab_size)
            logger.info("loaded the base %s", start.base)
        if start.adapters is not None:
            checkpointing.load_adapters(start.adapters, self.model)
            logger.info("loaded the adapters of %s", start.adapters.source)

    def _base(self):
        """What a checkpoint of adapters alone says of its base; None for one with all weights."""
        lora = self.all_config.lora_config
        if not (lora.use_lora and lora.lora_ckpt_filter):
            return None
        path = self.start.adapters.base or self.start.path
        return {"path": os.path.abspath(path) if path else None}

    def _resume(self, reader):
        """Restore counters, random states and the position in the data."""
        settings, state = self.settings, self.state
        state.load(reader.manifest.states["train_state"])
        if not settings.no_load_rng:
            checkpointing.restore_random_states(reader, settings.seed)
        if os.path.abspath(os.path.dirname(self.start.path)) == os.path.abspath(settings.output_dir):
            self._last_saved = state.iteration
        consumed = {"train": state.consumed_train_samples, "valid": state.consumed_valid_samples}
        if settings.new_dataset:
            self.data.start_anew(consumed)
        else:
            self.data.go_to(checkpointing.saved_data_position(reader), consumed)

    def after_step(self):
        """Save if the step is due."""
        settings, iteration = self.settings, self.state.iteration
        if settings.save_interval and iteration % settings.save_interval == 0:
            self.save()
        elif settings.non_persistent_save_interval and iteration % settings.non_persistent_save_interval == 0:
            self.save(persistent=False)

    def save(self, persistent=True):
        """Save a checkpoint of the current iteration, unless it exists or saving is switched off.

        Args:
            persistent (bool): False: a spare one, which the next spare one replaces.
        """
        settings = self.settings
        if not settings.save_enabled or self._last_saved == self.state.iteration:
            return
        timer = get_timers()("save-checkpoint", log_level=0)
        timer.start()
        self.complete()
        if not self._savers and comm.get_rank() == 0:
            model_folder.keep(self.start, self.all_config)
        checkpointing.save_checkpoint(
            self._saver(persistent),
            self.state,
            self.model,
            None if settings.no_save_optim else self.optimizer,
            None if settings.no_save_optim else self.opt_param_scheduler,
            self.data.positions(),
            not settings.no_save_rng,
            self.all_config,
            self.start.fingerprint,
            self._foreign,
            self._base(),
        )
        timer.stop()
        if persistent:
            self._last_saved = self.state.iteration

    def _saver(self, persistent):
        if persistent not in self._savers:
            settings = self.settings
            self._savers[persistent] = CheckpointSaver(
                settings.output_dir if persistent else folders.spare_folder(settings.output_dir),
                settings.keep_checkpoint_max if persistent else 1,
                settings.async_save,
                settings.crc_check,
                settings.ckpt_format,
                settings.prefix,
            )
        return self._savers[persistent]

    def poll(self):
        """Complete, between steps, a checkpoint that was written in the background."""
        for saver in self._savers.values():
            saver.poll()

    def complete(self):
        """Wait, before the training ends, for a checkpoint that is being written."""
        for saver in self._savers.values():
            saver.wait()


def _check_foreign_iterations(folder, path):
    """Raise CheckpointError if the run would come to the iteration of another program's checkpoint in its output folder."""
    done = os.path.basename(path).removeprefix("iter_") if path else ""
    ahead = folders.foreign_iterations(folder, int(done) if done.isdigit() else 0)
    if ahead:
        raise CheckpointError(
            f"output_dir (--save) {folder} holds checkpoints of another program of iterations {ahead}, which this run would "
            "replace: choose another folder."
        )


def _can_resume(path, manifest, settings, use_lora):
    """Whether a training goes on from a checkpoint; False for weights alone, which are then taken.

    Raises:
        CheckpointError: its optimizer's state cannot be continued, and is wanted.
    """
    if manifest.has_only_weights:
        if comm.get_rank() == 0:
            logger.info("%s holds weights only: the training starts from them at its beginning", path)
        return False
    if use_lora and not has_adapters(manifest):
        if comm.get_rank() == 0:
            logger.info("%s holds no adapters: the training of adapters starts from its weights at its beginning", path)
        return False
    if manifest.not_resumable and not settings.no_load_optim:
        raise CheckpointError(
            f"the optimizer's state in {path} ({foreign_format(path).title} format) cannot be continued: "
            f"{manifest.not_resumable}. Load its weights, without resume_training (--finetune), or start the "
            "optimizer afresh (--no-load-optim)."
        )
    return True


def _folder_to_load(settings):
    """Folder to load and whether to resume (`checkpoint_to_start_from`); logs unexpected choices.

    Raises:
        CheckpointError: there is none to resume from and `exit_on_missing_checkpoint` is set.
    """
    wanted, own = settings.resume_training and not settings.finetune, settings.output_dir
    folder, resumes = folders.checkpoint_to_start_from(settings.load_checkpoint, own, settings.pretrained_checkpoint, wanted)
    if wanted and not resumes:
        if settings.exit_on_missing_checkpoint:
            raise CheckpointError(f"{own} holds no checkpoint to resume from (exit_on_missing_checkpoint).")
        logger.info("resume_training: %s holds no checkpoint yet, the training starts from the beginning", own)
    elif resumes and folder != own and folders.has_checkpoints(own) and comm.get_rank() == 0:
        logger.warning(
            "load_checkpoint (--load) %s is continued although %s has checkpoints of its own: without --load those would be",
            folder,
            own,
        )
    elif not wanted and not settings.load_checkpoint:
        _warn_of_older_checkpoints(own)
    return folder, resumes


def _warn_of_older_checkpoints(folder):
    newest = folders.latest_iteration(folder)
    if newest is not None and comm.get_rank() == 0:
        logger.warning(
            "%s holds checkpoints of an earlier training (up to iteration %d); resume_training "
            "(--resume-training) would continue it, this run starts anew and replaces them as it goes",
            folder,
            newest,
        )


def check_same_model(saved, all_config, must_be_equal):
    """Compare a checkpoint's settings that its tensors do not show with the model's. Idea: Megatron's `check_checkpoint_args`.

    Args:
        saved (dict): the configuration in the checkpoint; empty for files that carry none.
        all_config (AllConfig): this run's.
        must_be_equal (bool): a difference is an error, else a warning (weights may be taken over on purpose).

    Raises:
        CheckpointError: on all ranks, naming each setting with both values.
    """
    different = [
        f"{path} is {before!r} in the checkpoint, {now!r} here"
        for path, before, now in differences(saved, all_config.to_dict())
    ]
    if not different:
        return
    if must_be_equal:
        raise CheckpointError(
            f"the checkpoint is of another model: {'; '.join(different)}. Set them as they were, load its "
            "weights alone (--finetune), or set load_strict: False (--load-strict false)."
        )
    if comm.get_rank() == 0:
        logger.warning("the checkpoint is of another model: %s", "; ".join(different))


def log_changes(manifest, all_config, vocab_size):
    """Log changes of a continued training against the saved one: vocabulary, number of samples."""
    if comm.get_rank() != 0:
        return
    if None not in (manifest.vocab_size, vocab_size) and manifest.vocab_size != vocab_size:
        logger.warning("the vocabulary has %d ids, the checkpoint's had %d", vocab_size, manifest.vocab_size)
    for section, name in _ORDER:
        before, now = (manifest.args.get(section) or {}).get(name), getattr(getattr(all_config, section), name)
        if name in (manifest.args.get(section) or {}) and before != now:
            logger.warning("%s was %r, now is %r: samples come in another order, some of them again", name, before, now)
    saved = manifest.args.get("training_config") or {}, manifest.args.get("dataset_config") or {}
    own = all_config.training_config, all_config.dataset_config
    before, now = [
        tuple(_get(section, name) for section, name in zip(pair, ("training_iters", "train_samples"))) for pair in (saved, own)
    ]
    if saved[0] and before != now and names_indexed_files(all_config):
        logger.warning(
            "training_iters, train_samples were %s, now are %s: the order of Megatron's indexed samples depends on "
            "their number, so those after this point are not the ones that were to come",
            before,
            now,
        )


def _get(section, name):
    return section.get(name) if isinstance(section, dict) else getattr(section, name)
