"""Check sums that torch.save files carry: the CRC-32 of each record of their zip tables."""

import os

from mindspeed_ms.core.dist_checkpointing.crc32 import Crc32
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.torch_file.distributed import METADATA_FILE, read_distributed
from mindspeed_ms.core.dist_checkpointing.torch_file.zip_records import read_records

_BLOCK_BYTES = 1 << 20


def archives_of(folder, names):
    """Zip files in a folder: list of (name, first byte, end); the parts of a `torch_dist` file are one each."""
    parts = read_distributed(folder).archives if os.path.isfile(os.path.join(folder, METADATA_FILE)) else []
    known = {name for name, _, _ in parts}
    paths = {name: os.path.join(folder, name) for name in names if name not in known}
    return [*parts, *((name, 0, os.path.getsize(path)) for name, path in paths.items() if _begins_as_zip(path))]


def _begins_as_zip(path):
    with open(path, "rb") as file:
        return file.read(4) == b"PK\3\4"


def wrong_records(path, start, stop, known):
    """Records whose bytes are not those of their check sum: list of (name, first byte, end).

    `known` has the check sums, as `Crc32.hexdigest` gives them, of bytes (first, end) that need not be read again.

    Files saved under `torch.serialization.set_crc32_options(False)` have no check sums: where none fits, none is meant.
    """
    sums = {}
    with open(path, "rb", buffering=0) as file:
        try:
            records = read_records(file.fileno(), path, start, stop, sums)
        except CheckpointError as error:
            return [(str(error), start, start)]
        descriptor = file.fileno()
        wrong = [
            (name, *place)
            for name, place in records.items()
            if (known.get(place) or _sum(descriptor, *place)) != f"{sums[name]:08x}"
        ]
    return wrong if len(wrong) < len(records) else []


def _sum(descriptor, first, last):
    found = Crc32()
    while first < last:
        block = os.pread(descriptor, min(_BLOCK_BYTES, last - first), first)
        if not block:
            break
        found.update(block)
        first += len(block)
    return found.hexdigest()
