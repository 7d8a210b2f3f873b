"""Perplexity of texts or of token files, in windows that may overlap."""

import itertools
import json
import math
import os
from dataclasses import dataclass

import numpy as np

from mindspeed_ms.core.datasets.indexed_dataset import IndexedDataset
from mindspeed_ms.inference.sampling import RequestError
from mindspeed_ms.tasks.evaluation.errors import EvaluationError
from mindspeed_ms.tasks.evaluation.records import read_records


@dataclass(frozen=True)
class Document:
    """Tokens of a document; `size` in bytes of UTF-8, None if only tokens are known."""

    ids: np.ndarray
    size: int | None


def documents_of(path, tokenizer):
    """Documents (list[Document]) of a file: `.bin`/`.idx` prefix, jsonl with "text", or a text that is one document.

    Raises:
        EvaluationError: no such file, no text, a document without tokens to predict.
    """
    prefix = path.removesuffix(".bin").removesuffix(".idx")
    if os.path.exists(prefix + ".idx"):
        dataset = IndexedDataset(prefix)
        documents = [Document(np.asarray(ids), None) for ids in _of_documents(dataset)]
    elif path.endswith((".jsonl", ".json")):
        documents = [_of_text(record.text("text", "content"), tokenizer) for record in read_records(path)]
    else:
        documents = [_of_text(_read_text(path), tokenizer)]
    if not any(len(document.ids) > 1 for document in documents):
        raise EvaluationError(f"{path} holds no document of two tokens or more: there is nothing to predict.")
    return documents


def _of_documents(dataset):
    """Ids of each document: its sequences joined."""
    bounds = dataset.document_indices
    for first, last in itertools.pairwise(bounds):
        parts = [dataset[number] for number in range(first, last)]
        yield np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _of_text(text, tokenizer):
    if tokenizer is None:
        raise EvaluationError("the model has no tokenizer: give a .bin/.idx prefix, or a tokenizer.")
    ids = tokenizer.tokenize(text)
    ids = ids[:-1] if tokenizer.adds_eos and ids[-1:] == [tokenizer.eos] else ids
    return Document(np.asarray(ids, np.int64), len(text.encode()))


def _read_text(path):
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path} cannot be read as a text: {error}") from None


def windows_of(length, window, stride):
    """Windows over a document: (start, stop, first): tokens start..stop go in, those from `first` on are scored.

    Each token but the very first is scored once, after at least window - stride tokens if the document has them.

    Args:
        length (int): tokens of the document.
        window (int): tokens that go in at a time.
        stride (int): tokens that are new in each window but the first; below `window`.
    """
    stop, windows = min(window, length), []
    if length > 1:
        windows.append((0, stop, 1))
    while stop < length:
        first, stop = stop, min(stop + stride, length)
        windows.append((max(0, stop - window), stop, first))
    return windows


def check(documents, limits, window=None, stride=None):
    """(window, stride) of `evaluate`, checked.

    Args:
        documents (list[Document]), window, stride (Optional[int]): see `evaluate`.
        limits: with `max_sequence_length` and `vocab_size`: a ModelRunner, or a Checkpoint before it is loaded.

    Raises:
        RequestError: a window longer than the context, a stride that is not below it.
        EvaluationError: an id out of the vocabulary.
    """
    longest = limits.max_sequence_length
    window = min(longest, max(len(document.ids) for document in documents)) if window is None else window
    stride = max(1, window // 2) if stride is None else stride
    if not 2 <= window <= longest:
        raise RequestError("window", f"is {window}: expected 2 to {longest}, the model's context.")
    if not 1 <= stride < window:
        raise RequestError("stride", f"is {stride}: expected 1 to {window - 1}, below the window: no token is left out.")
    for document in documents:
        if document.ids.size and not 0 <= document.ids.min() <= document.ids.max() < limits.vocab_size:
            raise EvaluationError(
                f"a document holds the token id {int(document.ids.max())}: the model's vocabulary has {limits.vocab_size} ids. "
                "The data was made with another tokenizer."
            )
    return window, stride


def evaluate(runner, documents, batch_size, window=None, stride=None, progress=None):
    """Perplexity of documents: exp of the mean negative log-likelihood of all tokens but the first of each document.

    Args:
        runner (ModelRunner): the model.
        documents (list[Document]): see `documents_of`.
        batch_size (int): windows at a time.
        window (Optional[int]): tokens that go in at a time; None: the model's context, at most the longest document.
        stride (Optional[int]): new tokens of a window; None: half of it.
        progress (Optional[Callable]): called with the number of windows that are done.

    Returns:
        dict: tokens, mean_nll, perplexity; of texts also bits_per_byte

    Raises:
        RequestError, EvaluationError: see `check`.
    """
    window, stride = check(documents, runner, window, stride)
    parts = [(document.ids, *cut) for document in documents for cut in windows_of(len(document.ids), window, stride)]
    parts.sort(key=lambda part: -(part[2] - part[1]))
    sums, tokens = [], 0
    for begin in range(0, len(parts), batch_size):
        chosen = parts[begin : begin + batch_size]
        sequences = [ids[start:stop].tolist() for ids, start, stop, _ in chosen]
        for one in runner.score(sequences, [first - start for _, start, _, first in chosen]):
            sums.append(float(np.sum(one.log_probabilities)))
            tokens += len(one.log_probabilities)
        if progress:
            progress(len(chosen))
    total = -math.fsum(sums)
    result = {"tokens": tokens, "mean_nll": total / tokens, "perplexity": math.exp(min(total / tokens, 700.0))}
    sizes = [document.size for document in documents]
    if None not in sizes:
        result["bits_per_byte"] = total / math.log(2) / max(1, sum(sizes))
    return result


def as_text(result):
    """Result of `evaluate` as lines."""
    return "\n".join(f"{name:<13}  {json.dumps(value)}" for name, value in result.items())
