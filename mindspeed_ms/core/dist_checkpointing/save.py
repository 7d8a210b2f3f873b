"""Saving of a checkpoint: each part of the state is written once, replicas share the work, no tensor is copied.

An asynchronous save copies this rank's share and writes it in a thread; the training calls `poll` between steps, and the
checkpoint is published when all ranks have written theirs.
"""

import json
import os
import shutil
import threading
import time

import numpy as np

from mindspeed_ms.core import comm, storage
from mindspeed_ms.core.dist_checkpointing import durable, folders, upstream_format
from mindspeed_ms.core.dist_checkpointing.agreement import agree, attempt, on_rank_zero
from mindspeed_ms.core.dist_checkpointing.manifest import OPTIMIZER_PREFIX, StoredTensor, digest
from mindspeed_ms.core.dist_checkpointing.shard_file import Entry, write_shard
from mindspeed_ms.core.logging import logger

_DOING = "the checkpoint was not written"


class CheckpointSaver:
    """Writes the checkpoints of a run; all ranks call every method together.

    Args:
        folder (str): of the run.
        keep_checkpoint_max (Optional[int]): how many stay; None: all.
        async_save (bool): write beside the training.
        crc_check (bool): read every file again before the checkpoint counts.
        ckpt_format (Optional[str]): "ckpt" or "safetensors": upstream's files, see `upstream_format`; None: ours.
        prefix (str): of upstream's files.
    """

    def __init__(self, folder, keep_checkpoint_max=None, async_save=False, crc_check=False, ckpt_format=None, prefix="network"):
        self.folder = os.fspath(folder)
        self.keep_checkpoint_max = keep_checkpoint_max
        self.async_save = async_save
        self.crc_check = crc_check
        self.ckpt_format = ckpt_format
        self.prefix = prefix
        self._pending = None

    @property
    def is_saving(self):
        """Whether a save is under way."""
        return self._pending is not None

    def save(self, manifest, tensors, rank_states):
        """Write a checkpoint.

        Args:
            manifest (Manifest): without tensors and files, which are filled in here.
            tensors (Iterable[ShardedTensor]): this rank's state.
            rank_states (dict): what only this rank has (plain data, numpy arrays): rng, data_position, coordinates.

        Raises:
            CheckpointError: on all ranks, if one could not write (this one, or the asynchronous one before it); nothing
                that existed is changed.
        """
        self.wait()
        temporary = on_rank_zero(_DOING, folders.prepare, self.folder, manifest.iteration)
        tensors = list(tensors)
        if self.ckpt_format is None:
            write = _Write(temporary, share_of_this_rank(tensors), rank_states, self.async_save, self.crc_check)
        else:
            write = _UpstreamWrite(temporary, tensors, rank_states, self.async_save, self.crc_check)
            write.name_files(self.ckpt_format, self.prefix, manifest.states.get("train_state") or {})
        self._pending = (manifest, write, time.monotonic())
        write.start(self.async_save)
        if not self.async_save:
            self.wait()

    def poll(self):
        """Complete an asynchronous save if all ranks have written; cheap if none is under way.

        Raises:
            CheckpointError: on all ranks, if one could not write.
        """
        if self._pending is not None and all(comm.world_group().all_gather_object(self._pending[1].is_done)):
            self.wait()

    def wait(self):
        """Wait for the save under way, and complete it; see `poll`."""
        if self._pending is None:
            return
        manifest, write, started = self._pending
        self._pending = None
        write.join()
        try:
            parts = agree(_DOING, write.outcome)
        except Exception:
            on_rank_zero(_DOING, shutil.rmtree, write.folder, True)
            raise
        on_rank_zero(_DOING, self._publish, manifest, write.folder, parts)
        if comm.get_rank() == 0:
            logger.info(
                "saved checkpoint of iteration %d to %s: %.1f MB in %.2f s%s",
                manifest.iteration,
                folders.checkpoint_folder(self.folder, manifest.iteration),
                sum(manifest.files.values()) / 1e6,
                time.monotonic() - started,
                " beside the training" if self.async_save else "",
            )

    def _publish(self, manifest, temporary, parts):
        for tensors, file, rank in parts:
            manifest.files.update(file)
            manifest.ranks.append(rank)
            for key, (shape, dtype, grouping, piece) in tensors:
                manifest.tensors.setdefault(key, StoredTensor(shape, dtype, grouping)).pieces.append(piece)
        manifest.saved_at = time.time()
        folders.publish(self.folder, temporary, manifest, self.keep_checkpoint_max)


