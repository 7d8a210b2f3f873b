"""Expansion of `--input`: files, folders and patterns; formats and compressions by the ending of the name."""

import difflib
import glob
import os
from dataclasses import dataclass

from mindspeed_ms.core.datasets.fingerprint import sampled_hash
from mindspeed_ms.tasks.preprocess.errors import PreprocessError

FORMATS = (".jsonl", ".json", ".parquet", ".arrow", ".csv", ".txt")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
UNFINISHED = ".unfinished"  # ends the names of folders of interrupted runs, which may lie among their input
_BY_COLUMNS = (".parquet", ".arrow")  # compressed inside, and read by position


@dataclass(frozen=True)
class InputFile:
    """One input file.

    Attributes:
        path (str): where it is.
        format (str): one of FORMATS.
        compression (Optional[str]): one of the values of COMPRESSIONS.
        size (int): bytes on disk.
        modified (int): time of the last change, ns.
    """

    path: str
    format: str
    compression: str | None
    size: int
    modified: int

    def fingerprint(self):
        """Fingerprint against changes: [size, time of the last change, hash of blocks all over the file] (JSON values)."""
        return [self.size, self.modified, sampled_hash(self.path)]


def expand_inputs(words):
    """Files that the words name, in their order; files of a folder or a pattern are ordered by path.

    Args:
        words (list[str]): paths of files and folders, or patterns as `data/part-*.jsonl`.

    Returns:
        (list[InputFile], list[str]): files, and the paths in folders that are no data.

    Raises:
        PreprocessError: nothing there, nothing of a known format, or all files are empty.
    """
    files, ignored = [], []
    for word in words:
        if os.path.isdir(word):
            found, others = _in_folder(word)
            ignored += others
        else:
            found = [_input_file(path) for path in _matching(word)]
        files += found
    seen = set()
    for file in files:
        if os.path.realpath(file.path) in seen:
            raise PreprocessError(f"--input names {file.path} twice: each file is read once.")
        seen.add(os.path.realpath(file.path))
    if not any(file.size for file in files):
        raise PreprocessError(
            f"--input: {', '.join(file.path for file in files[:5])}: empty file (0 bytes), there is nothing to preprocess."
        )
    return files, ignored


def _in_folder(folder):
    found, ignored = [], []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and not name.endswith(UNFINISHED))
        for name in names:
            if not name.startswith("."):
                (found if _format(name) else ignored).append(os.path.join(parent, name))
    if not found:
        seen = ", ".join(sorted(os.path.basename(path) for path in ignored)[:10]) or "nothing"
        raise PreprocessError(
            f"--input: the folder {folder} holds no data file: expected names that end in {_endings()}, found {seen}."
        )
    return [_input_file(path) for path in sorted(found)], sorted(ignored)


def _matching(word):
    if os.path.exists(word):
        return [word]
    if glob.has_magic(word):
        paths = sorted(path for path in glob.glob(word, recursive=True) if os.path.isfile(path))
        if not paths:
            raise PreprocessError(f"--input: no file matches the pattern {word}.")
        return paths
    folder = os.path.dirname(word) or "."
    near = difflib.get_close_matches(os.path.basename(word), os.listdir(folder) if os.path.isdir(folder) else [], n=1)
    hint = f" Did you mean {os.path.join(folder, near[0])}?" if near else ""
    raise PreprocessError(f"--input: {word} does not exist.{hint} Nothing is downloaded: give files, folders or patterns.")


def is_raw_name(name):
    """Whether a file of this name is read as records."""
    return _format(name) is not None


def _format(name):
    """(format, compression) by the ending of a name, or None."""
    stem, ending = os.path.splitext(name.lower())
    compression = COMPRESSIONS.get(ending)
    if compression:
        ending = os.path.splitext(stem)[1]
    if ending not in FORMATS or (compression and ending in _BY_COLUMNS):
        return None
    return ending, compression


def _input_file(path):
    kind = _format(path)
    if kind is None:
        raise PreprocessError(f"--input: {path} is of an unknown format: expected a name that ends in {_endings()}.")
    if not os.access(path, os.R_OK):
        raise PreprocessError(f"--input: {path} cannot be read: you lack the permission.")
    status = os.stat(path)
    return InputFile(path, *kind, status.st_size, status.st_mtime_ns)


def _endings():
    return f"{' '.join(FORMATS)} ({', '.join(e for e in FORMATS if e not in _BY_COLUMNS)} also with {' '.join(COMPRESSIONS)})"
