"""Start-up helpers of the guide, and small tools for training scripts."""

import random

import mindspore as ms
import numpy as np
from mindspore import Tensor

from mindspeed_ms.config.model_description import describe_parallel
from mindspeed_ms.core import comm, parallel_state
from mindspeed_ms.core.device import initialize_device
from mindspeed_ms.core.distributed.distributed_data_parallel import unwrap_model
from mindspeed_ms.core.logging import logger, setup_logging
from mindspeed_ms.core.tensor_parallel.random import model_parallel_manual_seed
from mindspeed_ms.layout.ranks import WorldLayout

__all__ = [
    "average_losses_across_data_parallel_group",
    "is_last_rank",
    "print_rank_0",
    "print_rank_last",
    "set_parallel_context",
    "set_seed",
    "unwrap_model",
]


def set_parallel_context(parallel_config):
    """Start the device and the communication, and lay the parallel grid over the world.

    Calling it again with the same layout changes nothing.

    Args:
        parallel_config (ModelParallelConfig): sizes of tensor, pipeline, virtual pipeline, context and expert
            parallelism, order of the axes, communication backend.

    Raises:
        ValueError: the world does not fit, or another layout is in force.
    """
    setup_logging()
    if not comm.is_initialized():
        comm.init(backend=parallel_config.communication_backend, timeout=60.0 * parallel_config.distributed_timeout_minutes)
    initialize_device()
    layout = WorldLayout.from_description(describe_parallel(parallel_config), comm.get_world_size())
    virtual_size = parallel_config.virtual_pipeline_model_parallel_size
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_from_layout(layout, virtual_size)
        return
    wanted = {**layout.sizes(), "virtual_pipeline_model_parallel_size": virtual_size}
    present = {
        **parallel_state.get_world_layout().sizes(),
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
    }
    for name, value in present.items():
        if wanted[name] != value:
            raise ValueError(
                f"{name} is {wanted[name]}, but this process already runs with {value}: call "
                "destroy_model_parallel() before a run with another layout."
            )


def set_seed(seed):
    """Seed Python, numpy, MindSpore and the named random states of this rank.

    Args:
        seed (Optional[int]): None stands for 1234.

    Raises:
        ValueError: not a positive integer.
    """
    seed = 1234 if seed is None else seed
    if isinstance(seed, bool) or not isinstance(seed, int) or seed <= 0:
        raise ValueError(f"seed is {seed!r}: expected a positive integer.")
    host_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(host_seed)
    np.random.seed(host_seed)
    ms.set_seed(host_seed)
    model_parallel_manual_seed(seed)


def print_rank_0(message):
    """Log a message on global rank 0 only."""
    if not comm.is_initialized() or comm.get_rank() == 0:
        logger.info("%s", message)


def print_rank_last(message):
    """Log a message on the last global rank only."""
    if not comm.is_initialized() or is_last_rank():
        logger.info("%s", message)


def is_last_rank():
    """Whether this is the last global rank."""
    return comm.get_rank() == comm.get_world_size() - 1


def average_losses_across_data_parallel_group(losses):
    """Mean of scalar losses over the data-parallel group.

    Args:
        losses (list[Tensor]): scalars.

    Returns:
        Tensor: float32, one entry per loss; equal on all ranks of the group.
    """
    values = np.array([float(loss.asnumpy()) for loss in losses], np.float64)
    group = parallel_state.get_data_parallel_group()
    if group.size > 1:
        values = np.asarray(group.all_gather(values)).reshape(group.size, -1).mean(axis=0)
    return Tensor(values.astype(np.float32))
