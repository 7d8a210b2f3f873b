"""Shard files (safetensors), written as a stream without copying the tensors.

By default in the safetensors format (source: its documentation): 8 bytes with the length of a JSON header (little endian),
the header, the values one after another. A name that ends in `.ckpt` makes MindSpore's format, see `ckpt_file`.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from mindspeed_ms.core.dist_checkpointing import ckpt_file
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import DTYPE_BYTES, StoredPiece
from mindspeed_ms.core.dist_checkpointing.multilinear import sum_of_runs, to_text

SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_DTYPES = {value: name for name, value in SAFETENSORS_DTYPES.items()}
_BLOCK_BYTES = 8 << 20
_LONGEST_HEADER = 100 << 20


@dataclass
class Entry:
    """Tensor to write into a shard file.

    Attributes:
        name (str): unique in the file.
        dtype (str): "float32", ...
        shape (tuple[int]): as written.
        data: contiguous bytes (1-D uint8 array), or a function without arguments that gives them.
        start, stop (int), xxhash, multilinear (str): place in the file and check sums, once written.
    """

    name: str
    dtype: str
    shape: tuple
    nbytes: int
    data: object = None
    start: int = 0
    stop: int = 0
    xxhash: str = ""
    multilinear: str = ""

    def piece(self, part, file):
        """StoredPiece of the written tensor: `part` (FlatSlice) of the global tensor, in `file` of the checkpoint."""
        return StoredPiece(part, file, self.start, self.stop, self.xxhash, self.multilinear)


def write_shard(path, entries, verify=False, made_by="mindspeed_ms"):
    """Write entries and sync them to the disk; fills in their positions and check sums.

    Args:
        verify (bool): read the file again and compare check sums.
        made_by (str): "format" in the metadata of a safetensors file.

    Returns:
        int: bytes of the file.

    Raises:
        OSError: no space, no such folder, ...
        CheckpointError: `verify` found other bytes.
    """
    prefixes = ckpt_file.prefixes(entries) if os.fspath(path).endswith(".ckpt") else _safetensors_prefixes(entries, made_by)
    position = 0
    with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(1) as writer:
        for prefix, entry in zip(prefixes, entries):
            _write_all(file, prefix)
            entry.start = position + len(prefix)
            entry.stop = position = entry.start + entry.nbytes
            _write_entry(file, entry, writer)
        os.fsync(file.fileno())
        if verify:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if verify:
        for entry in entries:
            if hash_of_range(path, entry.start, entry.stop) != entry.xxhash:
                raise CheckpointError(f"{path} holds other bytes than were written (tensor {entry.name}).")
    return position


def _safetensors_prefixes(entries, made_by):
    """Bytes before the values of each entry: the header is before the first."""
    header, offset = {"__metadata__": {"format": made_by}}, 0
    for entry in entries:
        header[entry.name] = {
            "dtype": SAFETENSORS_DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return [len(text).to_bytes(8, "little") + text, *[b""] * (len(entries) - 1)]


def read_safetensors(path):
    """Read the header of a safetensors file, no values: {name: ckpt_file.FileTensor}.

    Raises:
        CheckpointError: it cannot be read, is no such file, or a tensor lies outside of it or over another one.
    """
    try:
        with open(path, "rb") as file:
            length, size = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
            if length > min(size, _LONGEST_HEADER):
                raise ValueError("its header is damaged")
            header = json.loads(file.read(length), object_pairs_hook=_without_duplicates)
        tensors = {name: _place(name, entry, 8 + length, size) for name, entry in header.items() if name != "__metadata__"}
        _check_overlap(tensors)
        return tensors
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read as a safetensors file: {error}.") from error


def _without_duplicates(pairs):
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"its header names {next(name for name in names if names.count(name) > 1)} twice")
    return result


def _place(name, entry, start, size):
    """FileTensor of an entry of a header. Raises ValueError: impossible numbers."""
    offsets, shape = entry["data_offsets"], entry["shape"]
    numbers = [*offsets, *shape]
    if len(offsets) != 2 or not all(type(number) is int and number >= 0 for number in numbers) or offsets[0] > offsets[1]:
        raise ValueError(f"tensor {name} has the shape {shape} and the bytes {offsets}")
    first, last = (start + offset for offset in offsets)
    if last > size:
        raise ValueError(f"it ends within tensor {name}")
    return ckpt_file.FileTensor(_DTYPES.get(entry["dtype"], entry["dtype"]), tuple(shape), [(first, last)])


def _check_overlap(tensors):
    end, before = 0, ""
    for (start, stop), name in sorted((tensor.ranges[0], name) for name, tensor in tensors.items()):
        if start < end:
            raise ValueError(f"tensors {before} and {name} share bytes")
        if stop > start:
            end, before = stop, name


def _write_entry(file, entry, writer):
    data = memoryview(entry.data() if callable(entry.data) else entry.data)
    if data.nbytes != entry.nbytes:
        raise CheckpointError(f"{entry.name} has {data.nbytes} bytes: expected {entry.nbytes}.")
    hashed, total, itemsize = xxhash.xxh3_64(), 0, DTYPE_BYTES[entry.dtype]
    for start in range(0, entry.nbytes, _BLOCK_BYTES):
        block = data[start : start + _BLOCK_BYTES]
        written = writer.submit(_write_all, file, block)  # while its check sums are counted
        hashed.update(block)
        total += sum_of_runs(block, itemsize, [(start // itemsize, 0, block.nbytes // itemsize)])
        written.result()
    entry.xxhash, entry.multilinear = hashed.hexdigest(), to_text(total)


def _write_all(file, data):
    view = memoryview(data)
    while view.nbytes:
        view = view[file.write(view) :]


def hash_of_range(path, start, stop):
    """Check sum of a byte range of a file, read block by block; None if the file is too short or unreadable."""
    hashed = xxhash.xxh3_64()
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            while start < stop:
                block = file.read(min(_BLOCK_BYTES, stop - start))
                if not block:
                    return None
                hashed.update(block)
                start += len(block)
    except OSError:
        return None
    return hashed.hexdigest()
