"""Optimizers over flat buffers, gradient clipping, loss scales and schedules."""

from mindspeed_ms.core import storage
from mindspeed_ms.core.optimizer.optimizer import MegatronOptimizer
from mindspeed_ms.core.optimizer.optimizer_config import OptimizerConfig
from mindspeed_ms.core.optimizer.optimizer_param_scheduler import OptimizerParamScheduler

__all__ = ["MegatronOptimizer", "OptimizerConfig", "OptimizerParamScheduler", "get_megatron_optimizer"]


def get_megatron_optimizer(config, model_chunks, no_weight_decay_cond=None, scale_lr_cond=None, lr_mult=1.0):
    """Build the MegatronOptimizer of these model chunks.

    Args, returned: see `MegatronOptimizer`.

    Raises:
        ValueError: `cpu_offload` where gradients are not in the host's memory.
    """
    if config.cpu_offload and not storage.is_in_host_memory():
        raise ValueError(
            "cpu_offload (optimizer_cpu_offload) has no form for this device: updates run on the "
            "device that holds the gradients. Leave it off; zero_level shards the state instead."
        )
    return MegatronOptimizer(config, model_chunks, no_weight_decay_cond, scale_lr_cond, lr_mult)
