"""Checkpoints of a training's state: `save_checkpoint`, `load_checkpoint`, random states."""

import os
import random
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

import numpy as np

from mindspeed_ms.config.model_description import vocab_size_of
from mindspeed_ms.core import comm, parallel_state, rng, storage
from mindspeed_ms.core.dist_checkpointing import job_lock
from mindspeed_ms.core.dist_checkpointing.agreement import on_all_ranks, on_rank_zero
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.folders import check_writable, hold
from mindspeed_ms.core.dist_checkpointing.load import load_tensors
from mindspeed_ms.core.dist_checkpointing.manifest import Manifest
from mindspeed_ms.core.dist_checkpointing.save import from_plain, plain
from mindspeed_ms.core.dist_checkpointing.state import model_tensors, optimizer_tensors
from mindspeed_ms.core.tensor_parallel.random import model_parallel_manual_seed
from mindspeed_ms.layout.describers.lora import is_lora
from mindspeed_ms.models.adapters import has_adapters, has_base
from mindspeed_ms.models.reward_head import has_reward_head, is_reward_head
from mindspeed_ms.training.utils import print_rank_0

_RNG_SIZES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert")


def check_output_folder(folder, saves=False, makes=True):
    """Check at the start, not at the first save, that the folder of a run can be written.

    Args:
        folder (str): output_dir.
        saves (bool): this job saves checkpoints there: no other one may, until `release_output_folders`.
        makes (bool): make it if it does not exist; else that is left to a later call.

    Raises:
        CheckpointError: on all ranks: it cannot be written, or another job saves there.
    """

    def look():
        if makes or os.path.isdir(folder):
            (hold if saves else check_writable)(folder)

    on_rank_zero(f"output_dir (--save) {folder} cannot be used", look)


def release_output_folders():
    """Unlock the output folders at the end of a training, for saves of other jobs."""
    job_lock.release()


def save_checkpoint(
    saver,
    train_state,
    model,
    optimizer=None,
    opt_param_scheduler=None,
    data_position=None,
    save_rng=True,
    all_config=None,
    fingerprint=None,
    foreign=None,
    base=None,
):
    """Save the state of a training; every rank calls it.

    Args:
        saver (CheckpointSaver): where to and how.
        train_state (TrainState): iteration and counters.
        model (list[ShardedModel]): this rank's chunks.
        optimizer (Optional[Optimizer]): None: left out.
        opt_param_scheduler (Optional[OptimizerParamScheduler]): None: left out.
        data_position (Optional[dict]): position of this rank's data.
        save_rng (bool): with random states.
        all_config (Optional[AllConfig]): kept in the checkpoint.
        fingerprint (Optional[dict]): of tokenizer and data, kept in the checkpoint; only rank 0 needs it.
        foreign (Optional[dict]): `Manifest.foreign` of the checkpoint that the training started from.
        base (Optional[dict]): with `path`: only adapters are saved, and this with them.

    Raises:
        CheckpointError: on all ranks, if one of them could not write; nothing that existed is changed.
    """
    for chunk in model:
        chunk.finish_param_sync()
    weights = [tensor for tensor in model_tensors(model) if base is None or is_lora(tensor.key)]
    tensors = weights + (list(optimizer_tensors(optimizer)) if optimizer is not None else [])
    states = {
        "train_state": asdict(train_state),
        "opt_param_scheduler": opt_param_scheduler.state_dict() if opt_param_scheduler is not None else None,
        "optimizer": optimizer.counters() if optimizer is not None else None,
    }
    if base is not None:
        states["base"] = base
    manifest = Manifest(
        train_state.iteration,
        states=plain(states),
        layout=layout_sizes(),
        vocab_size=vocab_size_of(all_config) if all_config is not None else None,
        args=_plain_config(all_config),
        fingerprint=fingerprint,
        foreign=foreign or {},
    )
    saver.save(
        manifest,
        tensors,
        {"coordinates": _coordinates(), "data_position": data_position, "rng": random_states() if save_rng else None},
    )


def load_checkpoint(reader, model, optimizer=None, opt_param_scheduler=None, strict=True, vocab_size=None):
    """Load a checkpoint of any layout into a model and, unless None, optimizer and schedule.

    Args:
        reader (CheckpointReader): from `open_checkpoint`.
        strict, vocab_size: see `load_tensors`.

    Raises:
        CheckpointError: on all ranks: it does not fit, has no optimizer state, or is damaged.
        ValueError: the schedule's settings differ (see `OptimizerParamScheduler.load_state_dict`).
    """
    states = reader.manifest.states
    if optimizer is not None and not states.get("optimizer"):
        raise CheckpointError(
            f"{reader.folder} has no optimizer state: set no_load_optim (--no-load-optim) to start the optimizer afresh."
        )
    weights = [tensor for tensor in model_tensors(model) if _is_held(reader.manifest, tensor.key)]
    tensors = weights + (list(optimizer_tensors(optimizer)) if optimizer is not None else [])
    load_tensors(reader, tensors, strict, vocab_size)
    with whole_parameters(model):
        pass  # parameters that are gathered from the ranks' parts are gathered anew after this
    if optimizer is None:
        return
    optimizer.load_counters(states["optimizer"])
    if opt_param_scheduler is not None:
        opt_param_scheduler.load_state_dict(states["opt_param_scheduler"])


