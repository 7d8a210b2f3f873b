"""Plain weights: safetensors files of whole tensors, as written by `merge --weights-only` and by other programs.

    weights/model-00001-of-00002.safetensors    whole tensors
    weights/model.safetensors.index.json        {"metadata": {...}, "weight_map": {NAME: file}}

or one file `model.safetensors` without an index. They have no check sums, no counters and no layout.
"""

import json
import os
from dataclasses import dataclass
from math import prod

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError, DamagedCheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import DTYPE_BYTES, Manifest, StoredPiece, StoredTensor
from mindspeed_ms.core.dist_checkpointing.shard_file import read_safetensors

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def is_plain(path):
    """Whether a folder holds plain weights."""
    return any(os.path.isfile(os.path.join(path, name)) for name in (INDEX_FILE, SINGLE_FILE))


@dataclass
class PlainManifest(Manifest):
    """Manifest made from a folder of plain weights."""

    has_only_weights = True


def read_manifest(folder):
    """PlainManifest of a folder of plain weights.

    Raises:
        DamagedCheckpointError: index and files do not agree, or one of them is missing or damaged.
    """
    index = _read_index(folder)
    files = sorted(set(index["weight_map"].values())) if index else [SINGLE_FILE]
    places = [os.path.join(folder, name) for name in files]
    missing = [place for place in places if not os.path.isfile(place)]
    if missing:
        raise DamagedCheckpointError(f"{folder} is incomplete: {', '.join(missing)} is missing.")
    iteration = index["metadata"].get("iteration", 0) if index else 0
    manifest = PlainManifest(iteration, saved_at=max(os.path.getmtime(place) for place in places))
    for name, place in zip(files, places):
        manifest.files[name] = os.path.getsize(place)
        for key, tensor in _read_file(place).items():
            manifest.tensors[key] = _stored(place, name, key, tensor)
    if index:
        _compare(folder, index["weight_map"], manifest)
    return manifest


def _read_file(place):
    try:
        return read_safetensors(place)
    except CheckpointError as error:
        raise DamagedCheckpointError(str(error)) from error


def _read_index(folder):
    path = os.path.join(folder, INDEX_FILE)
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            index = json.load(file)
        return {"weight_map": dict(index["weight_map"]), "metadata": dict(index.get("metadata") or {})}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{path} cannot be read as an index of safetensors files: {error}.") from error


def _stored(place, name, key, tensor):
    ((start, stop),) = tensor.ranges
    if tensor.dtype not in DTYPE_BYTES or stop - start != prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]:
        raise DamagedCheckpointError(
            f"{place} is damaged: tensor {key} is {tensor.dtype} {list(tensor.shape)} in {stop - start} bytes."
        )
    without_check_sums = {"file": name, "bytes": [start, stop], "xxhash": "", "multilinear": ""}
    piece = StoredPiece.from_json(tensor.shape, without_check_sums)
    return StoredTensor(tensor.shape, tensor.dtype, None, [piece])


def _compare(folder, weight_map, manifest):
    found = {key: stored.pieces[0].file for key, stored in manifest.tensors.items()}
    wrong = sorted(key for key in {*weight_map, *found} if weight_map.get(key) != found.get(key))
    if wrong:
        raise DamagedCheckpointError(
            f"{os.path.join(folder, INDEX_FILE)} and the files do not agree on {', '.join(wrong[:5])}"
            f"{' ...' if len(wrong) > 5 else ''}."
        )
