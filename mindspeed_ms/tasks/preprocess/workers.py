"""Worker processes for tokenizing: encoded batches keep the order of the input, and few are in memory at a time."""

import multiprocessing
import os
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from mindspeed_ms.tasks.preprocess.encoding import encode_batch, start_process
from mindspeed_ms.tasks.preprocess.errors import PreprocessError

_WAITING_PER_WORKER = 4
_PROCESSES_PER_CORE = 4
_SECONDS_TO_END = 2.0


def encode_all(batches, encoder, workers):
    """Encode batches in worker processes, in order.

    Args:
        batches (Iterable[tuple[object, Batch, Optional[int]]]): anything, the batch, and how many of its records are wanted
            (None: all).
        encoder (Encoder): of this process.
        workers (int): processes; 1: this one.

    Yields:
        (object, Encoded): the first element of the triple, and the encoded batch.

    Raises:
        RecordError: see Encoder.encode.
        PreprocessError: a process was killed.
    """
    if workers == 1:
        for mark, batch, limit in batches:
            yield mark, encoder.encode(batch, limit)
        return
    # spawned, not forked: pyarrow has threads here, which a fork would not carry over
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_process, (encoder.settings,))
    waiting = deque()
    try:
        for mark, batch, limit in batches:
            waiting.append((mark, pool.submit(encode_batch, batch, limit)))
            if len(waiting) > _WAITING_PER_WORKER * workers:
                yield _first(waiting)
        while waiting:
            yield _first(waiting)
    except BrokenProcessPool as error:
        _let_go(pool)
        raise PreprocessError(
            f"one of the {workers} tokenizing processes was killed, often because memory ran out (dmesg tells). What was done "
            "so far is kept: repeat the command to continue, with fewer --workers if memory is short."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _let_go(pool):
    """End the thread of a broken pool; closing the pipe frees one that writes to a dead process (gh-94777, older Pythons)."""
    manager, queue = pool._executor_manager_thread, pool._call_queue
    manager.join(_SECONDS_TO_END)
    if manager.is_alive():
        queue._reader.close()


def _first(waiting):
    mark, future = waiting.popleft()
    return mark, future.result()


def cores():
    """Number of cores that this process may use (int)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most_processes():
    """Largest useful number of processes (int): more only take memory."""
    return _PROCESSES_PER_CORE * cores()
