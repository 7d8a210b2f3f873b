"""Rewriting of a checkpoint tensor by tensor: each is read once, whole, and its parts are written to where they belong.

Threads work on several tensors at a time; memory holds one for each of them.
"""

import os
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from mindspeed_ms.core.dist_checkpointing import durable
from mindspeed_ms.core.dist_checkpointing.shard_file import Entry, begin_shard, write_values

_MOST_WORKERS = 4


@dataclass
class Part:
    """Part of a tensor for an entry of a file.

    Attributes:
        entry (Entry): without data; `nbytes` and `shape` are those of the part.
        key (str): of the tensor.
        slice (FlatSlice): which part; its tensor may have fewer rows than the stored one.
        transposed (bool): the last two axes of the local tensor are swapped in the file.
        order (Optional[Callable]): local tensor (array) -> the values as they are in the file.
        whole (Optional[Entry]): tensor of the file that consists of several parts of `entry.nbytes` each, one after another.
        slot (int): of `whole`: which one.
    """

    entry: Entry
    key: str
    slice: object
    transposed: bool = False
    order: object = None
    whole: Entry | None = None
    slot: int = 0


def default_workers():
    """Threads of a conversion: one for each core that this process may use, at most four."""
    return min(_MOST_WORKERS, len(os.sched_getaffinity(0)))


class _Stopped(Exception):
    """Another thread has ended the work."""


class Workers:
    """Threads that share a list of work; the first error, or an interruption, ends all.

    Args:
        count (int): threads.
        progress (Optional[Callable]): called with a number of bytes by one thread at a time.
    """

    def __init__(self, count, progress=None):
        self._count, self._progress = count, progress or (lambda nbytes: None)
        self._lock, self._is_over = threading.Lock(), False

    def run(self, work, items):
        """Call `work` for each item; raises its first error."""
        with ThreadPoolExecutor(self._count) as pool:
            try:
                results = [pool.submit(work, item) for item in items]
                for result in wait(results, return_when=FIRST_EXCEPTION).done:
                    result.result()
            except BaseException:
                self._is_over = True
                pool.shutdown(cancel_futures=True)
                raise

    def advance(self, nbytes):
        """Move the progress; work calls it often, and ends here if other work has failed."""
        with self._lock:
            if self._is_over:
                raise _Stopped
            self._progress(nbytes)


def _entries(parts):
    """Entries of a file's header, each once."""
    entries = [part.whole or part.entry for part in parts]
    return list({id(entry): entry for entry in entries}.values())


def write_shards(reader, shards, workers, progress, made_by="mindspeed_ms", with_sums=False):
    """Write files with parts of the tensors of a checkpoint, and sync them to the disk.

    Args:
        reader (CheckpointReader): source.
        shards (dict[str, list[Part]]): by the file's path. Entries that have data are written as they are.
        workers (int): threads.
        progress (Callable): called with numbers of bytes that are written.
        made_by (str): see `write_shard`.
        with_sums (bool): fill in the check sums of the entries.

    Returns:
        list[int]: bytes of each file.

    Raises:
        CheckpointError: the source is damaged, or stores a part nowhere.
        OSError: no space, ...
    """
    sizes = [begin_shard(path, _entries(parts), made_by) for path, parts in shards.items()]
    for part in (part for parts in shards.values() for part in parts if part.whole is not None):
        part.entry.start = part.whole.start + part.slot * part.entry.nbytes
        part.entry.stop = part.entry.start + part.entry.nbytes
    places, threads = {}, Workers(workers, progress)
    for path, parts in shards.items():
        for part in parts:
            if part.entry.data is not None:
                write_values(path, part.entry, part.entry.data, with_sums, threads.advance)
            else:
                places.setdefault(part.key, []).append((path, part))

    def write_tensor(key):
        whole, sharding, local = reader.read_whole(key), None, None
        for path, part in places[key]:
            if part.slice.sharding != sharding:
                sharding = part.slice.sharding
                rows = whole[: sharding.global_shape[0]] if sharding.global_shape else whole
                local = np.ascontiguousarray(sharding.split(rows))
            values = local.reshape(-1)[part.slice.start : part.slice.stop]
            if part.order is not None:
                values = part.order(local).reshape(-1)
            elif part.transposed:
                values = np.ascontiguousarray(local.swapaxes(-1, -2)).reshape(-1)
            write_values(path, part.entry, values.view(np.uint8), with_sums, threads.advance)

    threads.run(write_tensor, places)
    threads.run(durable.sync, shards)
    return sizes
