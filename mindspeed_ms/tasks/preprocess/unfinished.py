"""Unfinished output: a folder beside the final files from which an interrupted run is resumed.

The folder holds, for each output, the tokens (`KEY.bin`) and the lengths of the samples (`KEY.lengths`, int32), and a journal
with their valid length and the input position they came from. Files get their final names when all of
them are complete.
"""

import contextlib
import fcntl
import json
import os
import shutil
import time

import numpy as np

from mindspeed_ms.core.datasets.indexed_format import HEADER, MAGIC, VERSION, DType, get_bin_path, get_idx_path
from mindspeed_ms.tasks.preprocess.errors import PreprocessError
from mindspeed_ms.tasks.preprocess.tally import Tally

JOURNAL = "journal.json"
START_OVER = "to start over, delete the folder %s, or give preprocess_data.py --overwrite-cache"
SECONDS_BETWEEN_ENTRIES = 10.0
_AT_ONCE = 1 << 20


class Unfinished:
    """Folder of an unfinished run.

    Args:
        folder (str): where; made if it is not there.
        keys (tuple[str]): names of the outputs.
        description (dict): JSON values that say what the run does: only a run of the same description is continued.
        restart (bool): discard existing content.

    Attributes:
        tally (Tally): counts up to the journal's last entry.
        position (dict): value of the last `record`, {} at the beginning.
        continued (bool): whether there was something to continue from.
        is_complete (bool): nothing has to be written any more; only the files' names are missing.

    Raises:
        PreprocessError: the folder cannot be written, belongs to another run, or one that is still running.
    """

    def __init__(self, folder, keys, description, restart=False):
        self.folder, self.keys = folder, keys
        self._description = json.loads(json.dumps(description))
        make_writable(folder)
        self._lock = _lock(folder)
        try:
            if restart:
                self._forget()
            journal = self._read_journal()
        except BaseException:
            self._lock.close()
            raise
        self.continued = journal is not None
        self.tally = Tally(**journal["tally"]) if journal else Tally()
        self.position = journal["position"] if journal else {}
        sizes = journal["sizes"] if journal else {}
        # in the last step files move away one by one, and nothing is appended any more
        self.is_complete = bool(self.position.get("complete"))
        names = [] if self.is_complete else [f"{key}.{ending}" for key in keys for ending in ("bin", "lengths")]
        self._files = {name: self._open(name, sizes.get(name, 0)) for name in names}
        self._entry, self._saved = None, time.monotonic()

    def _open(self, name, size):
        path = os.path.join(self.folder, name)
        file = open(path, "ab")  # noqa: SIM115  closed by close
        if file.tell() < size:
            raise PreprocessError(f"{path} is shorter than its journal says: {START_OVER % self.folder}.")
        file.truncate(size)
        return file

    def append(self, key, tokens, lengths):
        """Append samples: their tokens (bytes) and lengths in tokens (bytes of int32)."""
        self._files[f"{key}.bin"].write(tokens)
        self._files[f"{key}.lengths"].write(lengths)

    def record(self, position):
        """Note the input position (JSON values) of everything appended so far; it goes to the journal every few seconds."""
        self.position = position
        sizes = {name: file.tell() for name, file in self._files.items()}
        self._entry = {"description": self._description, "position": position, "sizes": sizes, "tally": self.tally.as_dict()}
        if time.monotonic() - self._saved > SECONDS_BETWEEN_ENTRIES:
            self.save()

    def save(self):
        """Write the last `record` to the journal; samples appended after it do not count."""
        if self._entry is None:
            return
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        path = os.path.join(self.folder, JOURNAL)
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(self._entry, file)  # in ASCII: names of files may be no UTF-8
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".new", path)
        self._saved = time.monotonic()

    def path(self, name):
        """Path of a file in the folder."""
        return os.path.join(self.folder, name)

    def release(self):
        """Close the folder for a later run; delete it if nothing in it can be continued."""
        if self._lock.closed:
            return  # it may be another run's by now
        if os.path.exists(self.path(JOURNAL)):
            self.close()
        else:
            self.discard()

    def close(self):
        """Close all files."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # the disk is full: what the journal says is on it
                file.close()
        self._lock.close()

    def discard(self):
        """Delete the folder."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _forget(self):
        for name in os.listdir(self.folder):
            if name != "lock":
                os.remove(os.path.join(self.folder, name))

    def _read_journal(self):
        path = os.path.join(self.folder, JOURNAL)
        if not os.path.exists(path):
            self._forget()
            return None
        try:
            with open(path, encoding="utf-8") as file:
                journal = json.load(file)
        except ValueError as error:
            raise PreprocessError(f"{path} is damaged ({error}): {START_OVER % self.folder}.") from error
        if journal["description"] != self._description:
            other = [key for key in self._description if journal["description"].get(key) != self._description[key]]
            raise PreprocessError(
                f"{self.folder} holds an unfinished run with other settings or other input (different: "
                f"{', '.join(other)}). Repeat its command; {START_OVER % self.folder}."
            )
        return journal


