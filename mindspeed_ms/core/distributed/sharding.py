"""Sharding of buffers: the data-parallel ranks that share the shards of a buffer."""

from dataclasses import dataclass

from mindspeed_ms.core import comm
from mindspeed_ms.core.comm import ProcessGroup


@dataclass(frozen=True)
class Sharding:
    """Groups over which the buckets of a buffer are cut and replicated.

    Attributes:
        group (ProcessGroup): each rank of it owns one of `group.size` equal parts of every bucket.
        replicas (ProcessGroup): ranks of the data-parallel group that own the same part.
    """

    group: ProcessGroup
    replicas: ProcessGroup


def make_sharding(ddp_config, data_parallel_group):
    """`Sharding` over a data-parallel group; None if nothing is sharded. All ranks of the group call it.

    Raises:
        ValueError: `zero_shard_size` does not divide the group.
    """
    if not ddp_config.shards_optimizer:
        return None
    size = ddp_config.zero_shard_size or data_parallel_group.size
    if data_parallel_group.size % size:
        raise ValueError(f"zero_shard_size is {size}: expected a divisor of the data-parallel size {data_parallel_group.size}.")
    ranks, own = data_parallel_group.ranks, data_parallel_group.rank
    if size == len(ranks):
        return Sharding(data_parallel_group, _group("zero-replicas", [ranks[own]]))
    first = own // size * size
    return Sharding(_group("zero-shards", ranks[first : first + size]), _group("zero-replicas", ranks[own % size :: size]))


def _group(name, ranks):
    return comm.new_group(ranks, f"{name}-{'-'.join(map(str, ranks))}")
