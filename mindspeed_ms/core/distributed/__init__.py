"""Data parallelism: parameters and gradients in flat buffers, reduced bucket by bucket."""

from mindspeed_ms.core.distributed.distributed_data_parallel import DistributedDataParallel
from mindspeed_ms.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from mindspeed_ms.core.distributed.finalize_model_grads import finalize_model_grads
from mindspeed_ms.core.distributed.interface import Optimizer, ShardedModel, unwrap_model

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "Optimizer",
    "ShardedModel",
    "finalize_model_grads",
    "unwrap_model",
]
