"""Copy plans between slices of a tensor: intersections of flat element ranges, as arrays of int64."""

from math import prod

import numpy as np

_NONE = np.empty((0, 3), np.int64)


def ordered_ranges(piece):
    """Ranges of a FlatSlice by start, array [n, 3]: start and stop in the flattened global tensor, place in the slice."""
    sharding, start, stop = piece.sharding, piece.start, piece.stop
    if start == stop:
        return _NONE
    if sharding.is_whole:
        return np.array([(start, stop, 0)], np.int64)
    axis, first_row = sharding.axis, sharding.leading[0] if sharding.leading else 0
    inner = prod(sharding.global_shape[axis + 1 :])
    held = np.array(sharding.ranges, np.int64) * inner
    lengths = held[:, 1] - held[:, 0]
    local_block, global_block = int(lengths.sum()), sharding.global_shape[axis] * inner
    outer = np.arange(start // local_block, (stop - 1) // local_block + 1)[:, None]
    low = (outer * local_block + (np.cumsum(lengths) - lengths)).reshape(-1)  # of whole ranges, in the local tensor
    shift = (outer * global_block + held[:, 0]).reshape(-1) - low + first_row * prod(sharding.global_shape[1:])
    high = np.minimum(low + np.tile(lengths, len(outer)), stop)
    low = np.maximum(low, start)
    ranges = np.stack((low + shift, high + shift, low - start), 1)[low < high]
    return ranges[np.argsort(ranges[:, 0])]


def copy_plan(wanted, pieces):
    """Copies that fill a slice from pieces.

    Args:
        wanted (FlatSlice): slice to fill.
        pieces (list[FlatSlice]): stored pieces; their tensors may differ in the length of the first axis. Elements that
            several pieces hold are taken from the first.

    Returns:
        (runs, missing): `runs[i]` is the array [n, 3] of (offset in piece i, offset in wanted, elements) by offset in the
        piece; `missing` lists (start, stop) of the flattened global tensor that no piece holds.
    """
    left, runs = ordered_ranges(wanted), []
    for piece in pieces:
        found = _NONE
        if len(left) and _may_overlap(left, piece):
            found, left = _take(left, ordered_ranges(piece))
        runs.append(_joined(found))
    return runs, [(start, stop) for start, stop, _ in left.tolist()]


def remainder(wanted, pieces):
    """Part of a slice that no piece holds: list of (offset in wanted, elements)."""
    left = ordered_ranges(wanted)
    for piece in pieces:
        if len(left) and _may_overlap(left, piece):
            _, left = _take(left, ordered_ranges(piece))
    return [(offset, stop - start) for start, stop, offset in left.tolist()]


def _may_overlap(left, piece):
    """Whether the bounds of a piece and a slice overlap."""
    sharding = piece.sharding
    if sharding.axis not in (None, 0) and sharding.leading is None:
        return True
    inner = prod(sharding.global_shape[1:])
    if sharding.leading is not None:
        ranges = (sharding.leading,)
    else:
        ranges = sharding.ranges if sharding.axis == 0 else ((0, sharding.numel // inner if inner else 0),)
    first, last = min(start for start, _ in ranges) * inner, max(stop for _, stop in ranges) * inner
    return left[0, 0] < last and first < left[-1, 1]


def _take(left, held):
    """(runs found, ranges left) of two arrays of ranges, each ordered and without overlaps."""
    low = np.searchsorted(held[:, 1], left[:, 0], "right")
    counts = np.maximum(np.searchsorted(held[:, 0], left[:, 1], "left") - low, 0)
    of_left = np.repeat(np.arange(len(left)), counts)
    of_held = np.arange(len(of_left)) + np.repeat(low - (np.cumsum(counts) - counts), counts)
    mine, theirs = left[of_left], held[of_held]
    start, stop = np.maximum(mine[:, 0], theirs[:, 0]), np.minimum(mine[:, 1], theirs[:, 1])
    found = np.stack((theirs[:, 2] + start - theirs[:, 0], mine[:, 2] + start - mine[:, 0], stop - start), 1)
    # each gap begins where a range or a run before it ends
    begins, ends = np.sort(np.append(left[:, 0], stop)), np.sort(np.append(left[:, 1], start))
    is_gap = begins < ends
    begins, ends = begins[is_gap], ends[is_gap]
    owners = left[np.searchsorted(left[:, 0], begins, "right") - 1]
    return found, np.stack((begins, ends, owners[:, 2] + begins - owners[:, 0]), 1)


def _joined(runs):
    """Runs by offset in the piece, with those joined that follow each other on both sides."""
    if len(runs) < 2:
        return runs
    runs = runs[np.argsort(runs[:, 0])]
    follows = ((runs[:-1, :2] + runs[:-1, 2:]) == runs[1:, :2]).all(1)
    firsts = np.flatnonzero(np.append(True, ~follows))
    return np.stack((runs[firsts, 0], runs[firsts, 1], np.add.reduceat(runs[:, 2], firsts)), 1)
