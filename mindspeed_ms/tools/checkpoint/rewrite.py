"""Reshard and merge: rewrite a checkpoint for another layout, or as whole tensors.

A training loads a checkpoint of any layout as it is, each rank reading only its own bytes. To cut it anew is worth it for
a job that starts often on a slow disk (each rank then reads one file from end to end instead of many short runs of
bytes), and for other programs, which need whole tensors.
"""

import json
import os
import shutil
import time
from math import prod

import numpy as np
from tqdm import tqdm

from mindspeed_ms.core.dist_checkpointing import durable, folders, job_lock
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError, DamagedCheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import FORMAT, OPTIMIZER_PREFIX, Manifest, StoredTensor, digest, whole_slice
from mindspeed_ms.core.dist_checkpointing.new_folder import new_folder
from mindspeed_ms.core.dist_checkpointing.plain_weights import INDEX_FILE
from mindspeed_ms.core.dist_checkpointing.reader import numpy_dtype
from mindspeed_ms.core.dist_checkpointing.shard_file import Entry, write_shard
from mindspeed_ms.layout.sharding import ParameterSharding
from mindspeed_ms.tools.checkpoint.verify import problems_of

GIGABYTE = 10**9


def check_source(reader):
    """Verify a checkpoint before its copy gets new check sums.

    Raises:
        DamagedCheckpointError: something is damaged.
    """
    problems = problems_of(reader)
    if problems:
        shown = "; ".join(problems[:5]) + (" ..." if len(problems) > 5 else "")
        raise DamagedCheckpointError(f"{reader.folder} is damaged: {shown}.")


def whole_cut(manifest, most_bytes, weights_only=False):
    """Lists [(key, FlatSlice)] of whole tensors, one per file of at most `most_bytes` (a larger tensor has its own file).

    With `weights_only` neither optimizer states nor rows that pad the vocabulary.
    """
    files, size = [], 0
    for key, stored in manifest.tensors.items():
        if key.startswith(OPTIMIZER_PREFIX) and weights_only:
            continue
        shape = stored.shape
        if weights_only and stored.grouping == "vocab":
            shape = (min(shape[0], manifest.vocab_size or shape[0]), *shape[1:])
        nbytes = prod(shape) * stored.itemsize
        if not files or size + nbytes > most_bytes:
            files.append([])
            size = 0
        files[-1].append((key, whole_slice(ParameterSharding.replicated(shape))))
        size += nbytes
    return files


def _is_left_behind(name):
    """Whether a file is what a killed save, or a file system, leaves in a folder that counts as empty."""
    return name.endswith(".incomplete") or name.startswith((job_lock.LOCK_FILE, ".")) or name == "lost+found"


