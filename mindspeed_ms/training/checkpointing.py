"""Saving and loading a training.

    output_dir/latest_checkpointed_iteration.txt      written last
    output_dir/iter_0000010/model_TT_PPP.npz          weights, optimizer, schedule (tensor rank TT, pipeline rank PPP)
    output_dir/iter_0000010/rank_00000.npz            random states, position in the data

A folder is written under a temporary name and renamed when every rank has finished, so a checkpoint is complete or
absent.
"""
import os
import random
import re
import shutil
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

import numpy as np

from mindspeed_ms.core import comm, parallel_state, rng, storage
from mindspeed_ms.core.logging import logger
from mindspeed_ms.training.checkpoint_files import CheckpointError, read_state, sync_folder, write_state, write_text

TRACKER_FILE = "latest_checkpointed_iteration.txt"
FORMAT_VERSION = 1
_FOLDER = re.compile(r"iter_(\d{7,})$")


def save_checkpoint(folder, train_state, model, optimizer=None, opt_param_scheduler=None, data_position=None,
                    keep_checkpoint_max=None, save_rng=True):
    """Save the state of a training; every rank calls it.

    Args:
        folder (str): where the checkpoints of this run are.
        train_state (TrainState): iteration and counters.
        model (list[DistributedDataParallel]): this rank's chunks.
        optimizer (Optional[MegatronOptimizer]): None: left out.
        opt_param_scheduler (Optional[OptimizerParamScheduler]): None: left out.
        data_position: where this rank's data stands.
        keep_checkpoint_max (Optional[int]): older checkpoints beyond this number are deleted once this one is complete.
        save_rng (bool): with random states.

    Raises:
        CheckpointError: on all ranks, if one of them could not write; nothing that existed is changed.
    """
    target = os.path.join(folder, f"iter_{train_state.iteration:07d}")
    temporary = f"{target}.incomplete"
    _on_rank_zero(_make_empty, temporary, folder)
    with whole_parameters(model):
        _everyone(_write_rank, temporary, train_state, model, optimizer, opt_param_scheduler, data_position, save_rng)
    _on_rank_zero(_publish, temporary, target, folder, train_state.iteration, keep_checkpoint_max)
    if comm.get_rank() == 0:
        logger.info("saved checkpoint of iteration %d to %s", train_state.iteration, target)


def _make_empty(temporary, folder):
    os.makedirs(folder, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)


def _write_rank(temporary, train_state, model, optimizer, opt_param_scheduler, data_position, save_rng):
    sharded = optimizer is not None and optimizer.is_sharded
    optimizer_state = optimizer.state_dict() if optimizer is not None else None
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
        write_state(os.path.join(temporary, model_file_name()), {
            "format_version": FORMAT_VERSION, "layout": _layout(), "train_state": asdict(train_state),
            "model": dict(named_parameters(model)),
            "optimizer": None if sharded else optimizer_state, "optimizer_is_sharded": sharded,
            "opt_param_scheduler": opt_param_scheduler.state_dict() if opt_param_scheduler is not None else None})
    write_state(os.path.join(temporary, rank_file_name()), {
        "rng": random_states() if save_rng else None, "data_position": data_position,
        "optimizer_shard": optimizer_state if sharded else None})


def _publish(temporary, target, folder, iteration, keep_checkpoint_max):
    sync_folder(temporary)
    if os.path.isdir(target):
        replaced = f"{target}.replaced"
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(target, replaced)
        os.rename(temporary, target)
        shutil.rmtree(replaced)
    else:
        os.rename(temporary, target)
    sync_folder(folder)
    write_text(os.path.join(folder, TRACKER_FILE), str(iteration))
    if keep_checkpoint_max is not None:
        # later iterations are an earlier run's and none of our business
        older = [os.path.join(folder, f"iter_{number:07d}") for number in iterations_in(folder) if number < iteration]
        older.sort(key=os.path.getmtime)
        for path in older[:max(0, len(older) + 1 - keep_checkpoint_max)]:
            shutil.rmtree(path)


def _on_rank_zero(function, *arguments):
    _everyone(function if comm.get_rank() == 0 else lambda *_: None, *arguments)


def _everyone(function, *arguments):
    """Run on this rank; if it fails on any rank, raise the same error on all."""
    failure = None
    try:
        function(*arguments)
    except Exception as error:
        failure = f"rank {comm.get_rank()}: {type(error).__name__}: {error}"
    failures = [text for text in comm.world_group().all_gather_object(failure) if text]
    if failures:
        raise CheckpointError("the checkpoint was not written: " + "; ".join(failures))


def latest_iteration(folder):
    """Iteration of the newest complete checkpoint (int), or None.

    Raises:
        CheckpointError: the tracker file holds something else than a number.
    """
    path = os.path.join(folder, TRACKER_FILE)
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        text = file.read().strip()
    if not text.isdigit():
        raise CheckpointError(f"{path} holds {text!r}: expected the number of an iteration.")
    return int(text)


def iterations_in(folder):
    """Iterations of all complete checkpoints in a folder (list[int])."""
    return [int(match[1]) for name in os.listdir(folder) if (match := _FOLDER.match(name))]


def read_checkpoint(folder, iteration=None):
    """Read this rank's state.

    Args:
        folder (str): folder of a run, or of one checkpoint.
        iteration (Optional[int]): which; None: the newest.

    Returns:
        dict: model, optimizer, opt_param_scheduler, train_state, rng, data_position; the last two None if this
            rank's file is absent (more data-parallel ranks than when it was saved).

    Raises:
        CheckpointError: none there, damaged, or of another layout.
    """
    path = find_checkpoint(folder, iteration)
    state = read_state(os.path.join(path, model_file_name()))
    if state.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format version {state.get('format_version')}: expected {FORMAT_VERSION}.")
    own = os.path.join(path, rank_file_name())
    state.update(read_state(own) if os.path.isfile(own) else {"rng": None, "data_position": None})
    if state.get("optimizer_is_sharded"):
        state["optimizer"] = state.pop("optimizer_shard", None)
    return state


