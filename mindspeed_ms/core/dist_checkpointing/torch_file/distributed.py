"""Folders of torch.distributed.checkpoint (Megatron's format `torch_dist`): where the parts of each tensor are.

`.metadata`, one pickle, has the shape and the parts of every tensor, and for each part a file, an offset and a length. There,
in a file `__RANK_NUMBER.distcp`, is a torch.save file of its own with that part. What these say is compared with each other
and with the files before anything relies on it. Source: torch/distributed/checkpoint/{metadata,filesystem}.py.
"""

import json
import math
import os
from dataclasses import dataclass, field

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.shard_file import inside
from mindspeed_ms.core.dist_checkpointing.torch_file.objects import Global, Opaque, TensorReference, shown
from mindspeed_ms.core.dist_checkpointing.torch_file.reader import read_pickle_file, read_torch_file

METADATA_FILE, FORMAT_FILE = ".metadata", "metadata.json"
_LARGEST_SIZE = 1 << 48
_MOST_FORMAT_BYTES = 1 << 20


@dataclass(frozen=True)
class Part:
    """Box of a tensor: `offsets` and `sizes` (tuples) in the whole, `file` in the folder, `tensor` (TensorReference) there."""

    offsets: tuple
    sizes: tuple
    file: str
    tensor: TensorReference


@dataclass
class DistributedTensor:
    """Tensor of the checkpoint.

    Attributes:
        shape (tuple[int]): of the whole, as stored.
        dtype (str): "float32", ...
        parts (dict[tuple, Part]): by offsets; disjoint, and together the whole.
        flat_of (Optional[tuple[int]]): stored by a distributed optimizer as flat ranges: the shape of the real tensor, which is
            cut into `shape[axis]` boxes along each axis; the last axis of `shape` counts the elements of a box.
    """

    shape: tuple
    dtype: str
    parts: dict = field(default_factory=dict)
    flat_of: tuple | None = None


@dataclass(frozen=True)
class SavedObject:
    """Object of the checkpoint that is no tensor: a torch.save file in bytes `start` to `stop` of `path`."""

    path: str
    start: int
    stop: int

    def read(self):
        """The object; CheckpointError as of `read_torch_file`."""
        return read_torch_file(self.path, self.start, self.stop)


@dataclass
class DistributedCheckpoint:
    """Content of a folder: `tensors` (DistributedTensor) and `objects` (SavedObject) by name, `files` (bytes by name);
    `archives`: (file, first byte, end) of each torch.save file in them."""

    tensors: dict
    objects: dict
    files: dict
    archives: list


def read_distributed(folder):
    """Read the DistributedCheckpoint in a folder; no values of tensors.

    Raises:
        CheckpointError: a file is missing, truncated, damaged or refused, or what `.metadata` says does not fit together;
            names the file and the tensor.
    """
    folder = os.fspath(folder)
    path = os.path.join(folder, METADATA_FILE)
    _check_format(folder)
    state = _state(path, read_pickle_file(path), "Metadata", "MCoreMetadata")
    entries, extra = _get(path, state, "state_dict_metadata", dict), state.get("mcore_data") or {}
    places = _places(path, folder, _get(path, state, "storage_data", dict))
    result = DistributedCheckpoint({}, {}, {}, sorted(set(places.values())))
    for file in sorted({place[0] for place in places.values()}):
        try:
            result.files[file] = os.stat(os.path.join(folder, file)).st_size
        except OSError:
            raise CheckpointError(f"{folder} is incomplete: {shown(file)} is missing.") from None
    for name, entry in entries.items():
        if type(name) is not str:
            raise CheckpointError(f"{path} is damaged: it has a tensor named {shown(name)}.")
        if isinstance(entry, Opaque) and entry.name == "BytesStorageMetadata":
            file, start, stop = _place(path, places, name, None)
            result.objects[name] = SavedObject(os.path.join(folder, file), start, stop)
        else:
            flat_of = extra.get(name, {}).get("nd_reformulated_orig_global_shape") if isinstance(extra, dict) else None
            result.tensors[name] = _tensor(path, folder, places, name, entry, flat_of)
    return result


def _check_format(folder):
    path = os.path.join(folder, FORMAT_FILE)
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(_MOST_FORMAT_BYTES))
        backend = found["sharded_backend"]
    except FileNotFoundError:
        return  # torch itself writes none
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {shown(error)}.") from error
    if backend != "torch_dist":
        raise CheckpointError(f"{path} has sharded_backend {shown(backend)}: expected torch_dist.")


