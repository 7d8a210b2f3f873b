"""Model of a job, and its log lines beside the answers."""

import contextlib
import sys

from mindspeed_ms.inference.loading import load


def load_model(job):
    """Loaded model of a job (Job); all ranks call it."""
    return load(
        job.checkpoint,
        tensor_model_parallel_size=job.tensor_model_parallel_size,
        pipeline_model_parallel_size=job.pipeline_model_parallel_size,
        dtype=job.dtype,
        max_sequence_length=job.max_sequence_length,
        slots=job.slots,
        iteration=job.iteration,
        flags=job.flags,
    )


@contextlib.contextmanager
def chatter_to_stderr():
    """Context manager: log lines go to the standard error, so that the standard output has answers only."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
