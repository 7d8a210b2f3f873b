"""CheckpointReader: reads any slice of any tensor, and no other bytes, without MindSpore.

reader = CheckpointReader("output/iter_0000100")
for key, tensor in reader.manifest.tensors.items():
    array = reader.read_whole(key)  # numpy; bfloat16 as uint16 bits
"""

import functools
import itertools
import json
import os
import threading

import numpy as np
import xxhash

from mindspeed_ms.core.dist_checkpointing.crc32 import Crc32
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.foreign import archives_of, wrong_records
from mindspeed_ms.core.dist_checkpointing.manifest import Manifest, digest, whole_slice
from mindspeed_ms.core.dist_checkpointing.multilinear import copy_runs, sum_of_runs
from mindspeed_ms.core.dist_checkpointing.shard_file import hash_of_range
from mindspeed_ms.core.dist_checkpointing.slices import copy_plan
from mindspeed_ms.layout.sharding import ParameterSharding

_MOST_BUFFERS = os.sysconf("SC_IOV_MAX") if "SC_IOV_MAX" in os.sysconf_names else 16
_BLOCK_ELEMENTS = 1 << 20
_BLOCK_BYTES = 8 << 20
_SCRATCH_BYTES = 1 << 20  # stays in the processor's cache
_MOST_VIEWS = 64  # of one call: more are cut out of a block with compiled code
NUMPY_DTYPES = {"bfloat16": np.dtype(np.uint16), "bool": np.dtype(np.bool_)}


def numpy_dtype(name):
    """numpy dtype that holds the values of a stored dtype; bfloat16 as its bits in uint16."""
    return NUMPY_DTYPES.get(name) or np.dtype(name)


