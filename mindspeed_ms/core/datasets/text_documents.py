"""Documents of plain text: files, folders, Python's standard library; the part that is held out, or the parts of a split.

The default text is one that every machine has: the sources of Python's own standard library.
"""

import hashlib
import os
import sysconfig
from pathlib import Path

from mindspeed_ms.core.datasets.errors import DatasetError
from mindspeed_ms.core.datasets.splits import (
    Split,
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
    split_documents,
)

HOLD_OUT_EVERY = 10
# Tests, tables and bundled programs say little about the language, and some distributions leave them out.
_SKIPPED_FOLDERS = frozenset(
    "__pycache__ __phello__ dist-packages distutils encodings ensurepip idlelib lib2to3 lib-dynload pydoc_data "
    "site-packages test tests turtledemo".split()
)
_PIECE, _PIECES = 32_768, 1000  # a text that is to be split is cut into so many pieces, of at most so many characters


class CorpusError(DatasetError):
    """Text that cannot be made into a corpus; the message says what to give instead."""


def standard_library_documents(size_limit=1_250_000):
    """Names and texts (list of (str, str)) of the standard library's sources in a fixed order, at most `size_limit` bytes.

    The order is that of a hash of the name, so that the limit drops files from everywhere, not the end of the alphabet.

    Raises:
        FileNotFoundError: this Python came without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("config-")]
        relative = Path(folder).relative_to(root)
        names += [(relative / name).as_posix() for name in files if name.endswith(".py") and not name.startswith("_sysconfig")]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    documents, size = [], 0
    for name in names:
        text = _read_text(root / name)
        length = len(text.encode()) if text else 0
        if length and size + length <= size_limit:
            documents.append((name, text))
            size += length
    if len(documents) < 2 * HOLD_OUT_EVERY:
        raise FileNotFoundError(
            f"the default corpus is Python's own standard library, but only {len(documents)} readable .py files were found "
            f"under {root}. Install the full standard library, or name text of your own: --data-path FILE_OR_FOLDER..."
        )
    return documents


def text_documents(paths):
    """Names and texts (list of (str, str)) of UTF-8 files; a folder means all files below it, in order of their names.

    Raises:
        FileNotFoundError: a path does not exist.
        CorpusError: a file is not UTF-8 text, or there is none.
    """
    documents = []
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(_missing(path))
        files = sorted(item for item in path.rglob("*") if item.is_file()) if path.is_dir() else [path]
        for file in files:
            text = _read_text(file)
            if text is None:
                raise CorpusError(f"{file} is not UTF-8 text: give plain text files, or folders that hold nothing else.")
            if text.strip():
                documents.append((str(file), text))
    if not documents:
        raise CorpusError(f"there is no text in {', '.join(map(str, paths))}.")
    return documents


def _missing(path):
    text = f"the data {path} does not exist (looked for {path.absolute()})."
    if path.with_name(path.name + ".idx").exists():
        text = f"{path} is a prefix of Megatron's indexed files (.bin, .idx): expected plain text files and folders."
    longer = sorted(file.name.removesuffix(".idx") for file in path.parent.glob(f"{path.name}*_document.idx"))
    if longer:
        text += f" Prepared data has a longer name: {', '.join(longer[:3])}."
    return text


def _read_text(path):
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def hold_out(documents):
    """Cut a list of documents into (training, validation): every tenth is held out.

    Fewer than ten documents are first cut into pieces of a tenth of the text, at most 32 KB, so that a single file has a
    held-out part too.

    Raises:
        CorpusError: the text is too short to be cut.
    """
    if len(documents) < HOLD_OUT_EVERY:
        length = _length(documents)
        documents = _cut(documents, HOLD_OUT_EVERY)
        if len(documents) < 2:
            raise CorpusError(
                f"the text has {length} characters only, too few to hold a part out: give more text, or name "
                "the two parts (--train-data-path, --valid-data-path)."
            )
    last = HOLD_OUT_EVERY - 1
    held_out = documents[last::HOLD_OUT_EVERY] or documents[-1:]
    chosen = {id(document) for document in held_out}
    return [document for document in documents if id(document) not in chosen], held_out


def split_text(documents, split):
    """Cut a list of documents into (training, validation, test), in this order, by the shares of `--split`.

    Documents that are too few for a share are first cut into pieces of a thousandth of the text.

    Args:
        documents (list[tuple[str, str]]): names and texts.
        split (str): such as "949,50,1".

    Raises:
        CorpusError: the text is too short for a share.
    """
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    length = _length(documents)
    for cut in (documents, _cut(documents, _PIECES)):
        parts = [[cut[place] for place in split_documents(ends, len(cut))] if ends else [] for ends in matrix]
        empty = [part.name for part, ends, found in zip(Split, matrix, parts) if ends and not found]
        if not empty:
            return parts
    raise CorpusError(
        f"split (--split) is {split}: of the text's {length} characters none is left for {' and '.join(empty)}. Give more "
        "text or a larger share."
    )


def _length(documents):
    return sum(len(text) for _, text in documents)


def _cut(documents, count):
    """Cut documents into pieces of a `count`-th of the text, at most 32 KB."""
    size = min(_PIECE, max(1, _length(documents) // count))
    return [piece for document in documents for piece in _pieces(*document, size)]


def _pieces(name, text, size):
    pieces, start = [], 0
    while start < len(text):
        end = text.rfind("\n", start, start + size) + 1 if start + size < len(text) else len(text)
        end = end if end > start else start + size
        pieces.append((f"{name}[{start}:{end}]", text[start:end]))
        start = end
    return pieces
