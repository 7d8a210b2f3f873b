"""Checks before a training starts: files, folders, device, and the checkpoint that it goes on from. The launcher makes them
before any rank starts, each rank before it builds anything."""

import os
from types import SimpleNamespace

from mindspeed_ms.config import fit_to_world, require_startable
from mindspeed_ms.config.argument_table import row_at
from mindspeed_ms.config.model_description import describe_model, vocab_size_of
from mindspeed_ms.config.same_model import differences
from mindspeed_ms.config.sections.field import option_of
from mindspeed_ms.core import comm
from mindspeed_ms.core.device import cards_to_use, request_device
from mindspeed_ms.core.dist_checkpointing import folders, job_lock
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import OPTIMIZER_PREFIX
from mindspeed_ms.core.logging import logger
from mindspeed_ms.core.optimizer.optimizer_param_scheduler import OptimizerParamScheduler
from mindspeed_ms.layout.describers.gpt import OUTPUT_LAYER, REWARD_HEAD
from mindspeed_ms.layout.describers.lora import is_lora
from mindspeed_ms.layout.errors import LayoutError
from mindspeed_ms.layout.parameters import describe_whole_model
from mindspeed_ms.layout.ranks import world_unit_of
from mindspeed_ms.layout.vocabulary import padded_vocab_size
from mindspeed_ms.models.adapters import has_base
from mindspeed_ms.models.reward_head import has_reward_head, without_critic
from mindspeed_ms.training.tensorboard import require_tensorboard

_T, _D, _O = "training_config", "dataset_config", "optimizer_config"
_SHOWN = 3  # tensors
_LENGTH = (f"{_T}.training_iters", f"{_D}.train_samples", f"{_D}.global_batch_size")
_DECAY = (f"{_O}.lr_decay_iters", f"{_O}.lr_decay_samples", *_LENGTH)
# settings that a value of the schedule follows from
_CAUSES = {
    "max_lr": (f"{_O}.learning_rate",),
    "min_lr": (f"{_O}.min_lr",),
    "lr_warmup_steps": (
        *(f"{_O}.lr_warmup_{unit}" for unit in ("iters", "samples", "fraction")),
        *(f"{_D}.global_batch_size", *_DECAY),
    ),
    "lr_decay_steps": _DECAY,
    "lr_decay_style": (f"{_O}.lr_decay_style",),
    "start_wd": (f"{_O}.start_weight_decay", f"{_O}.weight_decay"),
    "end_wd": (f"{_O}.end_weight_decay", f"{_O}.weight_decay"),
    "wd_incr_steps": _LENGTH,
    "wd_incr_style": (f"{_O}.weight_decay_incr_style",),
}


def check_start(all_config):
    """Find what would stop a training, before its ranks start.

    Args:
        all_config (AllConfig): read by a reader; changed by `fit_to_world`.

    Returns:
        int: number of ranks to start.

    Raises:
        ConfigError, CheckpointError, DeviceError, OSError, ValueError: one message with the name and the value to change.
    """
    training = all_config.training_config
    require_startable(all_config)
    request_device(training.device_target)
    world_size = ranks_to_start(all_config.parallel_config)
    fit_to_world(all_config, world_size)
    require_tensorboard(training)
    _check_folders(training)
    _check_checkpoint(all_config)
    return world_size


def ranks_to_start(parallel):
    """Number of ranks (int): the world size that was given, else as many as the layout needs, on Ascend as many as there are
    cards.

    Raises:
        ValueError: the cards are too few for the layout.
    """
    unit, cards = world_unit_of(parallel), cards_to_use()
    if parallel.world_size or cards is None:
        return parallel.world_size or unit
    if cards < unit:
        raise ValueError(
            f"the layout needs a multiple of {unit} ranks, and this machine has {cards} cards: give smaller parallel sizes, "
            f"or start on several machines with --world {unit} and LOCAL_WORKER_NUM, NODE_RANK, MASTER_ADDR and MASTER_PORT "
            "on each of them."
        )
    return cards // unit * unit


def _check_folders(training):
    starts_here = training.resume_training and training.load_checkpoint == training.output_dir
    if training.load_checkpoint and not starts_here and not os.path.isdir(training.load_checkpoint):
        what = "a file, not a folder" if os.path.exists(training.load_checkpoint) else "there is no such folder"
        raise FileNotFoundError(f"load_checkpoint (--load) is {training.load_checkpoint}: {what}.")
    try:
        os.makedirs(training.output_dir, exist_ok=True)
    except OSError as error:
        raise OSError(f"output_dir (--save) is {training.output_dir}: the folder cannot be made ({error.strerror}).") from error
    if not os.access(training.output_dir, os.W_OK):
        raise PermissionError(f"output_dir (--save) is {training.output_dir}: the folder cannot be written.")
    if training.save_enabled and not training.skip_train:
        job_lock.check_free(training.output_dir)


