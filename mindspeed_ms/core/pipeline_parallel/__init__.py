"""Pipeline parallelism: schedules, their execution, point-to-point communication, micro-batch losses."""

from mindspeed_ms.core.pipeline_parallel.schedules import get_forward_backward_func

__all__ = ["get_forward_backward_func"]
