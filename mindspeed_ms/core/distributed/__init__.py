"""Data parallelism: parameters and gradients in flat buffers, reduced bucket by bucket."""

from mindspeed_ms.core.distributed.distributed_data_parallel import DistributedDataParallel
from mindspeed_ms.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from mindspeed_ms.core.distributed.finalize_model_grads import finalize_model_grads

__all__ = ["DistributedDataParallel", "DistributedDataParallelConfig", "finalize_model_grads"]