def write_checkpoint(reader, folder, cut, ahead=False):
    """Write `iter_...` into a folder with one file per list of `cut`; holds one part of a tensor at a time.

    Random states and the layout that they belong to stay those of the run that saved.

    Args:
        reader (CheckpointReader): what to write.
        folder (str): gets the checkpoint and a tracker; appears complete or not at all.
        cut (list[list[(key, FlatSlice)]]): parts of each file; a list may be empty.
        ahead (bool): read the next part while one is written, which holds two.

    Returns:
        str: the checkpoint's folder.

    Raises:
        CheckpointError: the folder is not empty, the disk is too small, or the source is damaged.
    """
    source = reader.manifest
    if folders.is_checkpoint_folder(folder):
        raise CheckpointError(f"{folder} is or would be a checkpoint itself: give the folder that is to hold it.")
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise CheckpointError(f"{folder} is a file: give a folder that is new or empty.")
    if folders.has_checkpoints(folder):
        raise CheckpointError(f"{folder} holds checkpoints already: choose a folder that is new or empty.")
    if os.path.isdir(folder) and not all(map(_is_left_behind, os.listdir(folder))):
        raise CheckpointError(f"{folder} holds other files: choose a folder that is new or empty.")
    _check_space(folder, reader, cut)
    target = Manifest(
        source.iteration,
        states=source.states,
        layout=source.layout,
        vocab_size=source.vocab_size,
        args=source.args,
        fingerprint=source.fingerprint,
        saved_at=time.time(),
        foreign=source.foreign,
    )
    temporary = folders.prepare(folder, source.iteration)
    try:
        if folders.has_checkpoints(folder):  # another job's, written since the first look
            raise CheckpointError(f"{folder} holds checkpoints already: choose a folder that is new or empty.")
        with progress_bar(_bytes_of(reader, cut)) as bar:
            for number, parts in enumerate(cut):
                if parts:
                    _write_parts(reader, target, temporary, f"state_{number:05d}.safetensors", parts, bar, ahead)
        for number, entry in enumerate(source.ranks):
            target.ranks.append(_copy_rank(reader, number, entry, temporary))
        folders.publish(folder, temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        job_lock.release(folder)
    return folders.checkpoint_folder(folder, source.iteration)


def write_weights(reader, folder, most_bytes):
    """Write whole weights for other programs: `model-0000i-of-0000n.safetensors` and `model.safetensors.index.json`.

    Args:
        reader (CheckpointReader): what to write.
        folder (str): must not exist; appears complete or not at all.
        most_bytes (int): of a file.

    Returns:
        list[str]: names of the files.

    Raises:
        CheckpointError: the folder exists, the disk is too small, or the source is damaged.
    """
    if os.path.lexists(folder):
        raise CheckpointError(f"{folder} exists already: choose a new folder.")
    cut = whole_cut(reader.manifest, most_bytes, weights_only=True)
    _check_space(folder, reader, cut)
    names, places, total = [], {}, 0
    with new_folder(folder) as temporary, progress_bar(_bytes_of(reader, cut)) as bar:
        for number, parts in enumerate(cut):
            names.append(f"model-{number + 1:05d}-of-{len(cut):05d}.safetensors")
            entries = [_entry(reader, key, key, part, bar) for key, part in parts]
            write_shard(os.path.join(temporary, names[-1]), entries)
            places.update((key, names[-1]) for key, _ in parts)
            total += sum(entry.nbytes for entry in entries)
        metadata = {"format": FORMAT, "total_size": total, "iteration": reader.manifest.iteration}
        index = {"metadata": metadata, "weight_map": places}
        durable.write_file(os.path.join(temporary, INDEX_FILE), json.dumps(index, indent=1).encode())
    return names


def progress_bar(total):
    """tqdm bar over the bytes that are written; shows nothing beside a terminal."""
    return tqdm(total=total, desc="writing", unit="B", unit_scale=True, disable=None, leave=False)


def _bytes_of(reader, cut):
    return sum((part.stop - part.start) * reader.tensor(key).itemsize for parts in cut for key, part in parts)


def _check_space(folder, reader, cut):
    check_space(folder, _bytes_of(reader, cut))


def check_space(folder, needed):
    """Raise CheckpointError if `needed` bytes do not fit on the disk of a folder, which need not exist."""
    place = os.path.abspath(folder)
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    free = shutil.disk_usage(place).free
    if needed > free:
        raise CheckpointError(f"{folder} needs {needed / GIGABYTE:.2f} GB, but its disk has {free / GIGABYTE:.2f} GB left.")


def _write_parts(reader, target, folder, name, parts, bar, ahead):
    names, entries = {}, []
    for key, part in parts:
        count = names[key] = names.get(key, 0) + 1
        entries.append(_entry(reader, key if count == 1 else f"{key}#{count}", key, part, bar))
    target.files[name] = write_shard(os.path.join(folder, name), entries, ahead=ahead)
    for (key, part), entry in zip(parts, entries):
        stored = reader.tensor(key)
        tensor = target.tensors.setdefault(key, StoredTensor(stored.shape, stored.dtype, stored.grouping))
        tensor.pieces.append(entry.piece(part, name))


def _entry(reader, name, key, part, bar):
    """Shard file entry that reads its values when it is written, and then moves the bar."""
    stored = reader.tensor(key)
    is_flat = (part.start, part.stop) != (0, part.sharding.numel)
    count = part.stop - part.start

    def data():
        values = np.empty(count, numpy_dtype(stored.dtype))
        missing = reader.read(key, part, values)
        if missing:
            raise CheckpointError(f"{reader.folder} stores no elements {missing[0][0]} to {missing[0][1]} of {key}.")
        bar.update(values.nbytes)
        return values.view(np.uint8)

    return Entry(name, stored.dtype, (count,) if is_flat else part.sharding.local_shape, count * stored.itemsize, data)


def _copy_rank(reader, number, entry, folder):
    """Copy the states of a rank, checked; returns its line of the manifest."""
    data = json.dumps(reader.rank_states(number)).encode()
    name = f"rank_{number:05d}.json"
    durable.write_file(os.path.join(folder, name), data)
    return {**entry, "file": name, "bytes": len(data), "xxhash": digest(data)}
