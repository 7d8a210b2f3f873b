"""Thread pool that runs kernels on the cores of this process.

A job is cut into pieces that whoever is free takes next. The caller never waits for a thread to start, only for pieces
that another thread has begun: static shares with barriers, as OpenMP has them, cost milliseconds whenever another
process uses a core. Helpers are ordinary threads; between kernels they watch a counter for a moment, because waking a
sleeping thread takes longer than many kernels, then sleep. They start at the first use, hence after any fork.
"""

import os
import threading

import numpy as np

from mindspeed_ms.core.device import thread_count as _device_threads
from mindspeed_ms.ops.cpu.atomics import wait_until_changed
from mindspeed_ms.ops.cpu.compiler import FINISHED, JOB_SIZE

MINIMUM_WORK = 32768
"""Element operations below which a piece is not worth handing to another thread."""
_PIECES_PER_THREAD = 4
_IDLE_ROUNDS = 20000
_WAIT_ROUNDS = 100_000

_threads = 0
_helpers = []
_bell = np.zeros(1, np.int64)
_silent_bell = np.zeros(1, np.int64)
_current = None  # the job that helpers may join: kernel, arguments of its entry, list for failures


def run(kernel, total, work, *arguments, pieces_per_thread=_PIECES_PER_THREAD):
    """Run `kernel(start, stop, *arguments)` over all of range(total), in pieces on all threads of this process.

    Args:
        total: rows, columns or elements that the kernel can be cut into; results must not depend on the cut.
        work: element operations of the whole call, to decide whether more than one thread is worth while.
        pieces_per_thread: more pieces share the work better, fewer suit kernels with a cost per piece.
    """
    job = np.zeros(JOB_SIZE, np.int64)
    pieces = min(total, work // MINIMUM_WORK)
    if pieces < 2 or thread_count() == 1:
        kernel.entry(_silent_bell, job, total, max(total, 1), *arguments)
        return
    pieces = min(pieces, pieces_per_thread * _threads)
    piece = -(-total // pieces)
    _run_with_helpers(kernel, job, total, piece, arguments)


def _run_with_helpers(kernel, job, total, piece, arguments):
    global _current
    _wake_helpers(_threads - 1)
    failures = []
    _current = kernel, (_silent_bell, job, total, piece, *arguments), failures
    try:
        # the bell rings inside, where the interpreter lock is free for the helpers
        kernel.entry(_bell, job, total, piece, *arguments)
    finally:
        _current = None
    pieces = -(-total // piece)
    finished = int(job[FINISHED])
    while finished < pieces:
        if failures:
            raise failures[0]
        wait_until_changed(job, FINISHED, finished, _WAIT_ROUNDS)
        finished = int(job[FINISHED])


def thread_count():
    """Number of threads that kernels run on; read once."""
    global _threads
    if not _threads:
        _threads = _device_threads()
    return _threads


class _Helper(threading.Thread):
    """Helper thread: runs pieces of announced jobs; sleeps when there has been none for a moment."""

    def __init__(self, number):
        super().__init__(name=f"mindspeed_ms-kernel-{number}", daemon=True)
        self.is_asleep = False
        self.wake = threading.Semaphore(0)

    def run(self):
        """Worker loop: take pieces of each announced job; a missed job is finished by the other threads."""
        seen = int(_bell[0])
        while True:
            if not wait_until_changed(_bell, 0, seen, _IDLE_ROUNDS):
                self.is_asleep = True
                self.wake.acquire()
            seen = int(_bell[0])
            current = _current
            if current is not None:
                kernel, arguments, failures = current
                try:
                    kernel.entry(*arguments)
                except Exception as error:  # the caller raises it
                    failures.append(error)


def _wake_helpers(number):
    while len(_helpers) < number:
        _helpers.append(_Helper(len(_helpers)))
        _helpers[-1].start()
    for helper in _helpers[:number]:
        if helper.is_asleep:
            helper.is_asleep = False
            helper.wake.release()


os.register_at_fork(after_in_child=_helpers.clear)  # threads do not survive a fork
