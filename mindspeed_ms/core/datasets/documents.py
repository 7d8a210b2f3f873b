"""Position ids and attention masks of samples with several documents (reset at each end of a document)."""

import numpy as np


def document_positions(length, ends=(), dtype=np.int32):
    """Position ids `[length]` that begin at 0 behind each end of a document.

    Args:
        length (int): tokens of the sample.
        ends (np.ndarray): places of the tokens that end a document.
    """
    positions = np.arange(length, dtype=dtype)
    starts = _starts(length, ends)
    first = np.zeros(length, dtype)
    first[starts] = starts
    return positions - np.maximum.accumulate(first)


def document_attention_mask(length, ends=()):
    """Bool `[1, length, length]`, True = blocked: later positions, and other documents.

    Args:
        length (int): tokens of the sample.
        ends (np.ndarray): places of the tokens that end a document.
    """
    document = np.zeros(length, np.int32)
    document[_starts(length, ends)] = 1
    document = np.cumsum(document)
    allowed = np.tri(length, dtype=bool) & (document[:, None] == document[None, :])
    return ~allowed[None]


def document_intervals(length, ends=()):
    """`document_attention_mask` without a matrix: int32 `[1, length, 2]`, the first key that each query sees and the one after
    the last. Attention over cut sequences takes it as it is.
    """
    last = np.arange(length, dtype=np.int32)
    first = np.zeros(length, np.int32)
    starts = _starts(length, ends)
    first[starts] = starts
    return np.stack([np.maximum.accumulate(first), last + np.int32(1)], axis=-1)[None]


def _starts(length, ends):
    starts = np.asarray(ends, np.int64) + 1
    return starts[starts < length]
