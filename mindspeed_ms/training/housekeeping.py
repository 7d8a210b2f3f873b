"""Housekeeping of a training: garbage collection at fixed steps, signals, check of equal weights on data-parallel ranks."""

import gc
import signal
import threading
import zlib

import numpy as np

from mindspeed_ms.core import storage
from mindspeed_ms.core.logging import logger


class GarbageCollection:
    """Context manager: collect garbage at fixed steps on all ranks together, not at Python's own times.

    Args:
        manual (bool): switch Python's own timing off inside.
        interval (int): steps between collections; 0: none but at evaluations.
    """

    def __init__(self, manual=False, interval=0):
        self.manual = manual
        self.interval = interval

    def __enter__(self):
        if self.manual:
            gc.disable()
            gc.collect()
        return self

    def __exit__(self, *exception):
        if self.manual:
            gc.enable()

    def after_step(self, iteration, evaluates):
        """Collect if this step is due."""
        if self.manual and (evaluates or (self.interval and iteration % self.interval == 0)):
            gc.collect()


class SignalHandler:
    """Context manager that notes the first SIGINT (Ctrl-C) or SIGTERM; a second one interrupts at once.

    Args:
        handle_sigterm (bool): note SIGTERM too; SIGINT is always noted.

    Attributes:
        received (Optional[str]): name of the signal that came.
    """

    def __init__(self, handle_sigterm=True):
        self.received = None
        self._signals = [signal.SIGINT, signal.SIGTERM] if handle_sigterm else [signal.SIGINT]
        self._previous = {}

    def __enter__(self):
        # Python delivers signals to the main thread only; elsewhere the caller keeps its own handling
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception):
        self._restore()

    def _note(self, number, frame):
        del frame
        self.received = signal.Signals(number).name
        logger.warning(
            "%s received: finishing this step, saving, ending. A second one ends at once without saving.", self.received
        )
        self._restore()

    def _restore(self):
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        self._previous = {}


def check_weights_across_data_parallel_ranks(model, iteration):
    """Compare check sums of the weights over the data-parallel ranks.

    Raises:
        RuntimeError: on all ranks of a group whose weights differ; names the ranks.
    """
    for chunk in model:
        chunk.finish_param_sync()
        for number, (group, weights) in enumerate(chunk.replicas()):
            if group.size == 1:
                continue
            own = zlib.crc32(storage.host_array(weights).view(np.uint8))
            sums = group.all_gather_object(own)
            other = [rank for rank, value in zip(group.ranks, sums) if value != sums[0]]
            if other:
                raise RuntimeError(
                    f"after iteration {iteration} the weights of buffer {number} on ranks {other} differ from those on "
                    f"rank {group.ranks[0]} (check_weight_hash_across_dp_replicas_interval): data parallelism needs "
                    "equal weights; look for an update outside the optimizer."
                )
