"""Writes files of torch.save, one tensor at a time: a zip file, not compressed, as torch 1.6 and later read it."""

import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

from mindspeed_ms.core.dist_checkpointing.durable import sync
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.torch_file.objects import TensorReference, shown
from mindspeed_ms.core.dist_checkpointing.torch_file.pickler import Pickler

_ALIGNMENT = 64
_BLOCK_BYTES = 8 << 20
_UTF8_NAMES = 0x800
_DATE_1980 = 0x21
_LARGE16, _LARGE32 = 0xFFFF, 0xFFFFFFFF  # say that the zip64 fields hold the number
_MOST_RECORDS, _MOST_BYTES = 0xFFFE, 0xFFFFFFFE  # without them


def write_torch_file(path, tree):
    """Write an object tree as torch.save does; the file appears under its name when it is complete.

    Args:
        path (str): replaced if it exists.
        tree: as `read_torch_file` gives it, plain Python, numpy, and `TensorToWrite`; the values of each are asked for in its
            turn. A storage that several `TensorReference` share, or a `TensorToWrite` at several places, is written once.

    Returns:
        int: bytes of the file.

    Raises:
        CheckpointError: an object or a dtype that cannot be written, or values of another size than a tensor's shape says.
        OSError: no space, no such folder, ...
    """
    path = os.fspath(path)
    ((_, size),) = write_archives(path, [tree], _folder_name(path))
    return size


def write_archives(path, trees, folder="archive"):
    """Write files of torch.save one behind the other into a file that appears when it is complete.

    Args:
        path (str): replaced if it exists.
        trees (Iterable): of each file, see `write_torch_file`.
        folder (str): of the records.

    Returns:
        list[(int, int)]: first byte and number of bytes of each.
    """
    temporary, places = f"{path}.{os.getpid()}.tmp", []
    try:
        with open(temporary, "wb", buffering=0) as file, ThreadPoolExecutor(1) as helper:
            start = 0
            for tree in trees:
                places.append((start, _write_archive(file, helper, folder, start, Pickler().dump(tree))))
                start += places[-1][1]
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise
    sync(os.path.dirname(path) or ".")
    return places


def _write_archive(file, helper, folder, start, pickled):
    archive = _ZipFile(file, helper, folder, start)
    archive.add("data.pkl", [pickled.data], len(pickled.data))
    archive.add("byteorder", [b"little"], 6)
    for number, storage in enumerate(pickled.storages):
        archive.add(f"data/{number}", _blocks(storage), storage.nbytes)
    archive.add("version", [b"3\n"], 2)
    return archive.finish()


def _folder_name(path):
    name = os.path.splitext(os.path.basename(path))[0]
    return name if name.strip(".") and "\\" not in name else "archive"


def _blocks(storage):
    """Bytes of a storage, block by block."""
    source = storage.source
    if isinstance(source, TensorReference):
        yield from _blocks_of_file(source, storage.nbytes)
        return
    data = source.data() if callable(source.data) else source.data
    if hasattr(data, "__next__"):
        yield from _checked_blocks(source, data, storage.nbytes)
        return
    data = memoryview(data)
    if data.nbytes != storage.nbytes or not data.c_contiguous:
        what = f"A tensor to write, {source.dtype} {list(source.shape)}"
        raise CheckpointError(f"{what}, has {data.nbytes} bytes: expected {storage.nbytes}, contiguous.")
    if data.nbytes:
        data = data.cast("B")
        for start in range(0, data.nbytes, _BLOCK_BYTES):
            yield data[start : start + _BLOCK_BYTES]


def _checked_blocks(source, blocks, nbytes):
    """Blocks of an iterator, whose sizes must add up to that of the tensor."""
    for block in blocks:
        nbytes -= len(block)
        if nbytes < 0:
            break
        yield block
    if nbytes:
        raise CheckpointError(f"A tensor to write, {source.dtype} {list(source.shape)}, has blocks of another size together.")


def _blocks_of_file(reference, nbytes):
    position, end = reference.storage.start, reference.storage.start + nbytes
    with open(reference.path, "rb", buffering=0) as file:
        while position < end:
            block = os.pread(file.fileno(), min(_BLOCK_BYTES, end - position), position)
            if not block:
                raise CheckpointError(f"{reference.path} is damaged: it ends within tensor {shown(reference.name)}.")
            position += len(block)
            yield block


class _ZipFile:
    """Zip file under construction at the end of a file, from byte `start` on; records of more than 4 GB and more than 65535
    records use the zip64 fields."""

    def __init__(self, file, helper, folder, start):
        self._file, self._helper, self._folder, self._start = file, helper, folder, start
        self._entries, self._position = [], 0

    def add(self, name, blocks, nbytes):
        """Write a record of `nbytes` bytes; they begin at a multiple of 64."""
        name, offset = f"{self._folder}/{name}".encode(), self._position
        large = struct.pack("<2H2Q", 1, 16, nbytes, nbytes) if nbytes > _MOST_BYTES else b""
        unaligned = offset + 30 + len(name) + len(large) + 4
        padding = -unaligned % _ALIGNMENT
        extra = large + struct.pack("<2H", 0x4246, padding) + b"Z" * padding  # field "FB", as torch calls it
        self._write(bytes(30 + len(name) + len(extra)))
        checksum = 0
        for block in blocks:
            written = self._helper.submit(self._write, block)  # while its check sum is counted
            checksum = zlib.crc32(block, checksum)
            written.result()
        sizes = (_LARGE32, _LARGE32) if large else (nbytes, nbytes)
        fields = (45 if large else 20, _UTF8_NAMES, 0, 0, _DATE_1980, checksum, *sizes, len(name))
        header = struct.pack("<4s5H3L2H", b"PK\3\4", *fields, len(extra)) + name + extra
        os.pwrite(self._file.fileno(), header, self._start + offset)
        self._entries.append((name, nbytes, offset, fields))

    def finish(self):
        """Write the table of the records. Returns the bytes of the file."""
        start = self._position
        for name, nbytes, offset, fields in self._entries:
            extra = struct.pack("<Q", offset) if offset > _MOST_BYTES else b""
            if nbytes > _MOST_BYTES:
                extra = struct.pack("<2Q", nbytes, nbytes) + extra
            if extra:
                extra = struct.pack("<2H", 1, len(extra)) + extra
            version = 45 if extra else 20
            place = (len(extra), 0, 0, 0, 0, _LARGE32 if offset > _MOST_BYTES else offset)
            self._write(struct.pack("<4s6H3L5H2L", b"PK\1\2", version, version, *fields[1:], *place) + name + extra)
        size, count = self._position - start, len(self._entries)
        end = (count, count, size, start)
        if start > _MOST_BYTES or count > _MOST_RECORDS:
            place = self._position
            self._write(struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, *end))
            self._write(struct.pack("<4sLQL", b"PK\6\7", 0, place, 1))
            end = (_LARGE16, _LARGE16, _LARGE32, _LARGE32)
        self._write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, *end, 0))
        return self._position

    def _write(self, data):
        view = memoryview(data)
        while view.nbytes:
            count = self._file.write(view)
            view, self._position = view[count:], self._position + count
