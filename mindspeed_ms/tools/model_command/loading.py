"""Model of a job, and its log lines beside the answers."""

import contextlib
import sys

from mindspeed_ms.inference.loading import load_checkpoint


def load_model(job, plan):
    """Loaded model of a job (Job, Plan); all ranks call it."""
    return load_checkpoint(plan.checkpoint, slots=job.slots)


@contextlib.contextmanager
def chatter_to_stderr():
    """Context manager: log lines go to the standard error, so that the standard output has answers only."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
