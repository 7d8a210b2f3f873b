"""Description of a checkpoint: iteration, layout, tensors and their parts, counters, files by rank."""

import time
from math import prod

from mindspeed_ms.core.dist_checkpointing.manifest import OPTIMIZER_PREFIX


def describe(reader, with_slices=False):
    """Description of a checkpoint as plain data: everything but its values.

    Args:
        reader (CheckpointReader): of the checkpoint.
        with_slices (bool): each tensor with its parts.

    Returns:
        dict: folder, iteration, saved_at, layout, vocab_size, states, files, ranks, tensors, totals.
    """
    manifest = reader.manifest
    tensors = {key: _tensor(stored, with_slices) for key, stored in manifest.tensors.items()}
    totals = {}
    for key, tensor in tensors.items():
        kind = totals.setdefault(
            "optimizer" if key.startswith(OPTIMIZER_PREFIX) else "weights", {"tensors": 0, "elements": 0, "bytes": 0}
        )
        kind["tensors"] += 1
        kind["elements"] += prod(tensor["shape"])
        kind["bytes"] += tensor["bytes"]
    return {
        "folder": reader.folder,
        "iteration": manifest.iteration,
        "saved_at": manifest.saved_at,
        "layout": manifest.layout,
        "vocab_size": manifest.vocab_size,
        "states": manifest.states,
        "files": manifest.files,
        "ranks": manifest.ranks,
        "tensors": tensors,
        "totals": totals,
        "args": manifest.args,
    }


def _tensor(stored, with_slices):
    result = {
        "shape": list(stored.shape),
        "dtype": stored.dtype,
        "bytes": prod(stored.shape) * stored.itemsize,
        "grouping": stored.grouping,
        "parts": len(stored.pieces),
        "files": sorted({piece.file for piece in stored.pieces}),
    }
    if with_slices:
        result["slices"] = [piece.to_json() for piece in stored.pieces]
    return result


def lines(description):
    """Lines of the report of `inspect`, from the data of `describe`."""
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(description["saved_at"]))
    yield f"{description['folder']}: iteration {description['iteration']}, saved {saved}"
    layout = description["layout"]
    sizes = ", ".join(f"{name} {size}" for name, size in layout.items())
    yield f"saved by {sizes or 'an unknown layout, without check sums'}"
    if description["vocab_size"]:
        yield f"vocabulary without padding: {description['vocab_size']} rows"
    for name, values in description["states"].items():
        yield f"{name}: " + (", ".join(_flat(values)) or "not saved")
    yield ""
    yield "files:"
    for name, size in description["files"].items():
        yield f"  {name:40} {size:>15,} bytes"
    for number, rank in enumerate(description["ranks"]):
        place = ", ".join(f"{name} {value}" for name, value in (rank.get("coordinates") or {}).items())
        yield f"  {rank['file']:40} {rank['bytes']:>15,} bytes  states of rank {number} ({place})"
    yield ""
    yield "tensors:"
    width = max((len(key) for key in description["tensors"]), default=0)
    for key, tensor in description["tensors"].items():
        shape = "[" + ", ".join(map(str, tensor["shape"])) + "]"
        grouping = f"  {tensor['grouping']}" if tensor["grouping"] else ""
        yield (
            f"  {key:{width}} {tensor['dtype']:8} {shape:16} {tensor['bytes']:>15,} bytes  {tensor['parts']} parts in "
            f"{_named(tensor['files'])}{grouping}"
        )
        for piece in tensor.get("slices", ()):
            yield f"    {_slice(piece)} in bytes {piece['bytes'][0]:,} to {piece['bytes'][1]:,} of {piece['file']}"
    yield ""
    for kind, total in description["totals"].items():
        yield f"{kind}: {total['tensors']} tensors, {total['elements']:,} elements, {total['bytes']:,} bytes"


def _named(files):
    return ", ".join(files[:2]) + (f" and {len(files) - 2} more" if len(files) > 2 else "")


def _slice(piece):
    place = "all"
    if "axis" in piece:
        ranges = " and ".join(f"{start} to {stop}" for start, stop in piece["ranges"])
        place = f"{ranges} of axis {piece['axis']}"
    if "flat" in piece:
        place += f", elements {piece['flat'][0]:,} to {piece['flat'][1]:,} of that"
    return place


def _flat(values, prefix=""):
    """Texts `name value`, one for each of nested counters."""
    for name, value in (values or {}).items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name} {value}"
