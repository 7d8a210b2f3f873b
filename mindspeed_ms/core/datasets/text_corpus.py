"""Corpus of plain text: documents, a byte-level BPE trained on them, and the encoded tokens on disk.

The default text is one that every machine has: the sources of Python's own standard library. Every tenth document is held
out for validation. The result is a folder whose name is a hash of the text and of the settings; the folder appears
whole or not at all, and only one process builds it while others wait.
"""

import fcntl
import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindspeed_ms.core.datasets.errors import DatasetError
from mindspeed_ms.core.logging import logger

END_OF_DOCUMENT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # all bytes and the end of a document
HOLD_OUT_EVERY = 10
# Tests, tables and bundled programs say little about the language, and some distributions leave them out.
_SKIPPED_FOLDERS = frozenset(
    "__pycache__ __phello__ dist-packages distutils encodings ensurepip idlelib lib2to3 lib-dynload pydoc_data "
    "site-packages test tests turtledemo".split()
)
_PIECE = 32_768
_SHOWN = 20
_FORMAT_VERSION = 1


class CorpusError(DatasetError):
    """Text that cannot be made into a corpus; the message says what to give instead."""


@dataclass(frozen=True)
class TextCorpus:
    """Encoded corpus of plain text.

    Attributes:
        folder (Path): its folder.
        train_tokens, valid_tokens (np.ndarray): ids, one-dimensional, uint16 or uint32, mapped from disk.
        vocab_size (int): ids are below it.
        end_of_document (int): the id after every document.
        unigram_entropy (float): in nats per token, the loss of the best model that ignores context: -sum(p * log(p)) over
            the frequencies of the training tokens.
        train_documents, valid_documents (tuple[str]): their names.
    """

    folder: Path
    train_tokens: np.ndarray
    valid_tokens: np.ndarray
    vocab_size: int
    end_of_document: int
    unigram_entropy: float
    train_documents: tuple
    valid_documents: tuple

    def tokenizer(self):
        """The trained `tokenizers.Tokenizer`."""
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def summary(self):
        """Log line with the sizes and the held-out documents."""
        shown = ", ".join(self.valid_documents[:_SHOWN]) + (", ..." if len(self.valid_documents) > _SHOWN else "")
        return (
            f"corpus {self.folder}: {len(self.train_tokens)} training tokens in {len(self.train_documents)} documents, "
            f"{len(self.valid_tokens)} held-out tokens in {len(self.valid_documents)}: {shown}"
        )


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
        length = sum(len(text) for _, text in documents)
        size = min(_PIECE, max(1, length // HOLD_OUT_EVERY))
        documents = [piece for document in documents for piece in _pieces(*document, size)]
        if len(documents) < 2:
            raise CorpusError(
                f"the text has {length} characters only, too few to hold a part out: give more text, or name "
                "the two parts (--train-data-path, --valid-data-path)."
            )
    last = HOLD_OUT_EVERY - 1
    held_out = documents[last::HOLD_OUT_EVERY] or documents[-1:]
    chosen = {id(document) for document in held_out}
    return [document for document in documents if id(document) not in chosen], held_out


def _pieces(name, text, size):
    pieces, start = [], 0
    while start < len(text):
        end = text.rfind("\n", start, start + size) + 1 if start + size < len(text) else len(text)
        end = end if end > start else start + size
        pieces.append((f"{name}[{start}:{end}]", text[start:end]))
        start = end
    return pieces


def build_text_corpus(cache_directory, training, validation, vocab_size):
    """Build the encoded corpus of these documents once under `cache_directory`; several processes may call this at once.

    Args:
        cache_directory (str or Path): made if it does not exist.
        training, validation (list[tuple[str, str]]): names and texts; BPE and entropy come from the training documents alone.
        vocab_size (int): at most so many tokens, the end of a document (id 0) included; a short text yields fewer.

    Returns:
        TextCorpus

    Raises:
        CorpusError: the vocabulary is too small for bytes, or there is no training text.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise CorpusError(
            f"the vocabulary has {vocab_size} tokens: text needs at least {SMALLEST_VOCABULARY} (all bytes and "
            "the end of a document). Raise padded_vocab_size."
        )
    if not training:
        raise CorpusError("there is no training text: expected at least one document beside those held out.")
    cache_directory = Path(cache_directory)
    folder = cache_directory / f"text-{_content_hash(training, validation, vocab_size)}"
    if not folder.is_dir():
        cache_directory.mkdir(parents=True, exist_ok=True)
        with open(cache_directory / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                _build(folder, training, validation, vocab_size)
    return load_text_corpus(folder)


def load_text_corpus(folder):
    """Open a corpus folder.

    Raises:
        FileNotFoundError: one of its files is missing.
        CorpusError: one of them is damaged.
    """
    folder = Path(folder)
    for name in ("corpus.json", "train.npy", "valid.npy", "tokenizer.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"the tokenized corpus {folder} has no {name}: delete the folder to have it built again.")
    try:
        description = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        train_tokens, valid_tokens = (np.load(folder / name, mmap_mode="r") for name in ("train.npy", "valid.npy"))
    except (ValueError, EOFError) as error:
        raise CorpusError(
            f"the tokenized corpus {folder} is damaged ({error}): delete the folder to have it built again."
        ) from error
    return TextCorpus(
        folder=folder,
        train_tokens=train_tokens,
        valid_tokens=valid_tokens,
        vocab_size=description["vocab_size"],
        end_of_document=description["end_of_document"],
        unigram_entropy=description["unigram_entropy"],
        train_documents=tuple(description["train_documents"]),
        valid_documents=tuple(description["valid_documents"]),
    )


def unigram_entropy(tokens):
    """Entropy in nats of the frequencies of token ids."""
    counts = np.bincount(np.asarray(tokens, np.int64)).astype(np.float64)
    probabilities = counts[counts > 0] / counts.sum()
    return float(-(probabilities * np.log(probabilities)).sum())


def _content_hash(training, validation, vocab_size):
    digest = hashlib.sha256(f"{_FORMAT_VERSION} {vocab_size}".encode())
    for part in (training, validation):
        digest.update(b"\npart")
        for name, text in part:
            digest.update(f"\n{name} {hashlib.sha256(text.encode()).hexdigest()}".encode())
    return digest.hexdigest()[:16]


def _build(folder, training, validation, vocab_size):
    start = time.perf_counter()
    logger.info("building the corpus: BPE of %d tokens from %d documents (once; kept in %s)", vocab_size, len(training), folder)
    tokenizer = _train_tokenizer([text for _, text in training], vocab_size)
    train_tokens, valid_tokens = _encode(tokenizer, training), _encode(tokenizer, validation)
    description = {
        "vocab_size": tokenizer.get_vocab_size(),
        "end_of_document": tokenizer.token_to_id(END_OF_DOCUMENT),
        "unigram_entropy": unigram_entropy(train_tokens),
        "train_documents": [name for name, _ in training],
        "valid_documents": [name for name, _ in validation],
    }
    temporary = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        tokenizer.save(str(temporary / "tokenizer.json"))
        np.save(temporary / "train.npy", train_tokens)
        np.save(temporary / "valid.npy", valid_tokens)
        (temporary / "corpus.json").write_text(json.dumps(description, indent=1), encoding="utf-8")
        os.chmod(temporary, 0o755)  # mkdtemp closes it to others
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    logger.info(
        "corpus built in %.1f s: %d training tokens, %d held-out tokens",
        time.perf_counter() - start,
        len(train_tokens),
        len(valid_tokens),
    )


def _train_tokenizer(texts, vocab_size):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _encode(tokenizer, documents):
    # a text may spell the special token out; as text it must not become one
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    texts = [text.replace(END_OF_DOCUMENT, "") for _, text in documents]
    ids = []
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        ids += encoding.ids
        ids.append(end)
    return np.asarray(ids, np.uint16 if tokenizer.get_vocab_size() <= 65536 else np.uint32)
