"""Ctrl-C and SIGTERM end a training after its current step, with a checkpoint."""

import signal
import threading

from mindspeed_ms.core.logging import logger


class SignalHandler:
    """Context manager that notes the first SIGINT or SIGTERM; a second one interrupts at once.

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
