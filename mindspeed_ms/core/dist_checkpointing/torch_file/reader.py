"""Reads torch.save files, the zip files of torch 1.6 and later and the older streams: all but the tensors' values."""

import argparse
import collections
import contextlib
import mmap
import os
import types

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.torch_file.objects import ITEMSIZES, Opaque, TensorReference, shown
from mindspeed_ms.core.dist_checkpointing.torch_file.unpickler import read_pickle
from mindspeed_ms.core.dist_checkpointing.torch_file.zip_records import read_records

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_MOST_REPEATED = 1 << 20
_DEEPEST = 100


def is_torch_file(path):
    """Whether a file begins as one of torch.save does."""
    try:
        with open(path, "rb") as file:
            start = file.read(16)
    except OSError:
        return False
    return start[:4] == b"PK\3\4" or start[:13] == b"\x80\2\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"[:13]


def read_torch_file(path, start=0, stop=None, name=""):
    """Read a torch.save file, or bytes `start` to `stop` of a file that holds one; `name` of the object is for messages.

    Returns:
        The saved object, with `TensorReference`, `Global`, `Opaque` and `Size` for what is torch's or Megatron's.

    Raises:
        CheckpointError: it cannot be read, is truncated, damaged, or holds something that is not allowed.
    """
    path = os.fspath(path)
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            stop = size if stop is None else stop
            if not 0 <= start <= stop <= size:
                raise CheckpointError(f"{path} is truncated: it has {size} bytes, bytes {start} to {stop} are missing.")
            if os.pread(file.fileno(), 4, start) == b"PK\3\4":
                tree, objects = _read_zip(file.fileno(), path, start, stop)
            else:
                tree, objects = _read_stream(file.fileno(), path, start, stop)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    check_tree(path, tree, objects, name)
    return tree


def read_pickle_file(path):
    """Read a file that is one pickle without tensors (`.metadata` of torch.distributed.checkpoint).

    Raises:
        CheckpointError: it cannot be read, is damaged, or holds something that is not allowed.
    """
    path = os.fspath(path)
    try:
        with (
            open(path, "rb", buffering=0) as file,
            _mapped(file.fileno(), path, 0, os.fstat(file.fileno()).st_size) as (data, _),
        ):
            tree, objects, _ = read_pickle(path, data)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    if objects.storages:
        raise CheckpointError(f"{path} is refused: it holds tensors outside of a torch.save file.")
    check_tree(path, tree, objects)
    return tree


@contextlib.contextmanager
def _mapped(descriptor, path, start, stop):
    """Bytes up to `stop` of a file, mapped instead of read, and the position of byte `start` in them."""
    if start == stop:
        raise CheckpointError(f"{path} is damaged: it ends at byte {stop}, where a pickle is expected.")
    offset = start - start % mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(descriptor, stop - offset, access=mmap.ACCESS_READ, offset=offset) as data:
        yield data, start - offset


