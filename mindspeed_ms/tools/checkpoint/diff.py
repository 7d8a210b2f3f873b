"""Comparison of two checkpoints tensor by tensor, in any layouts."""

from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import OPTIMIZER_PREFIX

_BLOCK = 1 << 20  # elements that are compared at a time


@dataclass
class Difference:
    """Difference between two checkpoints in one tensor.

    Attributes:
        key (str): of the tensor.
        text (str): the difference, or the damage and its file.
    """

    key: str
    text: str


def differences(first, second, rtol=0.0, atol=0.0, weights_only=False, ignore_dtype=False):
    """Compare two checkpoints; holds two tensors at a time.

    Elements a and b agree if they have the same bits, are both NaN, or |a - b| <= atol + rtol * |b|. Rows of a vocabulary
    that are padding in either are not compared.

    Args:
        first, second (CheckpointReader): to compare.
        rtol, atol (float): allowed.
        weights_only (bool): neither optimizer states nor counters.
        ignore_dtype (bool): only values count.

    Yields:
        Difference: one per tensor or counter that differs, or tensor that is damaged.
    """
    keys = sorted({*first.manifest.tensors, *second.manifest.tensors})
    if weights_only:
        keys = [key for key in keys if not key.startswith(OPTIMIZER_PREFIX)]
    for key in tqdm(keys, desc="comparing", disable=None, leave=False):
        try:
            text = _compare(first, second, key, rtol, atol, ignore_dtype)
        except CheckpointError as error:
            text = str(error)  # the other tensors are still compared
        if text:
            yield Difference(key, text)
    if not weights_only:
        yield from _states(first.manifest, second.manifest)


def _compare(first, second, key, rtol, atol, ignore_dtype):
    for reader, other in ((first, second), (second, first)):
        if key not in reader.manifest.tensors:
            return f"only in {other.folder}"
    one, two = first.manifest.tensors[key], second.manifest.tensors[key]
    texts = [f"dtype {one.dtype} and {two.dtype}"] if one.dtype != two.dtype and not ignore_dtype else []
    rows = None
    if one.shape != two.shape:
        rows = _common_rows(first.manifest, second.manifest, key)
        if rows is None:
            return "; ".join([f"shape {list(one.shape)} and {list(two.shape)}", *texts])
    left, right = first.read_whole(key)[:rows].reshape(-1), second.read_whole(key)[:rows].reshape(-1)
    values = _compare_values(left, one.dtype, right, two.dtype, rtol, atol)
    return "; ".join([*texts, values] if values else texts)


def _common_rows(first, second, key):
    """Number of vocabulary rows that are padding in neither tensor; None if the shapes differ otherwise."""
    one, two = first.tensors[key], second.tensors[key]
    if "vocab" not in (one.grouping, two.grouping) or one.shape[1:] != two.shape[1:]:
        return None
    true = max(first.vocab_size or 0, second.vocab_size or 0)
    return true if 0 < true <= min(one.shape[0], two.shape[0]) else None


def _compare_values(left, left_dtype, right, right_dtype, rtol, atol):
    """Text about elements that differ by more than the tolerances; None if there are none."""
    count, largest, relative, worst = 0, 0.0, 0.0, 0
    for start in range(0, left.size, _BLOCK):
        a, b = left[start : start + _BLOCK], right[start : start + _BLOCK]
        if left_dtype == right_dtype and a.tobytes() == b.tobytes():
            continue
        a, b = _float64(a, left_dtype), _float64(b, right_dtype)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            distance = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
            distance = np.where(np.isnan(distance), np.inf, distance)  # NaN against a number
            wrong = distance > np.where(np.isfinite(b), atol + rtol * np.abs(b), 0.0)
            if not wrong.any():
                continue
            count += int(wrong.sum())
            share = np.where(distance == 0, 0.0, distance / np.maximum(np.abs(a), np.abs(b)))
            relative = max(relative, float(np.nanmax(np.where(wrong, share, 0.0))))
        distance = np.where(wrong, distance, 0.0)
        if distance.max() > largest:
            largest, worst = float(distance.max()), start + int(distance.argmax())
    if not count:
        return None
    return (
        f"{count} of {left.size} elements differ, by {largest:.6g} at most (element {worst}), relatively by "
        f"{relative:.6g} at most"
    )


def _float64(array, dtype):
    if dtype == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def _states(first, second):
    one, two = _flat({"iteration": first.iteration, **first.states}), _flat({"iteration": second.iteration, **second.states})
    for name in sorted({*one, *two}):
        if one.get(name) != two.get(name):
            yield Difference(name, f"{one.get(name, 'not there')} and {two.get(name, 'not there')}")


def _flat(values, prefix=""):
    result = {}
    for name, value in values.items():
        result.update(_flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value})
    return result
