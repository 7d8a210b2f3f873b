"""Verification of a checkpoint: files, check sums, and exact coverage of each tensor by its parts."""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from math import prod

import numpy as np
from tqdm import tqdm

from mindspeed_ms.core.dist_checkpointing.by_tensor import default_workers
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.slices import ordered_ranges
from mindspeed_ms.core.dist_checkpointing.upstream_format import names_in_files, tensors_in_file

_STEPS = 100  # of the progress bar


def problems_of(reader):
    """Problems of a checkpoint: list of texts, empty if it is good. Reads all of it once.

    Raises:
        CheckpointError: it was deleted or replaced meanwhile.
    """
    sums = [] if reader.incomplete() else check_sums(reader)
    problems = sums + problems_of_structure(reader)
    if problems:
        reader.check_still_there()
    return problems


def problems_of_structure(reader):
    """Problems that show without reading the values: list of texts."""
    problems = reader.incomplete()
    for key, stored in reader.manifest.tensors.items():
        problems += [f"{key}: {text}" for text in coverage_problems(stored)]
    problems += header_problems(reader)
    if problems:
        reader.check_still_there()
    return problems


def check_sums(reader):
    """Problems by the check sums of all tensors and rank files: list of texts; shows a progress bar on a terminal."""
    pieces = sum(len(stored.pieces) for stored in reader.manifest.tensors.values())
    steps = max(1, min(_STEPS, max(pieces, len(reader.manifest.ranks))))
    title = f"check sums of {os.path.basename(reader.folder)}"
    with ThreadPoolExecutor(default_workers()) as pool:
        found = pool.map(reader.verify, range(steps), itertools.repeat(steps))
        return [text for texts in tqdm(found, desc=title, total=steps, disable=None, leave=False) for text in texts]


def coverage_problems(stored):
    """Problems of a StoredTensor's parts: elements not held once, or repeated parts that differ (list of texts)."""
    problems, by_slice = [], {}
    for piece in stored.pieces:
        expected = (piece.slice.stop - piece.slice.start) * stored.itemsize
        if piece.form is None and piece.stop - piece.start != expected:
            problems.append(f"a part in {piece.file} has {piece.stop - piece.start} bytes instead of {expected}")
        if by_slice.setdefault(piece.slice, piece).xxhash != piece.xxhash:
            problems.append(f"{piece.file} and {by_slice[piece.slice].file} hold different values of the same elements")
    numel = prod(stored.shape)
    ranges = np.concatenate([*(ordered_ranges(piece.slice)[:, :2] for piece in by_slice.values()), [[numel, numel]]])
    ranges = ranges[np.lexsort((ranges[:, 1], ranges[:, 0]))]
    ends = np.append(0, ranges[:-1, 1])  # of the range before
    wrong = np.flatnonzero(ranges[:, 0] != ends)
    if len(wrong):
        (start, stop), before = ranges[wrong[0]], ends[wrong[0]]
        if start > before:
            problems.append(f"elements {before} to {start} are stored nowhere")
        else:
            problems.append(f"elements {start} to {min(before, stop)} are stored twice")
    return problems


def header_problems(reader):
    """Problems of file headers, which other programs read, against the manifest: list of texts."""
    if not reader.manifest.has_keys_in_files:
        return []
    wanted, problems = {}, []
    for key, stored in reader.manifest.tensors.items():
        for piece in stored.pieces:
            wanted.setdefault(piece.file, {})[piece.start, piece.stop] = key
    for name, places in wanted.items():
        try:
            found = tensors_in_file(os.path.join(reader.folder, name))
        except CheckpointError:
            problems.append(f"{name}: its header is damaged")
            continue
        names = {place: known.partition("#")[0] for known, tensor in found.items() for place in tensor.ranges}
        problems += [
            f"{name}: its header does not name the bytes of tensor {key}"
            for place, key in places.items()
            if names.get(place) not in names_in_files(key)
        ]
    return problems
