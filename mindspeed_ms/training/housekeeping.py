"""Care at fixed steps: garbage collection, and the check that data-parallel ranks hold equal weights."""

import gc
import zlib

import numpy as np

from mindspeed_ms.core import storage


class GarbageCollection:
    """Context manager: collect garbage at fixed steps on all ranks together instead of whenever Python likes.

    Args:
        manual (bool): switch Python's own timing off inside.
        interval (int): steps between collections; 0: none but at evaluations.
    """

    def __init__(self, manual=False, interval=0):
        self.manual = manual
        self.interval = interval

    def __enter__(self):
        if self.manual:
            gc.disable()
            gc.collect()
        return self

    def __exit__(self, *exception):
        if self.manual:
            gc.enable()

    def after_step(self, iteration, evaluates):
        """Collect if this step is due."""
        if self.manual and (evaluates or (self.interval and iteration % self.interval == 0)):
            gc.collect()


def check_weights_across_data_parallel_ranks(model, iteration):
    """Compare a check sum of the weights over the data-parallel ranks.

    Raises:
        RuntimeError: on all ranks of a group whose weights differ; names the ranks.
    """
    for chunk in model:
        chunk.finish_param_sync()
        for number, buffer in enumerate(chunk.buffers):
            # ranks whose parameters are sharded hold the same as their replicas only
            sharded = buffer.sharding is not None and buffer.ddp_config.shards_params
            group = buffer.sharding.replicas if sharded else buffer.data_parallel_group
            if group.size == 1:
                continue
            own = zlib.crc32(storage.host_array(buffer.param_buffer.tensor).view(np.uint8))
            sums = group.all_gather_object(own)
            other = [rank for rank, value in zip(group.ranks, sums) if value != sums[0]]
            if other:
                raise RuntimeError(
                    f"after iteration {iteration} the weights of buffer {number} on ranks {other} differ from those on "
                    f"rank {group.ranks[0]} (check_weight_hash_across_dp_replicas_interval): data parallelism needs "
                    "equal weights; look for an update outside the optimizer."
                )