def _state(path, value, *names):
    """Attributes of an object of torch's metadata."""
    if not isinstance(value, Opaque) or value.name not in names or not isinstance(value.state, dict):
        found = value.name if isinstance(value, Opaque) else type(value).__name__
        raise CheckpointError(f"{path} is damaged: it has a {shown(found)} where a {names[0]} is expected.")
    return value.state


def _get(path, state, name, kind):
    value = state.get(name)
    if type(value) is bool or not isinstance(value, kind):
        raise CheckpointError(f"{path} is damaged: its {name} is a {type(value).__name__}.")
    return value


def _sizes(path, name, value):
    if not isinstance(value, tuple) or not all(type(size) is int and 0 <= size <= _LARGEST_SIZE for size in value):
        raise CheckpointError(f"{path} is damaged: {shown(name)} has sizes {shown(value)}.")
    return tuple(value)


def _places(path, folder, storage):
    """{(name, offsets): (file, start, stop)} of all parts and objects; offsets None for objects."""
    places = {}
    for index, info in storage.items():
        index, info = _state(path, index, "MetadataIndex"), _state(path, info, "_StorageInfo")
        name, offsets = _get(path, index, "fqn", str), index.get("offset")
        if info.get("transform_descriptors"):
            raise CheckpointError(f"{path}: {shown(name)} is stored compressed, which is not supported.")
        file, start, length = (
            _get(path, info, key, kind) for key, kind in (("relative_path", str), ("offset", int), ("length", int))
        )
        inside(folder, file)
        places[name, offsets if offsets is None else _sizes(path, name, offsets)] = file, start, start + length
    return places


def _place(path, places, name, offsets):
    place = places.get((name, offsets))
    if place is None:
        where = "" if offsets is None else f" at {list(offsets)}"
        raise CheckpointError(f"{path} is damaged: it has no place of {shown(name)}{where}.")
    return place


def _tensor(path, folder, places, name, entry, flat_of):
    entry = _state(path, entry, "TensorStorageMetadata")
    properties, whole = entry.get("properties"), _sizes(path, name, entry.get("size"))
    described = properties.state if isinstance(properties, Opaque) else None
    dtype = described[0] if isinstance(described, tuple) and described else (described or {}).get("dtype")
    if not isinstance(dtype, Global) or dtype.module != "torch":
        raise CheckpointError(f"{path} is damaged: {shown(name)} has dtype {shown(dtype)}.")
    tensor = DistributedTensor(whole, dtype.name, flat_of=_flat_of(path, name, flat_of, whole))
    for chunk in _get(path, entry, "chunks", list):
        chunk = _state(path, chunk, "ChunkStorageMetadata")
        offsets, sizes = (_sizes(path, name, chunk.get(key)) for key in ("offsets", "sizes"))
        if not len(offsets) == len(sizes) == len(whole) or any(
            start + size > most for start, size, most in zip(offsets, sizes, whole)
        ):
            raise CheckpointError(
                f"{path} is damaged: {shown(name)} {list(whole)} has a part of {list(sizes)} at {list(offsets)}, outside of it."
            )
        file, start, stop = _place(path, places, name, offsets)
        reference = _reference(os.path.join(folder, file), name, start, stop)
        if reference.dtype != tensor.dtype or reference.numel != math.prod(sizes) or not reference.is_contiguous:
            raise CheckpointError(
                f"{reference.path}: {shown(name)} at {list(offsets)} is {reference.dtype} {list(reference.shape)}: expected "
                f"{tensor.dtype} {list(sizes)}, stored row by row."
            )
        tensor.parts[offsets] = Part(offsets, sizes, file, reference)
    held = sum(math.prod(part.sizes) for part in tensor.parts.values())
    if held != math.prod(whole):
        raise CheckpointError(
            f"{path} is damaged: {shown(name)} {list(whole)} has {math.prod(whole)} elements, its parts have {held}."
        )
    return tensor


def _flat_of(path, name, shape, stored):
    if shape is None:
        return None
    shape = _sizes(path, name, shape)
    fits = len(shape) + 1 == len(stored) and all(count and size % count == 0 for size, count in zip(shape, stored))
    if not fits or math.prod(shape) != math.prod(stored):
        raise CheckpointError(f"{path} is damaged: {shown(name)} {list(stored)} has the original shape {list(shape)}.")
    return shape


def _reference(path, name, start, stop):
    try:
        tensor = read_torch_file(path, start, stop, name)
    except CheckpointError as error:
        if shown(name) in str(error).replace(str(path), ""):
            raise
        raise CheckpointError(f"{str(error).removesuffix('.')} (tensor {shown(name)}).") from error
    if not isinstance(tensor, TensorReference):
        raise CheckpointError(f"{path}: {shown(name)} at byte {start} is no tensor.")
    return tensor
