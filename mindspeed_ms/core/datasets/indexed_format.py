"""File format of Megatron's indexed datasets: `prefix.bin` holds the tokens of all sequences, `prefix.idx` their positions.

Source of the format: Megatron-LM core_v0.12.1. `.idx`, little endian: the magic, uint64 version 1, uint8 code of the tokens'
dtype, uint64 number of sequences, uint64 number of document indices (documents + 1), int32 lengths in tokens, int64 positions
in bytes, int64 document indices: document `i` holds the sequences `[document_indices[i], document_indices[i + 1])`.
"""

import os
import struct
from enum import Enum

import numpy as np

from mindspeed_ms.core.datasets.errors import DatasetError
from mindspeed_ms.core.logging import logger

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
_UINT16_VOCABULARY = 65500  # Megatron keeps ids of smaller vocabularies in uint16
_CHECKED_AT_ONCE = 1 << 20


class IndexedDatasetError(DatasetError):
    """Indexed files that are damaged, of another kind, or unable to hold the data written to them."""


class DType(Enum):
    """Codes of the tokens' dtypes in an `.idx` file."""

    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float64 = 6
    float32 = 7
    uint16 = 8

    @classmethod
    def code_from_dtype(cls, dtype):
        """Code (int) of a numpy dtype.

        Raises:
            IndexedDatasetError: the format has no such dtype.
        """
        name = np.dtype(dtype).name
        if name not in cls.__members__:
            raise IndexedDatasetError(f"indexed files cannot hold {name}: expected one of {', '.join(cls.__members__)}.")
        return cls[name].value

    @classmethod
    def dtype_from_code(cls, code):
        """Numpy type of a code; ValueError for an unknown one."""
        return getattr(np, cls(code).name)

    @classmethod
    def size(cls, key):
        """Bytes of one token; takes a code (int) or a numpy dtype."""
        return np.dtype(cls.dtype_from_code(key) if isinstance(key, int) else key).itemsize

    @staticmethod
    def optimal_dtype(cardinality):
        """`best_fitting_dtype` under Megatron's name."""
        return best_fitting_dtype(cardinality)


def best_fitting_dtype(vocab_size=None):
    """Dtype in which Megatron stores token ids.

    Args:
        vocab_size (Optional[int]): number of ids, added tokens included; None: unknown.

    Returns:
        type: np.uint16 below 65500 ids, else np.int32.

    Raises:
        IndexedDatasetError: more ids than int32 holds.
    """
    if vocab_size is not None and vocab_size > 2**31:
        raise IndexedDatasetError(f"the vocabulary has {vocab_size} ids, more than int32 tokens can tell apart (2147483648).")
    return np.uint16 if vocab_size is not None and vocab_size < _UINT16_VOCABULARY else np.int32


def get_bin_path(path_prefix):
    """Path `prefix.bin`."""
    return f"{path_prefix}.bin"


def get_idx_path(path_prefix):
    """Path `prefix.idx`."""
    return f"{path_prefix}.idx"


def sequence_pointers(lengths, dtype):
    """Byte positions (int64) of sequences that lie one after the other.

    Args:
        lengths (np.ndarray): int32, in tokens.
        dtype (type): of the tokens.
    """
    ends = np.cumsum(lengths, dtype=np.int64) * np.dtype(dtype).itemsize
    return np.concatenate([np.zeros(min(len(ends), 1), np.int64), ends[:-1]])


