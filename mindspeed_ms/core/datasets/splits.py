"""Train, validation and test splits (`--split`) and blends (`--data-path`). Rules: Megatron-LM core_v0.12.1."""

import enum
import itertools
import math
import re

import numpy as np

from mindspeed_ms.core.datasets.errors import DatasetError

DEFAULT_SPLIT = "969, 30, 1"
"""Megatron's, for data that is named without a split."""


class Split(enum.Enum):
    """Kinds of splits: training, validation, test."""

    train = 0
    valid = 1
    test = 2


def normalize(weights):
    """Weights (list[float]) divided by their sum, in float64."""
    weights = np.array(weights, np.float64)
    return (weights / np.sum(weights)).tolist()


def parse_and_normalize_split(split):
    """Shares of training, validation and test in a `--split` text.

    Args:
        split (str): up to three numbers from 0, joined by commas, such as "949,50,1"; missing numbers are 0.

    Returns:
        list[float]: three shares, their sum is 1.

    Raises:
        DatasetError: something else.
    """
    words = [word.strip() for word in re.split("[,/]", split)]
    numbers = all(re.fullmatch(r"\d+\.?\d*|\.\d+", word) for word in words)
    shares = [float(word) for word in words] if numbers else []
    if not 1 <= len(shares) <= len(Split) or not 0 < sum(shares) < math.inf:
        raise DatasetError(
            f"split is {split!r}: expected up to three numbers from 0, at least one above 0, joined by commas, "
            "such as 949,50,1."
        )
    return normalize(shares + [0.0] * (len(Split) - len(shares)))


def convert_split_vector_to_split_matrix(shares):
    """Bounds of each split, from the shares.

    Args:
        shares (list[float]): of training, validation and test.

    Returns:
        list[Optional[tuple[float, float]]]: parts of the whole, from 0 to 1; None for a split that gets nothing.
    """
    ends = [0]
    for share in shares:
        ends.append(ends[-1] + share)
    return [(begin, end) if end > begin else None for begin, end in itertools.pairwise(ends)]


def split_documents(bookends, documents):
    """Documents (np.ndarray, int32) of a split.

    Args:
        bookends (tuple[float, float]): an entry of the split matrix.
        documents (int): documents of the whole.
    """
    begin, end = (round(bookend * float(documents)) for bookend in bookends)
    return np.arange(begin, end, dtype=np.int32)


def get_blend_from_list(words):
    """Prefixes and weights of a `--data-path` list.

    Args:
        words (Optional[list[str]]): prefixes, or a weight before each prefix: `["0.3", "first", "0.7", "second"]`.

    Returns:
        Optional[tuple[list[str], Optional[list[float]]]]: prefixes, and their weights or None.

    Raises:
        DatasetError: a weight is missing, zero, negative or not finite, or a prefix is empty.
    """
    if not words:
        return None
    words = [str(word).strip() for word in words]
    weights = [_number(word) for word in words[0::2]]
    if len(words) % 2 or all(weight is None for weight in weights):
        if len(words) > 1 and weights[0] is not None and weights[-1] is not None:
            raise DatasetError(
                f"the data is named by {' '.join(words)}: a prefix follows each weight (0.3 first 0.7 second), "
                "here one is missing."
            )
        return _prefixes(words), None
    check_weights(words[1::2], weights, words[0::2])
    return _prefixes(words[1::2]), weights


def check_weights(prefixes, weights, words=None):
    """Raise DatasetError unless each prefix has a finite weight (float) above 0. `words`: the weights as typed."""
    if len(prefixes) != len(weights):
        raise DatasetError(f"{len(prefixes)} prefixes of data have {len(weights)} weights: expected as many.")
    for prefix, weight, word in zip(prefixes, weights, words or weights):
        if weight is None or not (math.isfinite(weight) and weight > 0):
            raise DatasetError(
                f"the weight of data {prefix} is {word!r}: expected a number above 0 before each prefix, or no weights at all."
            )
    if not math.isfinite(sum(weights)):
        raise DatasetError(f"the weights of data are {weights}: their sum is too large for a number. Give smaller ones.")


def _prefixes(words):
    if not all(words):
        raise DatasetError(f"the data is named by {words}: a prefix is empty.")
    return words


def _number(word):
    try:
        return float(word)
    except ValueError:
        return None
