"""Spreads kernels over the cores of this process.

Helpers are ordinary threads; kernels run without the interpreter lock. Work is cut into fixed pieces that whoever is
free
takes next, so a helper that the operating system wakes late delays nobody: barriers between spinning threads, as OpenMP
has them, cost milliseconds whenever another process uses a core. Threads start at the first use, hence after any fork.
"""
import itertools
import queue
import threading

from mindspeed_ms.core.device import thread_count as _device_threads

MINIMUM_WORK = 65536
"""Element operations below which handing a piece to another thread costs more than it gains (some 20 us)."""
_PIECES_PER_THREAD = 3

_jobs = queue.SimpleQueue()
_helpers = 0
_threads = 0


class _Job:
    def __init__(self, kernel, total, piece, arguments):
        self.kernel = kernel
        self.total = total
        self.piece = piece
        self.arguments = arguments
        self.starts = itertools.count(0, piece)  # next() is atomic
        self.finished = queue.SimpleQueue()

    def take_pieces(self):
        """Run pieces until none is left."""
        for start in self.starts:
            if start >= self.total:
                return
            failure = None
            try:
                self.kernel(start, min(start + self.piece, self.total), *self.arguments)
            except BaseException as error:  # handed to the caller, who must not wait for ever
                failure = error
            self.finished.put(failure)


def run(kernel, total, work, *arguments, pieces_per_thread=_PIECES_PER_THREAD):
    """Call `kernel(start, stop, *arguments)` over all of range(total), in pieces on all threads of this process.

    Args:
        total: rows, columns or elements that the kernel can be cut into; results must not depend on the cut.
        work: element operations of the whole call, to decide whether more than one thread is worth while.
        pieces_per_thread: more pieces share the work better, fewer suit kernels with a cost per piece.
    """
    pieces = min(total, work // MINIMUM_WORK)
    if pieces < 2 or thread_count() == 1:
        kernel(0, total, *arguments)
        return
    pieces = min(pieces, pieces_per_thread * _threads)
    helpers = min(pieces, _threads) - 1
    _start_helpers(helpers)
    piece = -(-total // pieces)
    job = _Job(kernel, total, piece, arguments)
    for _ in range(helpers):
        _jobs.put(job)
    job.take_pieces()
    failures = [job.finished.get() for _ in range(-(-total // piece))]
    for failure in failures:
        if failure is not None:
            raise failure


def thread_count():
    """Threads that kernels run on; read once."""
    global _threads
    if not _threads:
        _threads = _device_threads()
    return _threads


def _start_helpers(number):
    global _helpers
    while _helpers < number:
        threading.Thread(target=_help, name=f"mindspeed_ms-kernel-{_helpers}", daemon=True).start()
        _helpers += 1


def _help():
    while True:
        _jobs.get().take_pieces()