def _is_held(manifest, key):
    """Whether a checkpoint has weights of this kind: a base has no adapters, adapters may be alone, and a reward model starts
    from a language model, which has another head."""
    if is_reward_head(key) and not has_reward_head(manifest):
        return False
    return (has_adapters if is_lora(key) else has_base)(manifest)


def load_adapters(adapters, model):
    """Fill the adapters of a model from `models.adapters.Adapters`, read whole on every rank."""
    for tensor in model_tensors(model):
        if is_lora(tensor.key):
            values = np.ascontiguousarray(tensor.slice.split(adapters.tensors[tensor.key]))
            shape = tuple(tensor.tensor.shape)
            storage.write(tensor.tensor, storage.from_array(values.reshape(shape)).astype(tensor.tensor.dtype))
    with whole_parameters(model):
        pass  # see `load_checkpoint`


def restore_random_states(reader, seed):
    """Restore the random states if the model parallel sizes are unchanged, else start new ones.

    Ranks of a data-parallel group that has grown take the states of its first rank, which are equal on all of them.
    """
    layout, saved = layout_sizes(), reader.manifest.layout
    changed = [name for name in _RNG_SIZES if layout[name] != saved.get(name)]
    if reader.manifest.ranks and not changed:
        states = _rank_states(reader, {name: value for name, value in _coordinates().items() if name != "dp"})["rng"]
        if states is None:
            print_rank_0("random states start anew: the checkpoint has none")
        else:
            set_random_states(states)
        return
    # a stream of its own: the numbers of the first iterations must not come again
    model_parallel_manual_seed(seed + 7919 * (1 + reader.manifest.iteration))
    reason = f"the sizes of {', '.join(changed)} parallelism differ from the checkpoint's"
    if not reader.manifest.ranks:
        reason = "the checkpoint has none that can be read"
    print_rank_0(f"random states start anew: {reason}")


def saved_data_position(reader):
    """Saved data position of this data-parallel rank; that of the first one if there were fewer."""
    if not reader.manifest.ranks:  # written by upstream
        state = reader.manifest.states["train_state"]
        return {"train": {"epoch": state["epoch"], "batches": state["step_in_epoch"]}}
    before, now = reader.manifest.layout.get("data"), layout_sizes()["data"]
    if before != now:
        print_rank_0(
            f"the checkpoint has {before} data-parallel ranks, this run {now}: data that is no samples by index continues "
            "at the batch of the first of them"
        )
    return _rank_states(reader, {})["data_position"] or {}


def _rank_states(reader, needed):
    """States of the saved rank that matches `needed` and is nearest to this rank's place."""
    own = _coordinates()

    def distance(number):
        saved = reader.manifest.ranks[number]["coordinates"]
        return (saved["dp"] != own["dp"], *(saved[name] != own[name] for name in sorted(own)), number)

    def fits(number):
        saved = reader.manifest.ranks[number]["coordinates"]
        return all(saved[name] == value for name, value in needed.items())

    numbers = [number for number in range(len(reader.manifest.ranks)) if fits(number)]
    states = []
    on_all_ranks("the checkpoint was not loaded", lambda: states.append(reader.rank_states(min(numbers, key=distance))))
    return from_plain(states[0])


@contextmanager
def whole_parameters(model, changes=False):
    """Inside, all parameters of the chunks are in full; see `ShardedModel.whole_parameters`."""
    with ExitStack() as stack:
        for chunk in model:
            stack.enter_context(chunk.whole_parameters(changes))
        yield


def random_states():
    """Python's, numpy's and the named random states of this rank."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "tracker": rng.get_rng_tracker().get_states(),
    }


def set_random_states(states):
    """Restore `random_states()`."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(states["numpy"])
    rng.get_rng_tracker().set_states(states["tracker"])


def layout_sizes():
    """Parallel sizes of this run, as a manifest holds them."""
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "context": parallel_state.get_context_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
        "world": comm.get_world_size(),
    }


def _plain_config(all_config):
    return plain(all_config.to_dict()) if all_config is not None else {}


def _coordinates():
    place = parallel_state.get_coordinates()
    return {name: getattr(place, name) for name in ("tp", "pp", "dp", "cp", "ep")}
