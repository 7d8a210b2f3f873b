"""Corpus of plain text: the encoded tokens on disk, by a given tokenizer or by a byte-level BPE that is trained on the text.

It is a folder whose name is a hash of the text and of the settings; the folder appears whole or not at all, and only one
process builds it while others wait.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindspeed_ms.core.datasets import fingerprint
from mindspeed_ms.core.datasets.text_documents import CorpusError
from mindspeed_ms.core.datasets.tokenizer import Tokenizer, TokenizerError
from mindspeed_ms.core.logging import logger

TOKENIZER_FILE = "tokenizer.json"
END_OF_DOCUMENT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # all bytes and the end of a document
_SHOWN = 20
_FORMAT_VERSION = 1


@dataclass(frozen=True)
class TextCorpus:
    """Encoded corpus of plain text.

    Attributes:
        folder (Path): its folder.
        tokenizer (Tokenizer): what encoded it.
        train_tokens, valid_tokens, test_tokens (np.ndarray): ids, one-dimensional, uint16 or uint32, mapped from disk.
        vocab_size (int): ids are below it.
        end_of_document (int): the id after every document.
        unigram_entropy (float): in nats per token, the loss of the best model that ignores context: -sum(p * log(p)) over
            the frequencies of the training tokens.
        train_documents, valid_documents, test_documents (tuple[str]): their names.
    """

    folder: Path
    tokenizer: Tokenizer
    train_tokens: np.ndarray
    valid_tokens: np.ndarray
    test_tokens: np.ndarray
    vocab_size: int
    end_of_document: int
    unigram_entropy: float
    train_documents: tuple
    valid_documents: tuple
    test_documents: tuple

    def summary(self):
        """Log line with the sizes, the held-out documents and the tokenizer."""
        shown = ", ".join(self.valid_documents[:_SHOWN]) + (", ..." if len(self.valid_documents) > _SHOWN else "")
        test = f"; {len(self.test_tokens)} test tokens in {len(self.test_documents)}" if self.test_documents else ""
        return (
            f"corpus {self.folder}: {len(self.train_tokens)} training tokens in {len(self.train_documents)} documents, "
            f"{len(self.valid_tokens)} held-out tokens in {len(self.valid_documents)}: {shown}{test}; by {self.tokenizer.name}"
        )

    def fingerprints(self):
        """Fingerprints of the parts (dict[str, dict]), see `fingerprint.of_tokens`."""
        parts = {"train": self.train_tokens, "valid": self.valid_tokens, "test": self.test_tokens}
        return {
            name: fingerprint.of_tokens(tokens, len(getattr(self, f"{name}_documents")))
            for name, tokens in parts.items()
            if len(tokens)
        }


def build_text_corpus(cache_directory, training, validation, vocab_size, test=(), tokenizer=None):
    """Build the encoded corpus of these documents once under `cache_directory`; several processes may call this at once.

    Args:
        cache_directory (str or Path): made if it does not exist.
        training, validation, test (list[tuple[str, str]]): names and texts; BPE and entropy come from the training documents
            alone.
        vocab_size (int): at most so many tokens, the end of a document (id 0) included; a short text yields fewer.
        tokenizer (Optional[Tokenizer]): None: a byte-level BPE of `vocab_size` tokens is trained.

    Returns:
        TextCorpus

    Raises:
        CorpusError: the vocabulary is too small for bytes or for the tokenizer, or there is no training text.
        TokenizerError: the tokenizer has no end of document, or cannot encode a document.
    """
    if tokenizer is None and vocab_size < SMALLEST_VOCABULARY:
        raise CorpusError(
            f"the vocabulary has {vocab_size} tokens: text needs at least {SMALLEST_VOCABULARY} (all bytes and "
            "the end of a document). Raise padded_vocab_size."
        )
    if not training:
        raise CorpusError("there is no training text: expected at least one document beside those held out.")
    cache_directory = Path(cache_directory)
    parts = {"train": training, "valid": validation, **({"test": test} if test else {})}
    folder = cache_directory / f"text-{_content_hash(parts.values(), vocab_size, tokenizer)}"
    if not folder.is_dir():
        cache_directory.mkdir(parents=True, exist_ok=True)
        with open(cache_directory / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                _build(folder, parts, vocab_size, tokenizer)
    return load_text_corpus(folder, tokenizer)


def load_text_corpus(folder, tokenizer=None):
    """Open a corpus folder; `tokenizer` as in `build_text_corpus`.

    Raises:
        FileNotFoundError: one of its files is missing.
        CorpusError: one of them is damaged.
    """
    folder = Path(folder)
    for name in ("corpus.json", "train.npy", "valid.npy", *(() if tokenizer else (TOKENIZER_FILE,))):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"the tokenized corpus {folder} has no {name}: delete the folder to have it built again.")
    try:
        description = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        names = {part: tuple(description.get(f"{part}_documents", ())) for part in ("train", "valid", "test")}
        arrays = {part: np.load(folder / f"{part}.npy", mmap_mode="r") for part in names if part != "test" or names[part]}
        tokenizer = tokenizer or _trained_tokenizer(folder / TOKENIZER_FILE)
    except (ValueError, EOFError, OSError) as error:
        raise CorpusError(
            f"the tokenized corpus {folder} is damaged ({error}): delete the folder to have it built again."
        ) from error
    return TextCorpus(
        folder=folder,
        tokenizer=tokenizer,
        **{f"{part}_tokens": arrays.get(part, np.empty(0, np.uint16)) for part in names},
        **{f"{part}_documents": documents for part, documents in names.items()},
        **{name: description[name] for name in ("vocab_size", "end_of_document", "unigram_entropy")},
    )


def unigram_entropy(tokens):
    """Entropy in nats of the frequencies of token ids."""
    counts = np.bincount(np.asarray(tokens, np.int64)).astype(np.float64)
    probabilities = counts[counts > 0] / counts.sum()
    return float(-(probabilities * np.log(probabilities)).sum())


def _content_hash(parts, vocab_size, tokenizer):
    digest = hashlib.sha256(f"{_FORMAT_VERSION} {vocab_size if tokenizer is None else _content_of(tokenizer)}".encode())
    for part in parts:
        digest.update(b"\npart")
        for name, text in part:
            digest.update(f"\n{name} {hashlib.sha256(text.encode()).hexdigest()}".encode())
    return digest.hexdigest()[:16]


def _content_of(tokenizer):
    return fingerprint.of_tokenizer(tokenizer)["hash"]


def _build(folder, parts, vocab_size, tokenizer):
    start = time.perf_counter()
    temporary = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        way = f"BPE of {vocab_size} tokens from" if tokenizer is None else f"{tokenizer.name} on"
        logger.info("building the corpus: %s %d documents (once; kept in %s)", way, len(parts["train"]), folder)
        if tokenizer is None:
            trained = _train_tokenizer([text for _, text in parts["train"]], vocab_size)
            trained.save(str(temporary / TOKENIZER_FILE))
            size, end = trained.get_vocab_size(), trained.token_to_id(END_OF_DOCUMENT)
            tokens = {part: _encode_by(trained, documents, end, size) for part, documents in parts.items()}
        else:
            size, end = tokenizer.vocab_size, tokenizer.eod
            tokens = {part: _encode(tokenizer, documents) for part, documents in parts.items()}
        description = {
            "vocab_size": size,
            "end_of_document": end,
            "unigram_entropy": unigram_entropy(tokens["train"]),
            **{f"{part}_documents": [name for name, _ in documents] for part, documents in parts.items()},
        }
        for part, ids in tokens.items():
            np.save(temporary / f"{part}.npy", ids)
        (temporary / "corpus.json").write_text(json.dumps(description, indent=1), encoding="utf-8")
        os.chmod(temporary, 0o755)  # mkdtemp closes it to others
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    logger.info(
        "corpus built in %.1f s: %d training tokens, %d held-out tokens",
        time.perf_counter() - start,
        len(tokens["train"]),
        len(tokens["valid"]),
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


def _trained_tokenizer(path):
    from mindspeed_ms.core.datasets.tokenizer.fast import FastTokenizer, read_backend

    tokenizer = FastTokenizer(read_backend(str(path)), f"the BPE {path}")
    tokenizer.set_roles(eos=END_OF_DOCUMENT)
    return tokenizer


def _encode_by(backend, documents, end, vocab_size):
    # a text may spell the special token out; as text it must not become one
    texts = [text.replace(END_OF_DOCUMENT, "") for _, text in documents]
    encoded = backend.encode_batch(texts, add_special_tokens=False)
    return _joined((encoding.ids for encoding in encoded), end, vocab_size)


def _encode(tokenizer, documents):
    try:
        encoded = tokenizer.encode_batch([text for _, text in documents])
    except TokenizerError:
        for name, text in documents:
            try:
                tokenizer.tokenize(text)
            except TokenizerError as error:
                raise TokenizerError(f"{name}: {error}") from error
        raise
    return _joined(encoded, tokenizer.eod, tokenizer.vocab_size)


def _joined(documents, end, vocab_size):
    """All ids, each document followed by its end."""
    ids = []
    for document in documents:
        ids += document
        ids.append(end)
    return np.asarray(ids, np.uint16 if vocab_size <= 65536 else np.uint32)
