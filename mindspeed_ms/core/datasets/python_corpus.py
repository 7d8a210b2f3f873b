"""A corpus of real text that every machine has: the sources of Python's own standard library.

The files are taken in a fixed order up to a size limit; every twentieth one is held out for validation. A byte-level BPE
is trained on the training files, both parts are encoded, and the result is kept in a folder whose name is a hash of the
text and of the settings. The folder appears whole or not at all, and only one process builds it while others wait.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

logger = logging.getLogger("mindspeed_ms")

END_OF_DOCUMENT = "<|endoftext|>"
# Test data, tables and bundled programs say little about the language, and some distributions leave them out.
_SKIPPED_FOLDERS = frozenset(
    "__pycache__ __phello__ dist-packages distutils encodings ensurepip idlelib lib2to3 lib-dynload pydoc_data "
    "site-packages test tests turtledemo".split()
)
_HOLD_OUT_EVERY = 20
_FORMAT_VERSION = 1


@dataclass(frozen=True)
class TokenizedCorpus:
    """An encoded corpus. `train_tokens` and `valid_tokens` are one-dimensional uint16 arrays, mapped from disk.

    Every document ends with token `end_of_document`. `unigram_entropy` is, in nats per token, the loss of the best model
    that ignores context: -sum(p * log(p)) over the frequencies of the training tokens.
    """

    folder: Path
    train_tokens: np.ndarray
    valid_tokens: np.ndarray
    vocab_size: int
    end_of_document: int
    unigram_entropy: float
    train_files: tuple
    valid_files: tuple

    def tokenizer(self):
        """The trained `tokenizers.Tokenizer`."""
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))


def standard_library_files(size_limit):
    """Names and texts of the standard library's sources in a fixed order, `size_limit` bytes at most.

    The order is that of a hash of the name, so that a limit drops files from everywhere instead of the end of the
    alphabet. Returns a list of (name, text); raises FileNotFoundError if this Python came without its sources.
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
        content = (root / name).read_bytes()
        if size + len(content) > size_limit:
            continue
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            documents.append((name, text))
            size += len(content)
    if len(documents) < 2 * _HOLD_OUT_EVERY:
        raise FileNotFoundError(
            f"The default corpus is Python's own standard library, but only {len(documents)} readable .py files were found "
            f"under {root}. Install the full standard library, or train on your own tokens with --data-path PREFIX."
        )
    return documents


def build_python_corpus(cache_directory, vocab_size, size_limit=6_000_000):
    """Return the TokenizedCorpus of this machine's standard library, building it once under `cache_directory`.

    `vocab_size` counts the end-of-document token (id 0). Several processes may call this at once. Raises ValueError for a
    vocabulary that a byte-level BPE cannot have, FileNotFoundError if there is no text.
    """
    if not 257 <= vocab_size <= 65536:
        raise ValueError(f"vocab_size of the default corpus must be within 257 (bytes and end of document) and 65536, got {vocab_size}.")
    documents = standard_library_files(size_limit)
    cache_directory = Path(cache_directory)
    folder = cache_directory / f"python-{_content_hash(documents, vocab_size)}"
    if not folder.is_dir():
        cache_directory.mkdir(parents=True, exist_ok=True)
        with open(cache_directory / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                _build(folder, documents, vocab_size)
    return load_corpus(folder)


def load_corpus(folder):
    """Open a corpus folder. Raises FileNotFoundError naming what is missing."""
    folder = Path(folder)
    for name in ("corpus.json", "train.npy", "valid.npy", "tokenizer.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"The tokenized corpus {folder} has no {name}. Delete the folder to have it built again.")
    description = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    return TokenizedCorpus(
        folder=folder,
        train_tokens=np.load(folder / "train.npy", mmap_mode="r"),
        valid_tokens=np.load(folder / "valid.npy", mmap_mode="r"),
        vocab_size=description["vocab_size"],
        end_of_document=description["end_of_document"],
        unigram_entropy=description["unigram_entropy"],
        train_files=tuple(description["train_files"]),
        valid_files=tuple(description["valid_files"]),
    )


def unigram_entropy(tokens, vocab_size):
    """Entropy in nats of the token frequencies."""
    counts = np.bincount(np.asarray(tokens, np.int64), minlength=vocab_size).astype(np.float64)
    probabilities = counts[counts > 0] / counts.sum()
    return float(-(probabilities * np.log(probabilities)).sum())


def _content_hash(documents, vocab_size):
    digest = hashlib.sha256(f"{_FORMAT_VERSION} {vocab_size} {_HOLD_OUT_EVERY}".encode())
    for name, text in documents:
        digest.update(f"\n{name} {hashlib.sha256(text.encode()).hexdigest()}".encode())
    return digest.hexdigest()[:16]


def _build(folder, documents, vocab_size):
    start = time.perf_counter()
    held_out = documents[_HOLD_OUT_EVERY - 1 :: _HOLD_OUT_EVERY]
    training = [document for index, document in enumerate(documents) if index % _HOLD_OUT_EVERY != _HOLD_OUT_EVERY - 1]
    tokenizer = _train_tokenizer((text for _, text in training), vocab_size)
    train_tokens, valid_tokens = _encode(tokenizer, training), _encode(tokenizer, held_out)
    description = {
        "source": "Python standard library",
        "vocab_size": vocab_size,
        "end_of_document": tokenizer.token_to_id(END_OF_DOCUMENT),
        "unigram_entropy": unigram_entropy(train_tokens, vocab_size),
        "train_files": [name for name, _ in training],
        "valid_files": [name for name, _ in held_out],
    }
    temporary = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        tokenizer.save(str(temporary / "tokenizer.json"))
        np.save(temporary / "train.npy", train_tokens)
        np.save(temporary / "valid.npy", valid_tokens)
        (temporary / "corpus.json").write_text(json.dumps(description, indent=1), encoding="utf-8")
        os.chmod(temporary, 0o755)
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    logger.info(
        "Corpus built in %.1f s: %d training files (%d tokens), %d held-out files (%d tokens), vocabulary %d.",
        time.perf_counter() - start, len(training), len(train_tokens), len(held_out), len(valid_tokens), vocab_size,
    )


def _train_tokenizer(texts, vocab_size):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"The corpus is too small for a vocabulary of {vocab_size} tokens: BPE stopped at "
            f"{tokenizer.get_vocab_size()}. Choose a smaller padded_vocab_size."
        )
    return tokenizer


def _encode(tokenizer, documents):
    """Encode the texts, an end-of-document token after each: uint16, one-dimensional."""
    # A source may spell the special token out; as text it must not become one.
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    texts = [text.replace(END_OF_DOCUMENT, "") for _, text in documents]
    pieces = []
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        pieces += encoding.ids
        pieces.append(end)
    return np.asarray(pieces, np.uint16)
