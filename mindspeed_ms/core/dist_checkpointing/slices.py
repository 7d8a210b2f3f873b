"""Copy plans between slices of a tensor: intersections of flat element ranges."""


def ordered_ranges(piece):
    """Ranges (start, stop, offset) of a FlatSlice by start: global flat elements, and the place of `start` in the slice."""
    ranges, offset = [], 0
    for start, stop in piece.flat_ranges():
        ranges.append((start, stop, offset))
        offset += stop - start
    ranges.sort()
    return ranges


def copy_plan(wanted, pieces):
    """Copies that fill a slice from pieces.

    Args:
        wanted (FlatSlice): slice to fill.
        pieces (list[FlatSlice]): stored pieces; their tensors may differ in the length of the first axis. Elements that
            several pieces hold are taken from the first.

    Returns:
        (runs, missing): `runs[i]` is the list of (offset in piece i, offset in wanted, elements) by offset in the piece;
        `missing` lists (start, stop) of the flattened global tensor that no piece holds.
    """
    left, runs = ordered_ranges(wanted), []
    for piece in pieces:
        found = []
        if left and _may_overlap(left, piece):
            found, left = _take(left, ordered_ranges(piece))
        runs.append(_joined(sorted(found)))
    return runs, [(start, stop) for start, stop, _ in left]


def remainder(wanted, pieces):
    """Part of a slice that no piece holds: list of (offset in wanted, elements)."""
    left = ordered_ranges(wanted)
    for piece in pieces:
        if left and _may_overlap(left, piece):
            _, left = _take(left, ordered_ranges(piece))
    return [(offset, stop - start) for start, stop, offset in left]


def _may_overlap(left, piece):
    """Whether the bounds of a piece and a slice overlap."""
    sharding = piece.sharding
    if sharding.axis not in (None, 0) and sharding.leading is None:
        return True
    inner = 1
    for size in sharding.global_shape[1:]:
        inner *= size
    if sharding.leading is not None:
        ranges = (sharding.leading,)
    else:
        ranges = sharding.ranges if sharding.axis == 0 else ((0, sharding.numel // inner if inner else 0),)
    first, last = min(start for start, _ in ranges) * inner, max(stop for _, stop in ranges) * inner
    return left[0][0] < last and first < max(stop for _, stop, _ in left)


def _take(left, held):
    """(runs found, ranges left) of two ordered lists of ranges."""
    found, rest, position = [], [], 0
    for start, stop, offset in left:
        while position < len(held) and held[position][1] <= start:
            position += 1
        at = position
        while start < stop and at < len(held) and held[at][0] < stop:
            first, last, where = held[at]
            if first > start:
                rest.append((start, first, offset))
                start, offset = first, offset + first - start
            end = min(stop, last)
            found.append((where + start - first, offset, end - start))
            start, offset = end, offset + end - start
            at += 1
        if start < stop:
            rest.append((start, stop, offset))
    return found, rest


def _joined(runs):
    """Runs with those joined that follow each other on both sides."""
    result = []
    for source, target, count in runs:
        if result and result[-1][0] + result[-1][2] == source and result[-1][1] + result[-1][2] == target:
            result[-1] = (result[-1][0], result[-1][1], result[-1][2] + count)
        else:
            result.append((source, target, count))
    return result
