"""A nested state in one file: arrays beside a JSON tree, written safely and read without running code from it."""
import json
import os

import numpy as np
from mindspore import Tensor
from mindspore.common import dtype as mstype

from mindspeed_ms.core import storage
from mindspeed_ms.core.device import dtype_name

_TREE = "tree"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message names the file and the reason."""


def write_state(path, state):
    """Write a nested state and wait until it is on the disk.

    Args:
        path (str): the file.
        state: dicts with string keys, lists, tuples, strings, numbers, None, numpy arrays and Tensors.
    """
    arrays = {}
    tree = _encode(state, arrays)
    with open(path, "wb") as file:
        np.savez(file, **{_TREE: np.array(json.dumps(tree))}, **arrays)
        file.flush()
        os.fsync(file.fileno())


def read_state(path):
    """Read what `write_state` wrote; Tensors come back as Tensors, arrays as arrays.

    Raises:
        CheckpointError: missing, damaged (each array has a check sum), or no such file.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return _decode(json.loads(str(file[_TREE])), file)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist.") from None
    except Exception as error:  # zipfile, numpy and json have no common base for damaged files
        raise CheckpointError(f"{path} is damaged or no checkpoint of this program: {error}") from error


def _encode(value, arrays):
    if isinstance(value, dict):
        return {"dict": {str(key): _encode(entry, arrays) for key, entry in value.items()}}
    if isinstance(value, (list, tuple)):
        return {"tuple" if isinstance(value, tuple) else "list": [_encode(entry, arrays) for entry in value]}
    if isinstance(value, Tensor):
        return {"tensor": _add(storage.to_host(value), arrays), "dtype": dtype_name(value.dtype)}
    if isinstance(value, np.ndarray):
        return {"array": _add(value, arrays)}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}.")


def _add(array, arrays):
    name = f"a{len(arrays)}"
    arrays[name] = array
    return name


def _decode(node, file):
    if not isinstance(node, dict):
        return node
    (kind, value), *rest = node.items()
    if kind == "dict":
        return {key: _decode(entry, file) for key, entry in value.items()}
    if kind in ("list", "tuple"):
        entries = [_decode(entry, file) for entry in value]
        return tuple(entries) if kind == "tuple" else entries
    if kind == "tensor":
        return storage.from_array(np.ascontiguousarray(file[value]), getattr(mstype, rest[0][1]))
    return file[value]


def write_text(path, text):
    """Replace a small text file in one step: readers see the old or the new content."""
    temporary = f"{path}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(os.path.dirname(path) or ".")


def sync_folder(path):
    """Wait until renames in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
