"""Compilation by numba: the cache directory of machine code, and a lock so that one process compiles while others wait.

Compilation happens at the first call, never at import, so a process may fork after importing compiled functions.
"""

import contextlib
import fcntl
import functools
import os
import pathlib
import tempfile

import numba

from mindspeed_ms.core.logging import logger

CACHE_ENVIRONMENT_VARIABLE = "NUMBA_CACHE_DIR"


def compiled(function, room, **options):
    """Decorator: compile at the first call, or load the machine code from the cache.

    Args:
        function: the Python function.
        room (str): folder of the cache. numba sees changes of the function's own file: name a version where others matter.
        options: of `numba.njit`.
    """
    previous = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = cache_directory(room)  # numba reads it while decorating
    try:
        return numba.njit(cache=True, **options)(function)
    finally:
        numba.config.CACHE_DIR = previous


@functools.cache
def cache_directory(room):
    """A folder in NUMBA_CACHE_DIR if the user set it, else in the user's cache; one of this process where neither can be
    written."""
    chosen = os.environ.get(CACHE_ENVIRONMENT_VARIABLE)
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    directory = pathlib.Path(chosen or cache / "mindspeed_ms" / "numba") / f"{room}-{numba.__version__}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK):
            return str(directory)
    except OSError:
        pass
    logger.warning(
        "the cache directory %s cannot be written: functions are compiled anew in every process. Set %s to a "
        "writable directory.",
        directory,
        CACHE_ENVIRONMENT_VARIABLE,
    )
    return tempfile.mkdtemp(prefix="mindspeed_ms-numba-")


@functools.cache
def _tell_once(directory):
    logger.info(
        "compiling kernels... (some seconds, once on this machine; kept in %s, which %s moves)",
        directory,
        CACHE_ENVIRONMENT_VARIABLE,
    )


def _tell_first_compilation(room, name):
    """Log, once in a process, that a function which is not in the cache is compiled now."""
    directory = cache_directory(room)
    if not any(pathlib.Path(directory).rglob(f"*{name}-*.nbi")):
        _tell_once(directory)


@contextlib.contextmanager
def one_process_compiles(room, name):
    """Context manager: lock so that one process compiles the function `name` while the others wait and then load the result."""
    _tell_first_compilation(room, name)
    with open(os.path.join(cache_directory(room), "compiling.lock"), "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, also by the end of the process
        yield
