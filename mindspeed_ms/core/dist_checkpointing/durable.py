"""Durable writes: small files and new names are synced to the disk (fsync) before the call returns."""

import os
from contextlib import contextmanager, suppress


def write_file(path, data):
    """Write bytes and wait until they are on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path, data):
    """Replace a small file in one step: readers see the old or the new content."""
    with replacing(path) as file:
        file.write(data)


@contextmanager
def replacing(path):
    """Context manager: a binary file to write, which takes the place of `path` in one step once all is on the disk.

    Raises:
        OSError: names `path`; nothing of it is left.
    """
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(os.path.dirname(path) or ".")
    except OSError as error:
        with suppress(OSError):
            os.remove(temporary)
        raise OSError(error.errno, error.strerror, path) from error


def sync(path):
    """Wait until the bytes of a file, or the new names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