def read_index(idx_path):
    """Read an `.idx` file, mapped and checked: (dtype, lengths, pointers, document indices)."""
    size = os.path.getsize(idx_path)
    with open(idx_path, "rb") as file:
        header = file.read(HEADER.size)
    if header[: len(MAGIC)] != MAGIC[: len(header)] or not header:
        raise IndexedDatasetError(
            f"{idx_path} does not begin with {MAGIC!r} but with {header[: len(MAGIC)]!r}: it is no index "
            "of Megatron's (the very old TNTIDX format must be preprocessed again)."
        )
    if len(header) < HEADER.size:
        raise IndexedDatasetError(f"{idx_path} is truncated: it has {size} bytes, its header alone needs {HEADER.size}.")
    _, version, code, sequences, documents = HEADER.unpack(header)
    if version != VERSION:
        raise IndexedDatasetError(f"{idx_path} has version {version}: expected {VERSION}.")
    if code not in {member.value for member in DType}:
        raise IndexedDatasetError(
            f"{idx_path} has dtype code {code}: expected {', '.join(f'{member.value} ({member.name})' for member in DType)}."
        )
    _check_index_size(idx_path, size, sequences, documents)
    data = np.memmap(idx_path, np.uint8, "r")
    start, arrays = HEADER.size, []
    for dtype, count in ((np.int32, sequences), (np.int64, sequences), (np.int64, documents)):
        arrays.append(np.frombuffer(data, dtype, count, start) if count else np.empty(0, dtype))
        start += arrays[-1].nbytes
    return DType.dtype_from_code(code), *arrays


def _check_index_size(idx_path, size, sequences, documents):
    expected = HEADER.size + 12 * sequences + 8 * documents
    if sequences and size == expected + sequences:
        raise IndexedDatasetError(
            f"{idx_path} holds a mode for each of its {sequences} sequences: it is a multimodal dataset, expected text only."
        )
    if size != expected:
        kind = "truncated" if size < expected else "damaged"
        raise IndexedDatasetError(
            f"{idx_path} is {kind}: {sequences} sequences and {documents} document indices need "
            f"{expected} bytes, it has {size}."
        )


def check_sequences(dataset, idx_path, bin_path, bin_size):
    """Raise an error unless sequences follow each other inside the `.bin` file and documents end with the last one.

    Bytes between two sequences are no error, as both are read where they lie, but Megatron's writer leaves none: a warning.
    """
    documents, total = dataset.document_indices, len(dataset)
    ends = (int(documents[0]), int(documents[-1])) if len(documents) else None
    if ends != (0, total) or np.any(documents[1:] < documents[:-1]):
        raise IndexedDatasetError(
            f"{idx_path} is damaged: its document indices must rise from 0 to {total} (the number of "
            f"sequences), they go from {ends[0]} to {ends[1]}."
            if ends
            else f"{idx_path} is damaged: it has no document indices."
        )
    end, gaps, first_gap = 0, 0, ""
    for start in range(0, total, _CHECKED_AT_ONCE):
        lengths = dataset.sequence_lengths[start : start + _CHECKED_AT_ONCE]
        pointers = dataset.sequence_pointers[start : start + _CHECKED_AT_ONCE]
        sequence_ends = pointers + lengths.astype(np.int64) * dataset.itemsize
        before = np.append(end, sequence_ends[:-1])
        elsewhere = np.flatnonzero((pointers != before) | (lengths < 0))
        if elsewhere.size:
            wrong = (lengths < 0) | (pointers < before) | (pointers % dataset.itemsize != 0)
            first = int(np.flatnonzero(wrong)[0]) if wrong.any() else int(elsewhere[0])
            place = (
                f"sequence {start + first} has {lengths[first]} tokens and begins at byte {pointers[first]}, the one "
                f"before it ends at byte {before[first]}"
            )
            if wrong.any():
                raise IndexedDatasetError(f"{idx_path} is damaged: {place}.")
            gaps, first_gap = gaps + len(elsewhere), first_gap or place
        end = int(sequence_ends[-1])
    if end > bin_size:
        first = int(
            np.searchsorted(
                dataset.sequence_pointers + dataset.sequence_lengths.astype(np.int64) * dataset.itemsize, bin_size, "right"
            )
        )
        raise IndexedDatasetError(
            f"{bin_path} is truncated: it has {bin_size} bytes, {idx_path} says that sequences end at "
            f"byte {end}; sequence {first} of {total} is the first one that is not whole."
        )
    if gaps:
        logger.warning(
            "%s leaves out bytes of %s at %d places, which Megatron's writer never does: %s. Is the index damaged?",
            idx_path,
            bin_path,
            gaps,
            first_gap,
        )
    if end < bin_size:
        logger.warning(
            "%s has %d bytes, of which %s uses %d: are the two files from the same run?", bin_path, bin_size, idx_path, end
        )
