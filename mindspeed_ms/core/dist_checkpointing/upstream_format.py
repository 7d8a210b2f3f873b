"""Upstream's checkpoint format (mindspeed_ms r0.1.0): file names, reader, manifest.

Files: `rank_{r}/{prefix}_rank_{r}-{epoch}_{step}.ckpt` (or .safetensors) and `meta.json`.

Written with `ckpt_format`, it is in an `iter_...` folder beside a manifest: the folder is what upstream calls
output_dir, and it loads in any layout as our own format does. Each rank's file holds all that this rank has, under
upstream's names.

Read without a manifest (written by upstream, or by its converter as `rank_{r}/network.ckpt`): the model's configuration says
along which axis each tensor is cut, the shapes say into how many parts, the rank says which part (ranks are ordered
tp-cp-ep-dp-pp). The optimizer's state is read too where it is stored beside each weight (`upstream_optimizer`). They have no
check sums.

Imports no MindSpore: both kinds of file are parsed here (`ckpt_file`, `shard_file`), so that the manifest can point at bytes.
"""

import json
import os
import re
from dataclasses import dataclass

from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core.dist_checkpointing.ckpt_file import read_tensors
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import (
    DTYPE_BYTES,
    MANIFEST_FILE,
    OPTIMIZER_PREFIX,
    Manifest,
    StoredPiece,
    StoredTensor,
    optimizer_key,
)
from mindspeed_ms.core.dist_checkpointing.shard_file import read_safetensors
from mindspeed_ms.core.dist_checkpointing.upstream_optimizer import moments_of, read_scalars, set_states
from mindspeed_ms.layout.parameters import WORD_EMBEDDINGS, describe_whole_model
from mindspeed_ms.layout.sharding import FlatSlice, ParameterSharding


@dataclass
class UpstreamManifest(Manifest):
    """Manifest made from a folder that upstream wrote.

    Attributes:
        not_resumable (str): why a training cannot go on from it; "" if it can.
    """

    not_resumable: str = ""


_FOLDER = re.compile(r"rank_(\d+)$")
_FILE = re.compile(r"(?P<prefix>.+?)(_rank_(?P<rank>\d+)-(?P<epoch>\d+)_(?P<step>\d+))?\.(ckpt|safetensors)$")
_TIED_COPY = "language_model.output_layer.weight"


def file_name(ckpt_format, prefix, rank, epoch, step):
    """Path of a rank's file in the checkpoint's folder."""
    return f"rank_{rank}/{prefix}_rank_{rank}-{epoch}_{step}.{ckpt_format}"


def meta_of(name, epoch, step):
    """Content of `meta.json` beside a file (bytes)."""
    return json.dumps({"last_epoch": epoch, "last_step": step, "last_ckpt_file": os.path.basename(name)}).encode()


def names_in_files(key):
    """Names that a tensor may have in a file: our name, upstream's, and that of the tied copy on the last stage."""
    names = (key, key.removeprefix(OPTIMIZER_PREFIX))
    return (*names, *(name.replace(WORD_EMBEDDINGS, _TIED_COPY) for name in names))


def tensors_in_file(path):
    """Tensors {name: FileTensor} in a `.ckpt` or safetensors file. Raises CheckpointError if it is damaged."""
    return read_tensors(path) if os.fspath(path).endswith(".ckpt") else read_safetensors(path)


def is_upstream_folder(path):
    """Whether upstream wrote a folder; a folder `iter_...` without a manifest is a damaged one of ours."""
    if not os.path.isdir(path) or os.path.basename(os.path.normpath(path)).startswith("iter_"):
        return False
    names = os.listdir(path)
    return not any(name == MANIFEST_FILE or name.startswith("iter_") for name in names) and bool(_files_by_moment(path))


def _files_by_moment(folder):
    """Files by moment, {(epoch, step): {rank: file name}}; (-1, -1) for files without a moment in their names."""
    result = {}
    for entry in os.listdir(folder):
        match = _FOLDER.match(entry)
        if not match or not os.path.isdir(os.path.join(folder, entry)):
            continue
        for name in sorted(os.listdir(os.path.join(folder, entry))):
            found = _FILE.match(name)
            if found and (found["rank"] is None or found["rank"] == match[1]):
                moment = (-1, -1) if found["rank"] is None else (int(found["epoch"]), int(found["step"]))
                result.setdefault(moment, {}).setdefault(int(match[1]), f"{entry}/{name}")
    return result


