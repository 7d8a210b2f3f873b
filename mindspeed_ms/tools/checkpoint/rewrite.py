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

from tqdm import tqdm

from mindspeed_ms.core.dist_checkpointing import durable, folders, job_lock
from mindspeed_ms.core.dist_checkpointing.by_tensor import Part, write_shards
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError, DamagedCheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import FORMAT, OPTIMIZER_PREFIX, Manifest, StoredTensor, digest, whole_slice
from mindspeed_ms.core.dist_checkpointing.new_folder import new_folder
from mindspeed_ms.core.dist_checkpointing.plain_weights import INDEX_FILE
from mindspeed_ms.core.dist_checkpointing.shard_file import Entry
from mindspeed_ms.layout.sharding import ParameterSharding
from mindspeed_ms.tools.checkpoint import verify

GIGABYTE = 10**9


class CheckedSource:
    """Context manager: a checkpoint is verified while its copy, which gets new check sums, is written.

    Called after all is written and before the copy is published, it compares the check sums of what was read, and reads the
    rest. An error of the block is replaced by one about the damage that led to it.

    Args:
        reader (CheckpointReader): of the checkpoint.

    Raises:
        DamagedCheckpointError: something is damaged.
    """

    def __init__(self, reader):
        self.reader, self._is_checked = reader, False

    def __enter__(self):
        self._raise(verify.problems_of_structure(self.reader))
        self.reader.passed = {}
        return self

    def __call__(self):
        self._is_checked = True
        self._raise(verify.check_sums(self.reader))

    def __exit__(self, kind, error, trace):
        try:
            if isinstance(error, CheckpointError) and not self._is_checked:
                self()
        finally:
            self.reader.passed = None

    def _raise(self, problems):
        if problems:
            self.reader.check_still_there()
            shown = "; ".join(problems[:5]) + (" ..." if len(problems) > 5 else "")
            raise DamagedCheckpointError(f"{self.reader.folder} is damaged: {shown}.")


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


def write_checkpoint(reader, folder, cut, workers=1, check=None):
    """Write `iter_...` into a folder with one file per list of `cut`; holds one tensor for each worker.

    Random states and the layout that they belong to stay those of the run that saved.

    Args:
        reader (CheckpointReader): what to write.
        folder (str): gets the checkpoint and a tracker; appears complete or not at all.
        cut (list[list[(key, FlatSlice)]]): parts of each file; a list may be empty.
        workers (int): threads.
        check (Optional[CheckedSource]): called before the checkpoint appears.

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
    is_new = not os.path.lexists(folder)
    temporary = folders.prepare(folder, source.iteration)
    try:
        if folders.has_checkpoints(folder):  # another job's, written since the first look
            raise CheckpointError(f"{folder} holds checkpoints already: choose a folder that is new or empty.")
        with progress_bar(_bytes_of(reader, cut)) as bar:
            _write_cut(reader, target, temporary, cut, workers, bar)
        for number, entry in enumerate(source.ranks):
            target.ranks.append(_copy_rank(reader, number, entry, temporary))
        if check is not None:
            check()
        folders.publish(folder, temporary, target)
    except BaseException:
        shutil.rmtree(folder if is_new else temporary, ignore_errors=True)
        raise
    finally:
        job_lock.release(folder)
    return folders.checkpoint_folder(folder, source.iteration)


def write_weights(reader, folder, most_bytes, workers=1, check=None):
    """Write whole weights for other programs: `model-0000i-of-0000n.safetensors` and `model.safetensors.index.json`.

    Args:
        reader (CheckpointReader): what to write.
        folder (str): must not exist; appears complete or not at all.
        most_bytes (int): of a file.
        workers, check: see `write_checkpoint`.

    Returns:
        list[str]: names of the files.

    Raises:
        CheckpointError: the folder exists, the disk is too small, or the source is damaged.
    """
    if os.path.lexists(folder):
        raise CheckpointError(f"{folder} exists already: choose a new folder.")
    cut = whole_cut(reader.manifest, most_bytes, weights_only=True)
    _check_space(folder, reader, cut)
    names = [f"model-{number + 1:05d}-of-{len(cut):05d}.safetensors" for number in range(len(cut))]
    places = {key: name for name, parts in zip(names, cut) for key, _ in parts}
    with new_folder(folder) as temporary:
        shards = {os.path.join(temporary, name): _parts(reader, parts) for name, parts in zip(names, cut)}
        with progress_bar(_bytes_of(reader, cut)) as bar:
            write_shards(reader, shards, workers, bar.update)
        if check is not None:
            check()
        metadata = {"format": FORMAT, "total_size": _bytes_of(reader, cut), "iteration": reader.manifest.iteration}
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
        raise CheckpointError(f"{folder} needs {needed:,} bytes, but its disk has {free:,} left.")


def _write_cut(reader, target, folder, cut, workers, bar):
    """Write a file for each list of `cut` that is not empty, and enter it into the manifest `target`."""
    files = {f"state_{number:05d}.safetensors": _parts(reader, parts) for number, parts in enumerate(cut) if parts}
    shards = {os.path.join(folder, name): parts for name, parts in files.items()}
    sizes = write_shards(reader, shards, workers, bar.update, with_sums=True)
    for (name, parts), target.files[name] in zip(files.items(), sizes):
        for part in parts:
            stored = reader.tensor(part.key)
            tensor = target.tensors.setdefault(part.key, StoredTensor(stored.shape, stored.dtype, stored.grouping))
            tensor.pieces.append(part.entry.piece(part.slice, name))


def _parts(reader, parts):
    """Part of each (key, FlatSlice) of a file."""
    names, result = {}, []
    for key, part in parts:
        stored, numel = reader.tensor(key), part.stop - part.start
        count = names[key] = names.get(key, 0) + 1
        shape = part.sharding.local_shape if numel == part.sharding.numel else (numel,)
        entry = Entry(key if count == 1 else f"{key}#{count}", stored.dtype, shape, numel * stored.itemsize)
        result.append(Part(entry, key, part))
    return result


def _copy_rank(reader, number, entry, folder):
    """Copy the states of a rank, checked; returns its line of the manifest."""
    data = json.dumps(reader.rank_states(number)).encode()
    name = f"rank_{number:05d}.json"
    durable.write_file(os.path.join(folder, name), data)
    return {**entry, "file": name, "bytes": len(data), "xxhash": digest(data)}
