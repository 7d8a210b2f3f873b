"""Table of a conversion's plan: each tensor with where it comes from and where it goes."""

from mindspeed_ms.core.dist_checkpointing.manifest import OPTIMIZER_PREFIX


def plan_lines(source, reader, target):
    """Lines of the table.

    Args:
        source (Source): the opened source.
        reader (ConvertedReader): its tensors as they are written.
        target: one of `target.TARGETS`.

    Returns:
        list[str]
    """
    manifest, places = reader.manifest, target.places()
    names = {}
    for name, (part, stored) in getattr(source.reader.manifest, "sources", {}).items():
        names.setdefault(part.key, []).append(f"{name} in {stored.file}")
    rows = [("from", "tensor", "dtype", "shape", "to")]
    for key, stored in manifest.tensors.items():
        given = source.reader.manifest.tensors.get(key, stored)
        origin = "; ".join(names.get(key, ())) or ", ".join(dict.fromkeys(piece.file for piece in given.pieces))
        dtype = stored.dtype if stored.dtype == given.dtype else f"{given.dtype} -> {stored.dtype}"
        shape = "[" + ", ".join(map(str, stored.shape)) + "]"
        rows.append((origin, key, dtype, shape, places.get(key, "not written")))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]) for row in rows]
    weights = sum(not key.startswith(OPTIMIZER_PREFIX) for key in manifest.tensors)
    left_out = getattr(source.reader.manifest, "left_out", {})
    return [
        *lines,
        *(f"left out {name}: {reason}" for name, reason in left_out.items()),
        f"{weights} weights with {target.elements():,} parameters, {len(manifest.tensors) - weights} states of the optimizer, "
        f"{target.nbytes / 1e9:.3f} GB; nothing was written (--dry-run)",
    ]
