"""Shard files (safetensors), written as a stream without copying the tensors.

By default in the safetensors format (source: its documentation): 8 bytes with the length of a JSON header (little endian),
the header, the values one after another. A name that ends in `.ckpt` makes MindSpore's format, see `ckpt_file`.
"""

import json
import math
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
_FILE_DTYPES = {
    **{stored: (name, DTYPE_BYTES[name]) for name, stored in SAFETENSORS_DTYPES.items()},
    "F8_E4M3": ("float8_e4m3fn", 1),
    "U16": ("uint16", 2),
    "U32": ("uint32", 4),
    "U64": ("uint64", 8),
}
_MOST_HEADER_BYTES = 100_000_000  # the format's own limit
_BLOCK_BYTES = 8 << 20
_CACHED_BYTES = 1 << 20  # stays in the processor's cache


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
    size = begin_shard(path, entries, made_by)
    with open(path, "r+b", buffering=0) as file, ThreadPoolExecutor(1) as writer:
        for entry in entries:
            data = _data_of(entry)
            _write_entry(file, entry, data, writer)
            del data  # before the next one comes
        os.fsync(file.fileno())
        if verify:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if verify:
        for entry in entries:
            if hash_of_range(path, entry.start, entry.stop) != entry.xxhash:
                raise CheckpointError(f"{path} holds other bytes than were written (tensor {entry.name}).")
    return size


def begin_shard(path, entries, made_by="mindspeed_ms"):
    """Write all but the values, and fill in where these will be; see `write_shard`."""
    prefixes = ckpt_file.prefixes(entries) if os.fspath(path).endswith(".ckpt") else _safetensors_prefixes(entries, made_by)
    position = 0
    with open(path, "wb", buffering=0) as file:
        for prefix, entry in zip(prefixes, entries):
            _write_all(file.fileno(), prefix, position)
            entry.start = position + len(prefix)
            entry.stop = position = entry.start + entry.nbytes
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

    As strict as the format's own library: each tensor has the bytes that its shape and dtype say, and all of them together,
    without gaps, are the rest of the file.

    Raises:
        CheckpointError: it cannot be read, or is no such file; names the tensor.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
                raise ValueError(f"it has {size} bytes, and says that {length} of them are its header")
            header = json.loads(file.read(length), object_pairs_hook=_without_duplicates)
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        header.pop("__metadata__", None)
        tensors = {name: _tensor_in_header(name, entry, 8 + length, size) for name, entry in header.items()}
        end = 8 + length
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].ranges):
            if tensor.ranges[0][0] != end:
                raise ValueError(f"tensor {name!a} begins at byte {tensor.ranges[0][0]}: expected {end}")
            end = tensor.ranges[0][1]
        if end != size:
            raise ValueError(f"its tensors end at byte {end} of {size}")
        return tensors
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read as a safetensors file: {error}.") from error


def _without_duplicates(pairs):
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(name for name in names if names.count(name) > 1)!a} twice")
    return result


def _tensor_in_header(name, entry, begin, size):
    """FileTensor of one entry of the header; ValueError if it says what cannot be."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise ValueError(f"tensor {name!a} has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or any(type(number) is not int or not 0 <= number < 1 << 63 for number in numbers):
            raise ValueError(f"tensor {name!a} has shape {shape} and data_offsets {offsets}")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"tensor {name!a} has data_offsets {offsets}")
    if not isinstance(dtype, str) or dtype not in _FILE_DTYPES:
        raise ValueError(f"tensor {name!a} has dtype {dtype}, which is not supported: expected {', '.join(_FILE_DTYPES)}")
    kind, itemsize = _FILE_DTYPES[dtype]
    if math.prod(shape) * itemsize != offsets[1] - offsets[0]:
        raise ValueError(f"tensor {name!a}, {dtype} {shape}, has {offsets[1] - offsets[0]} bytes")
    if begin + offsets[1] > size:
        raise ValueError(f"it ends within tensor {name!a}")
    return ckpt_file.FileTensor(kind, tuple(shape), [(begin + offsets[0], begin + offsets[1])])


def inside(folder, name):
    """Path of the file `name` of a folder, where `name` was read from a file (an index of shards, ...).

    Raises:
        CheckpointError: it is outside of the folder.
    """
    if (
        not isinstance(name, str)
        or not name
        or "\0" in name
        or os.path.isabs(name)
        or ".." in name.replace("\\", "/").split("/")
    ):
        raise CheckpointError(f"{os.fspath(folder)} is refused: it names the file {name!a}, which is outside of it.")
    return os.path.join(folder, name)


def _data_of(entry):
    return memoryview(entry.data() if callable(entry.data) else entry.data)


def _write_entry(file, entry, data, writer):
    _check_size(entry, data)
    hashed, total, itemsize = xxhash.xxh3_64(), 0, DTYPE_BYTES[entry.dtype]
    for start in range(0, entry.nbytes, _BLOCK_BYTES):
        block = data[start : start + _BLOCK_BYTES]
        written = writer.submit(_write_all, file.fileno(), block, entry.start + start)  # while its check sums are counted
        hashed.update(block)
        total += sum_of_runs(block, itemsize, [(start // itemsize, 0, block.nbytes // itemsize)])
        written.result()
    entry.xxhash, entry.multilinear = hashed.hexdigest(), to_text(total)


def write_values(path, entry, data, with_sums, progress):
    """Write the values of one entry into a file that `begin_shard` began; several threads may write one file.

    Args:
        data (bytes-like): contiguous.
        with_sums (bool): fill in the entry's check sums.
        progress (Callable): called with the bytes of each block.
    """
    data = memoryview(data)
    _check_size(entry, data)
    hashed, total, itemsize = xxhash.xxh3_64(), 0, DTYPE_BYTES[entry.dtype]
    descriptor = os.open(path, os.O_WRONLY)
    try:
        for start in range(0, entry.nbytes, _CACHED_BYTES):
            block = data[start : start + _CACHED_BYTES]
            _write_all(descriptor, block, entry.start + start)
            if with_sums:
                hashed.update(block)
                total += sum_of_runs(block, itemsize, [(start // itemsize, 0, block.nbytes // itemsize)])
            progress(block.nbytes)
    finally:
        os.close(descriptor)
    if with_sums:
        entry.xxhash, entry.multilinear = hashed.hexdigest(), to_text(total)


def _check_size(entry, data):
    if data.nbytes != entry.nbytes:
        raise CheckpointError(f"{entry.name} has {data.nbytes} bytes: expected {entry.nbytes}.")


def _write_all(descriptor, data, position):
    view = memoryview(data)
    while view.nbytes:
        count = os.pwrite(descriptor, view, position)
        view, position = view[count:], position + count


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