def _newest(folder, step):
    """Newest moment that every rank of the folder has saved: (epoch, step, {rank: file})."""
    moments = _files_by_moment(folder)
    ranks = {rank for files in moments.values() for rank in files}
    for moment in sorted(moments, reverse=True):
        if set(moments[moment]) == ranks and step in (None, moment[1]):
            return *moment, moments[moment]
    wanted = "" if step is None else f" of step {step}"
    raise CheckpointError(
        f"{folder} holds no checkpoint{wanted} of all ranks {sorted(ranks)}: there are (epoch, step) {sorted(moments)}."
    )


def read_upstream_manifest(folder, config, step=None):
    """Read the UpstreamManifest of a folder that upstream wrote.

    Args:
        folder (str): upstream's output_dir.
        config (AllConfig): the model; its parallel sizes do not matter.
        step (Optional[int]): which; None: the newest that all ranks have.

    Raises:
        CheckpointError: no complete set of files, a damaged one, or weights of another model.
    """
    epoch, step, files = _newest(folder, step)
    described = {entry.name: entry for entry in describe_whole_model(describe_model(config))}
    headers = {rank: tensors_in_file(os.path.join(folder, name)) for rank, name in sorted(files.items())}
    found = {rank: {name: tensor for name, tensor in tensors.items() if name in described} for rank, tensors in headers.items()}
    parts = _tensor_parallel_size(folder, described, found)
    manifest = UpstreamManifest(
        max(step, 0),
        states={"train_state": {"iteration": max(step, 0), "epoch": max(epoch, 0)}},
        saved_at=max(os.path.getmtime(os.path.join(folder, name)) for name in files.values()),
    )
    for rank, tensors in found.items():
        name = files[rank]
        manifest.files[name] = os.path.getsize(os.path.join(folder, name))
        for key, tensor in tensors.items():
            _add(manifest, key, described[key], tensor, name, rank % parts, parts)
            for state, moment in moments_of(key, headers[rank], tensor.shape):
                _add(manifest, optimizer_key(state, key), described[key], moment, name, rank % parts, parts)
    first = min(files)
    scalars = read_scalars(os.path.join(folder, files[first]), headers[first])
    manifest.not_resumable = set_states(manifest, scalars, {name for tensors in headers.values() for name in tensors})
    return manifest


def _tensor_parallel_size(folder, described, found):
    sizes = {}
    for tensors in found.values():
        for key, tensor in tensors.items():
            sharding, shape = described[key].sharding, tensor.shape
            if len(shape) != len(sharding.global_shape) or 0 in shape:
                raise CheckpointError(
                    f"{folder} does not hold this model: {key} has shape {list(shape)}, expected parts of "
                    f"{list(sharding.global_shape)}."
                )
            if sharding.axis is not None and described[key].grouping != "vocab":
                sizes.setdefault(sharding.global_shape[sharding.axis] / shape[sharding.axis], key)
    if len(sizes) != 1 or not next(iter(sizes)).is_integer():
        raise CheckpointError(
            f"{folder} does not hold this model: its tensors are cut into "
            f"{', '.join(f'{size:g} parts ({key})' for size, key in sizes.items()) or 'nothing known'}."
        )
    return int(next(iter(sizes)))


def _add(manifest, key, described, tensor, file, index, parts):
    sharding = _sharding(described, tensor, index, parts)
    if tensor.shape != sharding.local_shape or tensor.dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{file}: {key} is {tensor.dtype} {list(tensor.shape)}, expected {list(sharding.local_shape)}.")
    stored = manifest.tensors.setdefault(key, StoredTensor(sharding.global_shape, tensor.dtype, described.grouping))
    if any(piece.slice.sharding == sharding for piece in stored.pieces):
        return  # a data-parallel copy
    if stored.dtype != tensor.dtype or stored.shape != sharding.global_shape:
        raise CheckpointError(
            f"{file}: {key} is {tensor.dtype} of {list(sharding.global_shape)}, but "
            f"{stored.dtype} of {list(stored.shape)} in another rank's file."
        )
    position = 0
    for start, stop in tensor.ranges:
        count = (stop - start) // stored.itemsize
        stored.pieces.append(StoredPiece(FlatSlice(sharding, position, position + count), file, start, stop, "", ""))
        position += count


def _sharding(described, tensor, index, parts):
    """FlatSlice of a parameter in one rank's file; its number of vocabulary rows is the saved one."""
    sharding = described.sharding
    if sharding.axis is None:
        return sharding
    shape = list(sharding.global_shape)
    if described.grouping == "vocab":
        shape[0] = tensor.shape[0] * parts
    cut = ParameterSharding.gated if described.grouping == "gate_up" else ParameterSharding.contiguous
    return cut(tuple(shape), sharding.axis, index, parts)