def write_index(idx_path, dtype, lengths_path):
    """Write the `.idx` file of samples, one document each, reading their lengths in pieces.

    Args:
        idx_path (str): file to write; on disk when this returns.
        dtype (type): of the tokens.
        lengths_path (str): int32 lengths in tokens.

    Returns:
        int: bytes that the `.bin` file must have.
    """
    count, end, itemsize = os.path.getsize(lengths_path) // 4, 0, np.dtype(dtype).itemsize
    with open(idx_path, "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, DType.code_from_dtype(dtype), count, count + 1))
        for lengths in _lengths(lengths_path):
            file.write(lengths)
        for lengths in _lengths(lengths_path):
            ends = end + np.cumsum(lengths, dtype=np.int64) * itemsize
            file.write(np.concatenate([[end], ends[:-1]]).astype(np.int64))
            end = int(ends[-1])
        for start in range(0, count + 1, _AT_ONCE):
            file.write(np.arange(start, min(start + _AT_ONCE, count + 1), dtype=np.int64))
        file.flush()
        os.fsync(file.fileno())
    return end


def _lengths(path):
    with open(path, "rb") as file:
        while data := file.read(4 * _AT_ONCE):
            yield np.frombuffer(data, np.int32)


def publish(bin_path, idx_path, prefix):
    """Rename a complete pair to its final name; may be repeated after an interruption at any point.

    The old `.idx` goes first: without one a pair is no dataset, so old and new halves are never taken together.
    """
    if os.path.exists(bin_path):
        with contextlib.suppress(FileNotFoundError):
            os.remove(get_idx_path(prefix))
        _move(bin_path, get_bin_path(prefix))
    if os.path.exists(idx_path):
        _move(idx_path, get_idx_path(prefix))


def _move(source, target):
    """Rename a file; across file systems copy it beside the target first."""
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != 18:  # EXDEV
            raise
        shutil.copyfile(source, target + ".part")
        with open(target + ".part", "rb") as file:
            os.fsync(file.fileno())
        os.replace(target + ".part", target)
        os.remove(source)


def make_writable(folder):
    """Make a folder if it does not exist.

    Raises:
        PreprocessError: it cannot be made, or nothing can be written there.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        probe = os.path.join(folder, f".writable-{os.getpid()}")
        with open(probe, "wb"):
            pass
        os.remove(probe)
    except OSError as error:
        raise PreprocessError(
            f"the output cannot be written: {error.strerror}: {error.filename or folder}. Name another "
            "place with --output-prefix (unfinished files: --cache-dir), or make the folder "
            "writable."
        ) from error


def _lock(folder):
    file = open(os.path.join(folder, "lock"), "w")  # noqa: SIM115  held as long as the run lives
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise PreprocessError(
            f"another run is writing the same output now ({folder}): wait for it, or give another --output-prefix."
        ) from None
    return file
