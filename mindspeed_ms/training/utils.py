"""Start-up of device, communication and seeds (`set_parallel_context`, `set_seed`), and helpers of training scripts."""

import random

import mindspore as ms
import numpy as np

from mindspeed_ms.config.model_description import describe_parallel
from mindspeed_ms.core import comm, parallel_state
from mindspeed_ms.core.device import initialize_device
from mindspeed_ms.core.distributed import unwrap_model
from mindspeed_ms.core.logging import logger, setup_logging
from mindspeed_ms.core.tensor_parallel.random import model_parallel_manual_seed
from mindspeed_ms.layout.ranks import WorldLayout

__all__ = ["is_last_rank", "print_rank_0", "set_parallel_context", "set_seed", "set_seed_unless_set", "unwrap_model"]

_is_freshly_seeded = False


def set_parallel_context(parallel_config):
    """Start the device and communication, and create the parallel grid.

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
    wanted, present = layout.sizes(), parallel_state.get_world_layout().sizes()
    name = "virtual_pipeline_model_parallel_size"
    wanted[name], present[name] = virtual_size, parallel_state.get_virtual_pipeline_model_parallel_world_size()
    for name, value in present.items():
        if wanted[name] != value:
            raise ValueError(
                f"{name} is {wanted[name]}, but this process already runs with {value}: call "
                "destroy_model_parallel() before a run with another layout."
            )


def set_seed(seed):
    """Seed Python, numpy, MindSpore and the named random states of this rank.

    Args:
        seed (Optional[int]): None: 1234.

    Raises:
        ValueError: not a positive integer.
    """
    global _is_freshly_seeded
    seed = 1234 if seed is None else seed
    if isinstance(seed, bool) or not isinstance(seed, int) or seed <= 0:
        raise ValueError(f"seed is {seed!r}: expected a positive integer.")
    host_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(host_seed)
    np.random.seed(host_seed)
    ms.set_seed(host_seed)
    model_parallel_manual_seed(seed)
    _is_freshly_seeded = True
    comm.at_destroy(_forget_seed)


def set_seed_unless_set(seed):
    """Call `set_seed` at the start of a run, unless the script did so since the last run started."""
    if not _is_freshly_seeded:
        set_seed(seed)
    _forget_seed()


def _forget_seed():
    global _is_freshly_seeded
    _is_freshly_seeded = False


def print_rank_0(message):
    """Log a message on global rank 0 only."""
    if not comm.is_initialized() or comm.get_rank() == 0:
        logger.info("%s", message)


def is_last_rank():
    """Whether this is the last global rank."""
    return comm.get_rank() == comm.get_world_size() - 1