def _check_checkpoint(all_config):
    """Check the checkpoint that the run would start from."""
    training = all_config.training_config
    wanted = training.resume_training and not training.finetune
    folder, resumes = folders.checkpoint_to_start_from(
        training.load_checkpoint, training.output_dir, training.pretrained_checkpoint, wanted
    )
    schedule_of(all_config)
    if folder is None:
        return
    folders.restore_replaced(folder)
    check_resumed(*folders.newest_manifest(folder, training.ckpt_step, all_config), all_config, resumes, True)


def check_resumed(path, manifest, all_config, resumes, is_gpt=False):
    """Compare the checkpoint that a run starts from with its configuration, before anything is built.

    Args:
        path (str): folder of one complete checkpoint.
        manifest (Manifest): its manifest.
        all_config (AllConfig): of this run, fitted to its world.
        resumes (bool): the training goes on; else it takes the weights only.
        is_gpt (bool): the model is the configuration's GPTModel, whose tensors the checkpoint must have.

    Raises:
        CheckpointError: it is of another model, or has another vocabulary; or its schedule is another one and nothing says
            which of the two to take.
    """
    training = all_config.training_config
    resumes = resumes and not manifest.has_only_weights
    if resumes:
        _check_stage(path, manifest, all_config)
    if training.load_strict:
        _check_model(path, manifest, all_config, resumes, is_gpt)
    _check_vocabulary(path, manifest, all_config)
    if resumes and not training.no_load_optim and manifest.states.get("opt_param_scheduler"):
        _check_schedule(path, manifest, all_config)


def _check_model(path, manifest, all_config, resumes, is_gpt):
    own = all_config.to_dict()
    found = differences(manifest.args, own) if resumes else []
    tensors = _other_tensors(manifest, all_config)
    if tensors:
        found = [*found, *(item for item in differences(manifest.args, own, with_shapes=True) if item not in found)]
    found = [item for item in found if not _follows_from_others(all_config, item[0])] or found
    if not found and not (tensors and is_gpt):
        return
    listed = "; ".join(f"{_written(all_config, name)} is {now!r} here and {before!r} there" for name, before, now in found)
    listed = listed or tensors
    elsewhere = "" if all_config.training_config.load_checkpoint else "Save elsewhere (--save), "
    instead = "load its weights alone (--finetune), " if resumes and not tensors else ""
    advice = f"{elsewhere}take the checkpoint's values (--use-checkpoint-args), {instead}or set load_strict: False"
    raise CheckpointError(f"{path} holds another model: {listed}. {advice[0].upper()}{advice[1:]} (--load-strict false).")


def _check_stage(path, manifest, all_config):
    """Raise CheckpointError if the training that would go on is one of another stage."""
    saved, now = manifest.args.get("training_config") or {}, all_config.training_config.stage
    before = saved.get("stage", now)  # other programs and older versions do not say it
    if before != now:
        texts = [f"of stage {stage}" if stage else "a pretraining" for stage in (before, now)]
        raise CheckpointError(
            f"{path} holds a training {texts[0]}, and this one is {texts[1]} ({_written(all_config, f'{_T}.stage')}): start "
            "from its weights (--pretrained-checkpoint, or --finetune with --load) and save elsewhere (--save)."
        )


def _check_vocabulary(path, manifest, all_config):
    """Raise CheckpointError if the rows of the vocabulary differ by more than padding, as `load_tensors` does later."""
    rows = {stored.shape[0] for stored in manifest.tensors.values() if stored.grouping == "vocab"}
    before, now = max(rows, default=0), all_config.model_config.vocab_size
    needed = max(vocab_size_of(all_config), manifest.vocab_size or 0)
    if not before or before == now or needed <= min(before, now):
        return
    names = (f"{_D}.vocab_size", "model_config.vocab_size")
    name = next((name for name in names if all_config.settings is not None and all_config.settings.was_set(name)), names[1])
    if now > before:
        advice = (
            f"set it, or a tokenizer, to at most {before} ids (--padded-vocab-size {before}), or give the model more rows "
            f"first: convert_ckpt.py --load-dir {path} --save-dir NEW --save-model-type native --make-vocab-size-divisible-by "
            f"{now}"
        )
    else:
        size = all_config.parallel_config.tensor_model_parallel_size
        advice = f"keep all of its {needed} ids (--padded-vocab-size {padded_vocab_size(before, 1, size)})"
    raise CheckpointError(
        f"{path} has {before} rows of vocabulary, the model here {now} ({_written(all_config, name)}): {advice}, or take the "
        "checkpoint's (--use-checkpoint-args)."
    )