def share_of_this_rank(tensors):
    """This rank's tensors that it has to write; each piece is written by one of the ranks that hold it.

    The largest goes first, to the rank that has the least so far; so all ranks come to the same result.
    """
    own = [((tensor.key, tensor.slice), tensor.nbytes) for tensor in tensors]
    holders, sizes = {}, {}
    for rank, held in enumerate(comm.world_group().all_gather_object(own)):
        for piece, nbytes in held:
            holders.setdefault(piece, []).append(rank)
            sizes[piece] = nbytes
    loads, owner = {}, {}
    for piece in sorted(sizes, key=lambda piece: (-sizes[piece], repr(piece))):
        owner[piece] = min(holders[piece], key=lambda rank: (loads.get(rank, 0), rank))
        loads[owner[piece]] = loads.get(owner[piece], 0) + sizes[piece]
    return [tensor for tensor, (piece, _) in zip(tensors, own) if owner[piece] == comm.get_rank()]


class _Write:
    """Write of this rank's files, now or in a thread; `outcome` is the result of `agreement.attempt`."""

    def __init__(self, folder, tensors, rank_states, copies, verify):
        self.folder = folder
        self.outcome = None
        self._tensors = tensors
        self._entries = _entries([(self._name_of(tensor), tensor) for tensor in tensors], copies)
        self._rank_states = json.dumps(plain(rank_states)).encode()
        self._coordinates = rank_states.get("coordinates")
        self._verify = verify
        self._rank = comm.get_rank()
        self._thread = None
        self._counters = []  # written before the tensors, and not in the manifest

    def start(self, in_background):
        """Start the write; in a thread if `in_background`."""
        if in_background:
            self._thread = threading.Thread(target=self._run, name="checkpoint writer")
            self._thread.start()
        else:
            self._run()

    @property
    def is_done(self):
        """Whether the write has ended."""
        return self.outcome is not None

    def join(self):
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.join()

    def _run(self):
        self.outcome = attempt(self._write)
        self._entries = None  # the copies are free again

    @staticmethod
    def _name_of(tensor):
        return tensor.key

    def _file_name(self):
        return f"state_{self._rank:05d}.safetensors"

    def _write(self):
        name, files, tensors = self._file_name(), {}, []
        if self._entries:
            files[name] = write_shard(os.path.join(self.folder, name), self._counters + self._entries, self._verify)
        for tensor, entry in zip(self._tensors, self._entries):
            stored = tensor.slice.global_shape, tensor.dtype, tensor.grouping, entry.piece(tensor.slice, name)
            tensors.append((tensor.key, stored))
        rank_name = f"rank_{self._rank:05d}.json"
        durable.write_file(os.path.join(self.folder, rank_name), self._rank_states)
        rank = {
            "file": rank_name,
            "bytes": len(self._rank_states),
            "xxhash": digest(self._rank_states),
            "coordinates": self._coordinates,
        }
        return tensors, files, rank


class _UpstreamWrite(_Write):
    """Write of this rank's whole state in upstream's files."""

    def name_files(self, ckpt_format, prefix, train_state):
        """Set the file names, before `start`; `train_state` has `epoch` and `step_in_epoch`."""
        self._moment = train_state.get("epoch", 0), train_state.get("step_in_epoch", 0)
        self._path = upstream_format.file_name(ckpt_format, prefix, self._rank, *self._moment)
        self._counters = [
            Entry(name, "int64", (), 8, np.array([value], np.int64).view(np.uint8))
            for name, value in zip(("epoch_num", "step_num"), self._moment)
        ]

    @staticmethod
    def _name_of(tensor):
        return tensor.local_name or tensor.key.removeprefix(OPTIMIZER_PREFIX)

    def _file_name(self):
        return self._path

    def _write(self):
        folder = os.path.join(self.folder, os.path.dirname(self._path))
        os.makedirs(folder)
        result = super()._write()
        durable.write_file(os.path.join(folder, "meta.json"), upstream_format.meta_of(self._path, *self._moment))
        durable.sync(folder)
        return result


def _entries(named, copies):
    names, entries = {}, []
    for name, tensor in named:
        count = names[name] = names.get(name, 0) + 1
        part = tensor.slice
        is_flat = (part.start, part.stop) != (0, part.sharding.numel)
        shape = part.local_shape if is_flat else part.sharding.local_shape
        data = np.array(_bytes_of(tensor)) if copies else lambda tensor=tensor: _bytes_of(tensor)
        entries.append(Entry(name if count == 1 else f"{name}#{count}", tensor.dtype, shape, tensor.nbytes, data))
    return entries


def _bytes_of(tensor):
    return storage.host_array(tensor.tensor).view(np.uint8)


def plain(value):
    """Convert nested states to plain JSON values; numpy arrays become `{"array": dtype, "values": list}`."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, np.ndarray):
        return {"array": value.dtype.name, "values": value.tolist()}
    return value.item() if isinstance(value, np.generic) else value


def from_plain(value):
    """Inverse of `plain`; tuples come back as lists."""
    if isinstance(value, dict):
        if set(value) == {"array", "values"}:
            return np.array(value["values"], dtype=value["array"])
        return {key: from_plain(entry) for key, entry in value.items()}
    return [from_plain(entry) for entry in value] if isinstance(value, list) else value
