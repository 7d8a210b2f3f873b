"""Forward and backward of a step over all its micro-batches and pipeline stages."""

from mindspeed_ms.core.pipeline_parallel.schedules import get_forward_backward_func

__all__ = ["get_forward_backward_func"]
