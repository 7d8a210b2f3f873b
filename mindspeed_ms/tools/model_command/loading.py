"""Model of a job, and its log lines beside the answers."""

import contextlib
import sys

from mindspeed_ms.inference.loading import load
from mindspeed_ms.tools.model_command.job import SIZES


def load_model(job):
    """Loaded model of a job (Job); all ranks call it."""
    return load(
        job.checkpoint,
        **{name: getattr(job, name) for name in SIZES},
        dtype=job.dtype,
        max_sequence_length=job.max_sequence_length,
        slots=job.slots,
        iteration=job.iteration,
        adapter=job.adapter,
        flags=job.flags,
    )


@contextlib.contextmanager
def chatter_to_stderr():
    """Context manager: log lines go to the standard error, so that the standard output has answers only."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
