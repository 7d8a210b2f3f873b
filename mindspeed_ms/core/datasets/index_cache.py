"""Cache of index arrays on disk: one process builds them, all map them into memory.

An entry is a folder whose name is a hash of everything that decides its content. It appears whole, by a rename, so that
processes on any number of nodes may search for it and build it at the same time; a lock keeps those of one host from doing the
same work twice.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from mindspeed_ms.core.datasets.errors import DatasetError
from mindspeed_ms.core.logging import logger

_FORMAT_VERSION = 1
_DESCRIPTION = "description.json"


def content_hash(settings, *arrays):
    """Hash (str) of settings (dict that JSON can hold) and numpy arrays."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([_FORMAT_VERSION, settings], sort_keys=True).encode())
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def cached_arrays(path_to_cache, name, description, build, must_be_written=True):
    """Load arrays from the cache; build them first if they are missing.

    Args:
        path_to_cache (Optional[str]): folder, made if it does not exist; None: build in memory, keep nothing.
        name (str): of the entry; must tell its content, see `content_hash`.
        description (dict): written beside the arrays, for human readers.
        build (Callable): `() -> dict` of numpy arrays.
        must_be_written (bool): what happens where the folder cannot be written: an error, or a warning and arrays in memory.

    Returns:
        dict[str, np.ndarray]: read-only.

    Raises:
        OSError: the folder cannot be written.
        DatasetError: the entry is damaged.
    """
    if path_to_cache is None:
        return build()
    folder = Path(path_to_cache) / name
    if not folder.is_dir():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _lock(folder.parent):
                if not folder.is_dir():
                    _write(folder, description, build)
        except OSError as error:
            if must_be_written:
                raise OSError(
                    error.errno,
                    f"the index of the data cannot be kept ({os.strerror(error.errno or 0)}): name a "
                    "folder that can be written, data_cache_path (--data-cache-path)",
                    str(folder.parent),
                ) from error
            logger.warning(
                "the index of the data cannot be kept in %s (%s): every process builds it anew, in memory. Name a "
                "folder that can be written, data_cache_path (--data-cache-path).",
                folder.parent,
                error.strerror,
            )
            return build()
    return _load(folder)


@contextlib.contextmanager
def _lock(folder):
    with open(folder / ".lock", "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks: two may build, the first to finish wins
            logger.warning("%s knows no file locks (%s): several processes may build the same index", folder, error.strerror)
        yield


def _write(folder, description, build):
    temporary = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        arrays = build()
        for name, array in arrays.items():
            with open(temporary / f"{name}.npy", "wb") as file:
                np.save(file, array, allow_pickle=False)
                _flush(file)
        shapes = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
        with open(temporary / _DESCRIPTION, "w", encoding="utf-8") as file:
            json.dump({"arrays": shapes, **description}, file, indent=1)
            _flush(file)
        os.chmod(temporary, 0o755)  # mkdtemp closes it to others
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():  # else another node was quicker
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _flush(file):
    file.flush()
    os.fsync(file.fileno())


def _load(folder):
    try:
        arrays = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))["arrays"]
        loaded = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in arrays}
        found = {name: [array.dtype.str, list(array.shape)] for name, array in loaded.items()}
        if found != arrays:
            raise ValueError(f"arrays {found} where {arrays} were written")
    except (OSError, ValueError, EOFError, KeyError, TypeError) as error:
        raise DatasetError(
            f"the kept index {folder} is damaged ({error}): delete that folder to have it built again."
        ) from error
    return loaded