class CheckpointReader:
    """Reads the checkpoint in a folder `iter_...`; a context manager that closes the files.

    Args:
        folder (str): of one checkpoint.
        manifest (Optional[Manifest]): if it was read already.

    Several threads may read at the same time.

    Attributes:
        passed (Optional[dict]): if set, check sums of whole pieces that `read` has read, by file, start and stop: `verify`
            then compares these, and reads only the others; `read` itself compares none.

    Raises:
        CheckpointError: no manifest, or a damaged one.
    """

    def __init__(self, folder, manifest=None):
        self.folder = os.fspath(folder)
        self.manifest = manifest if manifest is not None else Manifest.read(self.folder)
        self.passed = None
        self._files, self._lock = {}, threading.Lock()
        self._identity = self._identity_now()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        self.close()
        if isinstance(error, CheckpointError):
            self.check_still_there(error)

    def _identity_now(self):
        """What tells the folder from another one of its name; None if there is none."""
        try:
            return os.stat(self.folder).st_ino
        except OSError:
            return None

    def check_still_there(self, cause=None):
        """Raise CheckpointError, caused by `cause`, if the checkpoint was deleted or replaced since it was opened."""
        if self._identity_now() != self._identity:
            raise CheckpointError(
                f"{self.folder} was deleted or replaced while it was read, as a training does that keeps few checkpoints "
                "(keep_checkpoint_max): try again, or take a copy."
            ) from cause

    def close(self):
        """Close all files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}

    def read_whole(self, key):
        """The global tensor `key` as a numpy array (bfloat16: uint16 bits).

        Raises:
            CheckpointError: no such tensor, a part of it is stored nowhere, or its bytes are damaged.
        """
        stored = self.tensor(key)
        out = np.empty(stored.shape, numpy_dtype(stored.dtype))
        missing = self.read(key, whole_slice(ParameterSharding.replicated(stored.shape)), out.reshape(-1))
        if missing:
            raise CheckpointError(f"{self.folder} stores no elements {missing[0][0]} to {missing[0][1]} of {key}.")
        return out

    def tensor(self, key):
        """`StoredTensor` of a key; CheckpointError if there is none."""
        stored = self.manifest.tensors.get(key)
        if stored is None:
            raise CheckpointError(f"{self.folder} stores no tensor {key}.")
        return stored

    def read(self, key, wanted, out, on_part=None):
        """Read a slice of a tensor into memory.

        A stored piece that is read as a whole is compared with its check sum; a part of one is reported to `on_part`
        (`PartialReads` then compares what all ranks read).

        Args:
            key (str): which tensor.
            wanted (FlatSlice): of a tensor with the stored shape; its first axis may be of another length.
            out (numpy.ndarray): 1-D, contiguous, elements of the stored size; elements that are not stored stay.
            on_part (Optional[callable]): called with the number of the piece, how many of its elements were read, and what
                they contribute to its check sum.

        Returns:
            list[(int, int)]: flat global ranges that are stored nowhere.

        Raises:
            CheckpointError: no such tensor, or damaged.
        """
        stored = self.tensor(key)
        memory, size = memoryview(out.view(np.uint8)), stored.itemsize
        runs, missing = copy_plan(wanted, [piece.slice for piece in stored.pieces])
        for number, (piece, parts) in enumerate(zip(stored.pieces, runs)):
            count = int(parts[:, 2].sum())
            hashed = self._sum_of(piece) if count == piece.slice.stop - piece.slice.start else None
            if piece.form is not None:
                self._read_form(key, piece, parts * size, memory)
            else:
                (self._read_transposed if piece.transposed else self._read_runs)(key, piece, parts * size, memory, hashed)
            if hashed is not None:
                self._check(key, number, hashed.hexdigest())
            elif count and piece.multilinear and on_part is not None:
                on_part(number, count, sum_of_runs(memory, size, parts))
        return missing

    def _sum_of(self, piece):
        """Empty check sum of the kind that the bytes of a whole piece have; None if they have none that is asked for."""
        if piece.xxhash:
            return xxhash.xxh3_64()
        return Crc32() if self.passed is not None and piece.file in self._zip_files else None

    def _check(self, key, number, digest):
        """Keep the check sum of a whole piece for `verify`, or raise CheckpointError if it is another than the saved one."""
        piece = self.tensor(key).pieces[number]
        if self.passed is not None:
            self.passed[piece.file, piece.start, piece.stop] = digest
        elif digest != piece.xxhash:
            raise CheckpointError(self.damaged(key, number))

    def _read_transposed(self, key, piece, parts, memory, hashed):
        """Read runs of a piece whose last two axes are swapped in the file: reads all of the piece."""
        if not len(parts):
            return
        *outer, rows, columns = piece.slice.sharding.local_shape
        whole = np.empty((*outer, columns, rows), f"u{self.tensor(key).itemsize}")
        everything = np.array([(0, 0, whole.nbytes)])
        self._read_runs(key, piece, everything, memoryview(whole.reshape(-1).view(np.uint8)), hashed)
        values = np.ascontiguousarray(whole.swapaxes(-1, -2)).reshape(-1).view(np.uint8)
        _copy_runs(values, memory, parts, 0)

    def _read_form(self, key, piece, parts, memory):
        """Read runs of a piece that is stored in another form: reads all of the piece."""
        if not len(parts):
            return

        def read(file, start, stop):
            values = np.empty(stop - start, np.uint8)
            self._read_exactly(key, file, start, [memoryview(values)])
            return values

        values = piece.form.local(read)
        _copy_runs(np.ascontiguousarray(values).reshape(-1).view(np.uint8), memory, parts, 0)

    def sum_of_runs(self, key, number, runs):
        """Check sum contribution of runs (offset, elements) of piece `number`, which it reads block by block."""
        stored, total = self.tensor(key), 0
        size = stored.itemsize
        block = np.empty(min(_BLOCK_ELEMENTS, max((count for _, count in runs), default=0)) * size, np.uint8)
        for start, left in runs:
            while left:
                count = min(left, _BLOCK_ELEMENTS)
                self._read_runs(key, stored.pieces[number], np.array([(start, 0, count)]) * size, memoryview(block))
                total += sum_of_runs(block, size, [(start, 0, count)])
                start, left = start + count, left - count
        return total

    def _read_runs(self, key, piece, runs, memory, hashed=None):
        """Read runs (offset in the piece, offset in memory, bytes); those that touch in the file share one call.

        `hashed` is the check sum that their bytes are added to.
        """
        few = min(_MOST_BUFFERS, _MOST_VIEWS)
        for first, last in _stretches(runs):
            start, stop = int(runs[first, 0]), int(runs[last - 1, 0] + runs[last - 1, 2])
            if last - first <= few:
                views = [memory[target : target + count] for _, target, count in runs[first:last].tolist()]
                self._read_exactly(key, piece.file, piece.start + start, views, hashed)
            else:
                block = np.empty(stop - start, np.uint8)
                self._read_exactly(key, piece.file, piece.start + start, [memoryview(block)], hashed)
                _copy_runs(block, memory, runs[first:last], start)

    def _read_exactly(self, key, name, offset, views, hashed=None):
        for view in _blocks_of(views) if hashed is not None else (views,):
            left = list(view)
            while left:
                count = os.preadv(self._open(name), left, offset)
                if count == 0:
                    raise CheckpointError(f"{os.path.join(self.folder, name)} is damaged: it ends within tensor {key}.")
                offset += count
                while left and count >= left[0].nbytes:
                    count -= left.pop(0).nbytes
                if left and count:
                    left[0] = left[0][count:]
            if hashed is not None:
                for part in view:
                    hashed.update(part)

    def _open(self, name):
        with self._lock:
            if name not in self._files:
                try:
                    self._files[name] = os.open(os.path.join(self.folder, name), os.O_RDONLY)
                except OSError as error:
                    raise CheckpointError(f"{os.path.join(self.folder, name)} cannot be read: {error.strerror}.") from error
            return self._files[name]

    def damaged(self, key, number):
        """Error text: the check sum of piece `number` of a tensor is wrong."""
        path = os.path.join(self.folder, self.tensor(key).pieces[number].file)
        return (
            f"{path} is damaged: the check sum of tensor {key} is wrong. With crc_check "
            "(--crc-check) a resuming run finds that first and takes the checkpoint before."
        )

    def rank_states(self, number):
        """Read the own states of rank `number` of the saving run: dict with rng and data_position.

        Raises:
            CheckpointError: missing or damaged.
        """
        entry = self.manifest.ranks[number]
        path = os.path.join(self.folder, entry["file"])
        try:
            with open(path, "rb", buffering=0) as file:
                data = file.readall()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
        if digest(data) != entry["xxhash"]:
            raise CheckpointError(f"{path} is damaged: its check sum is wrong.")
        return json.loads(data)

    def incomplete(self):
        """Files that are missing or of a wrong size: list of texts, empty if the checkpoint is complete."""
        sizes = {**self.manifest.files, **{entry["file"]: entry["bytes"] for entry in self.manifest.ranks}}
        problems = []
        for name, expected in sizes.items():
            try:
                found = os.stat(os.path.join(self.folder, name)).st_size
            except OSError:
                problems.append(f"{name} is missing")
                continue
            if found != expected:
                problems.append(f"{name} has {found} bytes instead of {expected}")
        return problems

    def check_replicas(self, part=0, parts=1):
        """Compare the places that must hold the same values (of another program's ranks): list of texts about differences.

        Args:
            part, parts (int): only every `parts`-th, from `part`; so that ranks can share the work.
        """
        problems = []
        for key, one, other in self.manifest.replicas[part::parts]:
            for start in range(0, one.stop - one.start, _BLOCK_BYTES):
                count, blocks = min(_BLOCK_BYTES, one.stop - one.start - start), []
                for piece in (one, other):
                    blocks.append(bytearray(count))
                    self._read_exactly(key, piece.file, piece.start + start, [memoryview(blocks[-1])])
                if blocks[0] != blocks[1]:
                    problems.append(f"{one.file} and {other.file} hold different values of {key}, which every rank has whole")
                    break
        return problems

    @functools.cached_property
    def _zip_files(self):
        """Names of the files with archives."""
        return {name for name, _, _ in self._archives}

    @functools.cached_property
    def _archives(self):
        """(file, first byte, end) of what torch.save wrote, in another program's folder."""
        return archives_of(self.folder, self.manifest.files)

    def verify(self, part=0, parts=1):
        """Compare every check sum, reading everything once, and replicas.

        Args:
            part, parts (int): read only every `parts`-th piece, from `part`; so that ranks can share the work.

        Returns:
            list[str]: texts about damaged files and tensors.
        """
        problems, number, passed = self.check_replicas(part, parts), 0, self.passed or {}
        for key, stored in self.manifest.tensors.items():
            for piece in stored.pieces:
                number += 1
                if number % parts != part or not piece.xxhash:
                    continue
                found = passed.get((piece.file, piece.start, piece.stop))
                if found is None:
                    found = hash_of_range(os.path.join(self.folder, piece.file), piece.start, piece.stop)
                if found != piece.xxhash:
                    problems.append(f"{piece.file}: the check sum of tensor {key} is wrong")
        for name, start, stop in self._archives[part::parts]:
            known = {place[1:]: found for place, found in passed.items() if place[0] == name}
            wrong = wrong_records(os.path.join(self.folder, name), start, stop, known)
            for record, first, last in wrong:
                keys = [
                    key
                    for key, stored in self.manifest.tensors.items()
                    if any(piece.file == name and piece.start < last and first < piece.stop for piece in stored.pieces)
                ]
                held = f" (tensor {keys[0]}{' and others' if len(keys) > 1 else ''})" if keys else ""
                problems.append(f"{name}: the check sum of its record {record}{held} is wrong")
        for number in range(part, len(self.manifest.ranks), parts):
            try:
                self.rank_states(number)
            except CheckpointError:
                problems.append(f"{self.manifest.ranks[number]['file']} is damaged or missing")
        return problems


def _stretches(runs):
    """Bounds of stretches of runs that touch in the file: of a block's size, or of a few runs."""
    if not len(runs):
        return
    ends = runs[:, 0] + runs[:, 2]
    breaks = np.flatnonzero(runs[1:, 0] != ends[:-1]) + 1
    for first, stop in itertools.pairwise([0, *breaks.tolist(), len(runs)]):
        while first < stop:
            fitting = np.searchsorted(ends[first:stop], runs[first, 0] + _SCRATCH_BYTES, "right")
            last = first + max(1, int(fitting))
            yield first, last
            first = last


def _blocks_of(views):
    """Lists of views, each of a block's size at most, so that a block is in the cache when its check sum is counted."""
    if len(views) > 1:
        yield views
        return
    for start in range(0, views[0].nbytes, _SCRATCH_BYTES):
        yield [views[0][start : start + _SCRATCH_BYTES]]


def _copy_runs(source, memory, runs, first):
    """Copy runs (offset in the source plus `first`, offset in memory, bytes)."""
    if len(runs) > _MOST_VIEWS:
        copy_runs(source, np.frombuffer(memory, np.uint8), np.ascontiguousarray(runs), first)
        return
    values = memoryview(source)
    for start, target, nbytes in runs.tolist():
        memory[target : target + nbytes] = values[start - first : start - first + nbytes]
