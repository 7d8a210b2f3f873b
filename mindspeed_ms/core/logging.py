"""Logger of the package: one format, written to the standard output, so that msrun's worker logs hold it.

Upstream's line form is kept: `time - mindspeed_ms[file:line] - LEVEL - message`.
"""

import logging
import os
import sys

LOGGER_NAME = "mindspeed_ms"
LINE_FORMAT = "%(asctime)s - mindspeed_ms[%(filename)s:%(lineno)d] - %(levelname)s - %(message)s"

logger = logging.getLogger(LOGGER_NAME)


class _StandardOutputHandler(logging.StreamHandler):
    """Log handler that writes to the current `sys.stdout`, above a progress bar if one is shown."""

    def __init__(self):
        super().__init__(sys.stdout)
        self.progress_bar = None

    def emit(self, record):
        self.stream = sys.stdout
        if self.progress_bar is None:
            super().emit(record)
        else:
            with self.progress_bar.external_write_mode(file=sys.stdout):
                super().emit(record)

    def handleError(self, record):
        """A reader that is gone, such as the `tee` that the same Ctrl-C ended, ends the log and not the work."""
        if isinstance(sys.exc_info()[1], BrokenPipeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
        else:
            super().handleError(record)


def setup_logging(level=None):
    """Send the package's log lines to the standard output, once; handlers of the user are left alone.

    Args:
        level (int or str): lowest level that is shown; None leaves an earlier choice, and is INFO without one.
    """
    if level is not None or logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO if level is None else level)
    if not logger.handlers:
        handler = _StandardOutputHandler()
        handler.setFormatter(logging.Formatter(LINE_FORMAT))
        logger.addHandler(handler)
        logger.propagate = False
    return logger


def set_progress_bar(progress_bar):
    """Print log lines above this tqdm bar (None: no bar is shown)."""
    for handler in logger.handlers:
        if isinstance(handler, _StandardOutputHandler):
            handler.progress_bar = progress_bar