def find_checkpoint(folder, iteration=None):
    """Folder of one checkpoint that this layout can read; arguments as for `read_checkpoint`.

    Raises:
        CheckpointError: none there, or one of another layout.
    """
    path = _checkpoint_path(folder, iteration)
    _check_model_files(path)
    return path


def check_complete(state, folder):
    """Raise CheckpointError if a training cannot go on from what `read_checkpoint` found: this rank's file was lost."""
    if state["data_position"] is None and comm.get_rank() < state["layout"]["world"]:
        raise CheckpointError(f"the checkpoint in {folder} has lost {rank_file_name()}, the random states and the position in "
                              "the data of this rank: bring it back, resume from another one (--ckpt-step), or start from "
                              "the weights alone (--load without --resume-training).")


def _checkpoint_path(folder, iteration):
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder} holds no checkpoint: there is no such folder.")
    if _FOLDER.match(os.path.basename(os.path.normpath(folder))):
        return folder
    number = latest_iteration(folder) if iteration is None else iteration
    if number is None:
        raise CheckpointError(f"{folder} holds no checkpoint (no {TRACKER_FILE}).")
    path = os.path.join(folder, f"iter_{number:07d}")
    if not os.path.isdir(path):
        raise CheckpointError(f"{folder} holds no checkpoint of iteration {number}: there are "
                              f"{sorted(iterations_in(folder)) or 'none'}.")
    return path


def _check_model_files(path):
    present = sorted(name for name in os.listdir(path) if name.startswith("model_"))
    layout = _layout()
    count = layout["tensor"] * layout["pipeline"]
    if model_file_name() not in present or len(present) != count:
        raise CheckpointError(f"{path} was saved by {len(present)} tensor x pipeline ranks ({', '.join(present[:4])}), "
                              f"this run has {count} (tensor {layout['tensor']}, pipeline {layout['pipeline']}): use "
                              "the same sizes.")


def restore(state, model, optimizer=None, opt_param_scheduler=None, strict=True, load_rng=True):
    """Put a state that was read into a model and, unless None, optimizer and schedule.

    Raises:
        CheckpointError: with `strict`, parameters are missing, superfluous, or of another shape.
    """
    load_parameters(model, state["model"], strict)
    if optimizer is not None:
        if state["optimizer"] is None and state.get("optimizer_is_sharded"):
            raise CheckpointError(f"the checkpoint has no optimizer shard of rank {comm.get_rank()}: it was saved by fewer "
                                  "ranks. Use as many, or set no_load_optim to start the optimizer afresh.")
        if state["optimizer"] is None:
            raise CheckpointError("the checkpoint has no optimizer state: set no_load_optim to start the optimizer "
                                  "afresh.")
        optimizer.load_state_dict(state["optimizer"])
        if opt_param_scheduler is not None:
            opt_param_scheduler.load_state_dict(state["opt_param_scheduler"])
    if load_rng and state["rng"] is not None:
        set_random_states(state["rng"])


def named_parameters(model):
    """(state-dict key, Parameter) of all chunks."""
    for chunk in model:
        yield from getattr(chunk, "module", chunk).parameters_and_names()


@contextmanager
def whole_parameters(model, changes=False):
    """Inside, all parameters of the chunks are in full; see `DistributedDataParallel.whole_parameters`."""
    with ExitStack() as stack:
        for chunk in model:
            if hasattr(chunk, "whole_parameters"):
                stack.enter_context(chunk.whole_parameters(changes))
        yield


def load_parameters(model, values, strict=True):
    """Copy values (dict of Tensors by state-dict key) into the parameters; see `restore`."""
    with whole_parameters(model, changes=True):
        _copy_parameters(dict(named_parameters(model)), values, strict)


def _copy_parameters(own, values, strict):
    missing, unexpected = sorted(set(own) - set(values)), sorted(set(values) - set(own))
    wrong = [f"{name} {tuple(values[name].shape)} instead of {tuple(own[name].shape)}" for name in own if name in values
             and tuple(values[name].shape) != tuple(own[name].shape)]
    problems = [f"{title}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}" for title, names in
                (("missing", missing), ("not in the model", unexpected), ("of another shape", wrong)) if names]
    if problems and (strict or wrong):
        raise CheckpointError(f"the checkpoint's parameters do not fit the model ({'; '.join(problems)}).")
    if problems:
        logger.warning("loaded in part (load_strict is off): %s", "; ".join(problems))
    for name, param in own.items():
        if name in values:
            storage.write(param, values[name])


def random_states():
    """Python's, numpy's and the named random states of this rank."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "tracker": rng.get_rng_tracker().get_states()}


def set_random_states(states):
    """Restore `random_states()`."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    rng.get_rng_tracker().set_states(states["tracker"])


def model_file_name():
    """Name of the file with this rank's weights."""
    return (f"model_{parallel_state.get_tensor_model_parallel_rank():02d}_"
            f"{parallel_state.get_pipeline_model_parallel_rank():03d}.npz")


def rank_file_name():
    """Name of the file with what only this rank has."""
    return f"rank_{comm.get_rank():05d}.npz"


def _layout():
    return {"tensor": parallel_state.get_tensor_model_parallel_world_size(),
            "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
            "data": parallel_state.get_data_parallel_world_size(), "world": comm.get_world_size()}