def _read_zip(descriptor, path, start, stop):
    records = read_records(descriptor, path, start, stop)
    folders = [name.removesuffix("data.pkl") for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(folders) != 1:
        raise CheckpointError(f"{path} is no file of torch.save: it has no record data.pkl.")
    folder = folders[0]
    for name in records:
        if not name.startswith(folder):
            raise CheckpointError(f"{path} is refused: its record {shown(name)} is outside of {shown(folder)}.")
    if folder + "constants.pkl" in records:
        raise CheckpointError(f"{path} is refused: it is a TorchScript program, not a checkpoint.")
    first, _ = records.get(folder + "byteorder", (None, None))
    if first is not None and os.pread(descriptor, 6, first) != b"little":
        raise CheckpointError(f"{path} is refused: its byte order is {shown(os.pread(descriptor, 6, first))}, expected little.")
    with _mapped(descriptor, path, *records[folder + "data.pkl"]) as (data, position):
        tree, objects, _ = read_pickle(path, data, position)
    for storage in objects.storages.values():
        storage.start, storage.stop = records.get(f"{folder}data/{storage.key}", (-1, -1))
    return tree, objects


def _read_stream(descriptor, path, start, stop):
    """File of torch before 1.6: five pickles (magic number, protocol, system, object, keys), then the storages."""
    with _mapped(descriptor, path, start, stop) as (data, position):
        begin = start - position  # of the mapped bytes in the file
        magic, _, position = read_pickle(path, data, position)
        if magic != _MAGIC:
            raise CheckpointError(f"{path} is no file of torch.save.")
        protocol, _, position = read_pickle(path, data, position)
        system, _, position = read_pickle(path, data, position)
        if protocol != _PROTOCOL or not isinstance(system, dict) or system.get("little_endian") is not True:
            raise CheckpointError(f"{path} is refused: it has protocol {shown(protocol)} of system {shown(system)}.")
        tree, objects, position = read_pickle(path, data, position)
        keys, _, position = read_pickle(path, data, position)
        if not isinstance(keys, list) or not all(type(key) is str for key in keys) or sorted(keys) != sorted(objects.storages):
            raise CheckpointError(f"{path} is damaged: its storages are not those that its tensors have.")
        for key in keys:
            storage = objects.storages[key]
            numel = int.from_bytes(data[position : position + 8], "little")
            storage.start = begin + position + 8
            storage.stop = storage.start + numel * ITEMSIZES.get(storage.dtype or "uint8", 16)
            position = storage.stop - begin
            if storage.stop > stop:
                raise CheckpointError(f"{path} is damaged: it ends within storage {shown(key)}.")
    return tree, objects


def check_tree(path, tree, objects, name=""):
    """Check and name all tensors of a tree. Raises CheckpointError for one that is not within its storage, for a tree that
    contains itself, is nested too deeply, or is much larger than its file by repeating parts."""
    sizes, active = {}, set()
    frames = []

    def enter(value, place):
        if isinstance(value, TensorReference) and not value.name:
            object.__setattr__(value, "name", place or "(the only one)")
            _check_tensor(path, value)
        children = _children(value)
        if children is None:
            return 1
        if id(value) in active:
            raise CheckpointError(f"{path} is refused: {shown(place) or 'its object'} contains itself.")
        if len(frames) >= _DEEPEST:
            raise CheckpointError(f"{path} is refused: {shown(place)} is nested deeper than {_DEEPEST}.")
        if id(value) in sizes:
            return sizes[id(value)]
        active.add(id(value))
        frames.append([value, iter(children), place, 1])
        return 0

    enter(tree, name)
    while frames:
        frame = frames[-1]
        value, children, place, _ = frame
        for label, child in children:
            depth = len(frames)
            frame[3] += enter(child, f"{place}.{label}" if place else str(label))
            if len(frames) > depth:
                break
        else:
            frames.pop()
            active.discard(id(value))
            sizes[id(value)] = frame[3]
            if frames:
                frames[-1][3] += frame[3]
            objects.check_expanded(frame[3])


def _children(value):
    """(label, object) of what an object consists of; None for one that consists of nothing."""
    if isinstance(value, dict):
        children = [(key if isinstance(key, str) else i, child) for i, (key, child) in enumerate(value.items())]
        keys = [("key", key) for key in value if isinstance(key, tuple | Opaque)]
        return [*children, *keys, *(vars(value).items() if isinstance(value, collections.OrderedDict) else ())]
    if isinstance(value, list | tuple | set | frozenset):
        return enumerate(value)
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return vars(value).items()
    if isinstance(value, Opaque):
        return [("arguments", value.arguments), ("state", value.state)]
    if isinstance(value, TensorReference) and value.attributes is not None:
        return [("attributes", value.attributes)]
    return None


def _check_tensor(path, tensor):
    """CheckpointError if a tensor is of an unknown dtype, or not within its storage."""
    storage, what = tensor.storage, f"{path}: tensor {shown(tensor.name)}"
    if tensor.dtype not in ITEMSIZES or (storage.dtype or "uint8") not in ITEMSIZES:
        raise CheckpointError(
            f"{what} has dtype {shown(tensor.dtype)}, which is not supported: expected one of {', '.join(ITEMSIZES)}."
        )
    if storage.start < 0:
        raise CheckpointError(f"{what} is missing: the file has no storage {shown(storage.key)}.")
    nbytes = storage.numel * ITEMSIZES[storage.dtype or "uint8"]
    if nbytes > storage.stop - storage.start:
        raise CheckpointError(f"{what} needs a storage of {nbytes} bytes, but {storage.stop - storage.start} are in the file.")
    shape, numel = f"has shape {list(tensor.shape)}, strides {list(tensor.stride)}, offset {tensor.offset}", 1
    for size in tensor.shape:
        numel *= size or 1
    if not tensor.numel and numel < 1 << 48 and tensor.offset * tensor.itemsize <= nbytes:
        return
    last = tensor.offset + tensor.span
    if last * tensor.itemsize > nbytes:
        raise CheckpointError(f"{what} {shape}: {last} elements, more than its storage of {nbytes // tensor.itemsize}.")
    if numel > max(nbytes // tensor.itemsize, _MOST_REPEATED):
        raise CheckpointError(f"{what} {shape}: it repeats the {nbytes // tensor.itemsize} elements of its storage too often.")
