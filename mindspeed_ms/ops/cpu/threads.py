"""Thread pool that runs kernels on the cores of this process.

A job is cut into pieces that whoever is free takes next. The caller never waits for a thread to start, only for pieces
that another thread has begun: static shares with barriers, as OpenMP has them, cost milliseconds whenever another
process uses a core. Helpers are ordinary threads; between kernels they watch a counter for a moment, because waking a
sleeping thread takes longer than many kernels, then sleep. They start at the first use, hence after any fork.
"""

import os
import threading

from mindspeed_ms.core.device import thread_count as _device_threads
from mindspeed_ms.ops.cpu import jobs

MINIMUM_WORK = 32768
"""Element operations below which a piece is not worth handing to another thread."""
_PIECES_PER_THREAD = 4
_IDLE_ROUNDS = 100_000
_LAST_ROUNDS = 1_000
_MOST_WEIGHTS = 10_000

_threads = 0
_helpers = []
_board = jobs.new_board()
_weight_after, _last_weight = {}, None


def run(kernel, total, work, *arguments, pieces_per_thread=_PIECES_PER_THREAD):
    """Run `kernel(start, stop, *arguments)` over all of range(total), in pieces on all threads of this process.

    Args:
        total: rows, columns or elements that the kernel can be cut into; results must not depend on the cut.
        work: element operations of the whole call, to decide whether more than one thread is worth while.
        pieces_per_thread: more pieces share the work better, fewer suit kernels with a cost per piece.
    """
    pieces = min(total, work // MINIMUM_WORK)
    if pieces < 2 or thread_count() == 1:
        kernel.entry(_board, total, max(total, 1), *arguments)
        return
    pieces = min(pieces, pieces_per_thread * _threads)
    _wake_helpers(_threads - 1)
    kernel.entry(_board, total, -(-total // pieces), *arguments)


def reads_weight(address, size):
    """Note the weight that was just read: until the next job helpers load their part of the one that followed it the last time.

    A step of generation reads all weights once, in one order, and is as long as that takes.
    """
    global _last_weight
    if len(_weight_after) > _MOST_WEIGHTS:
        _weight_after.clear()
    _weight_after[_last_weight] = address, size
    _last_weight = address
    following = _weight_after.get(address)
    if following is not None:
        jobs.announce(_board, *following)


def thread_count():
    """Number of threads that kernels run on; read once."""
    global _threads
    if not _threads:
        _threads = _device_threads()
    return _threads


class _Helper(threading.Thread):
    """Helper thread: takes pieces of announced jobs; sleeps when there has been none for a moment."""

    def __init__(self, number):
        super().__init__(name=f"mindspeed_ms-kernel-{number}", daemon=True)
        self.is_asleep = False
        self.wake = threading.Semaphore(0)

    def run(self):
        """Worker loop; a job that is missed while falling asleep is finished by the other threads."""
        while True:
            jobs.help_until_idle(_board, _IDLE_ROUNDS)
            self.is_asleep = True
            jobs.help_until_idle(_board, _LAST_ROUNDS)  # a job whose starter has not seen that
            self.wake.acquire()


def _wake_helpers(number):
    while len(_helpers) < number:
        _helpers.append(_Helper(len(_helpers)))
        _helpers[-1].start()
    for helper in _helpers[:number]:
        if helper.is_asleep:
            helper.is_asleep = False
            helper.wake.release()


os.register_at_fork(after_in_child=_helpers.clear)  # threads do not survive a fork