def _other_tensors(manifest, all_config):
    """How the weights differ from the model's in names and shapes, rows of the vocabulary aside (str); "" if they fit."""
    try:
        own = {entry.name: entry for entry in describe_whole_model(describe_model(all_config)) if entry.shared_with is None}
    except LayoutError:
        return ""  # the layout reports it
    if not any(name.startswith(f"{REWARD_HEAD}.") for name in own):
        manifest = without_critic(manifest)
    stored = {key: one for key, one in manifest.tensors.items() if not key.startswith(OPTIMIZER_PREFIX)}
    if all_config.lora_config.use_lora:  # a base has no adapters, and adapters may be alone: `adapter_start` compares them
        own = {name: one for name, one in own.items() if not is_lora(name) and has_base(manifest)}
        stored = {key: one for key, one in stored.items() if not is_lora(key)}
    if any(name.startswith(f"{REWARD_HEAD}.") for name in own) and not has_reward_head(manifest):  # it starts anew
        own = {name: one for name, one in own.items() if not name.startswith(f"{REWARD_HEAD}.")}
        stored = {key: one for key, one in stored.items() if key != OUTPUT_LAYER or key in own}
    shapes = {name: (tuple(own[name].sharding.global_shape), tuple(stored[name].shape)) for name in own if name in stored}
    other = [
        f"{name} is {list(now)} here and {list(before)} there"
        for name, (now, before) in shapes.items()
        if now != before and not (own[name].grouping == "vocab" and now[1:] == before[1:])  # `_check_vocabulary` compares rows
    ]
    parts = (
        ("", other),
        ("it does not have ", [name for name in own if name not in stored]),
        ("it also has ", [name for name in stored if name not in own]),
    )
    return "; ".join(f"{title}{_some(names)}" for title, names in parts if names)


def _some(names):
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def schedule_of(all_config):
    """The schedule (OptimizerParamScheduler without an optimizer) of a run; None if its length follows from the data.

    Raises:
        ValueError: settings of the schedule that contradict each other.
    """
    training, dataset = all_config.training_config, all_config.dataset_config
    batch = dataset.global_batch_size
    length = training.training_iters * batch if training.training_iters else dataset.train_samples
    if not length:
        return None
    return OptimizerParamScheduler.from_config(SimpleNamespace(param_groups=[]), all_config.optimizer_config, batch, length)


def _check_schedule(path, manifest, all_config):
    settings, schedule = all_config.optimizer_config, schedule_of(all_config)
    if schedule is None or settings.override_opt_param_scheduler:
        return
    saved, own = manifest.states["opt_param_scheduler"], schedule.state_dict()
    changed = [name for name in _CAUSES if name in saved and saved[name] != own[name]]
    if settings.use_checkpoint_opt_param_scheduler:
        styles = {"lr_decay_steps": "lr_decay_style", "wd_incr_steps": "wd_incr_style"}  # constant: it does not count
        changed = [name for name in changed if saved.get(styles.get(name)) != "constant"]
    if not changed:
        return
    listed = "; ".join(_cause(name, saved, own, manifest, all_config) for name in changed)
    listed = "; ".join(dict.fromkeys(listed.split("; ")))
    if not settings.use_checkpoint_opt_param_scheduler:
        raise CheckpointError(
            f"{path} was trained with another schedule: {listed}. Add --override-opt-param-scheduler for the values given "
            "here, or --use-checkpoint-opt-param-scheduler for the checkpoint's."
        )
    if not comm.is_initialized() or comm.get_rank() != 0:
        return  # rank 0 tells it
    ends = own["lr_decay_steps"] > saved["lr_decay_steps"] and "lr_decay_steps" in changed
    logger.warning(
        "the schedule of %s goes on, not the one given here: %s.%s --override-opt-param-scheduler takes the values given here",
        path,
        listed,
        " The learning rate stays at its lowest where the checkpoint's schedule has ended." if ends else "",
    )


def _cause(name, saved, own, manifest, all_config):
    """What makes a value of the schedule another one, in the user's words: settings with both values."""
    found = []
    for path in _CAUSES[name]:
        section, key = path.split(".")
        before, now = (manifest.args.get(section) or {}).get(key), getattr(all_config, section)[key]
        if key in (manifest.args.get(section) or {}) and before != now:
            found.append(f"{_written(all_config, path)} is {now!r} here and {before!r} there")
    return "; ".join(found) or f"{name} is {own[name]!r} here and {saved[name]!r} there"


def _follows_from_others(all_config, path):
    settings, row = all_config.settings, row_at(path)
    return settings is not None and not settings.was_set(path) and row is not None and bool(option_of(row.info).derived)


def _written(all_config, path):
    """A setting as the user wrote it, else its flag."""
    settings, row = all_config.settings, row_at(path)
    if settings is not None and settings.was_set(path):
        return settings.by_path[path].key
    return row.flags[0] if row is not None and row.flags else path
