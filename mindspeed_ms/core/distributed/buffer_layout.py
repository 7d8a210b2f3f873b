"""Layout of parameters in a flat buffer: ranges, buckets, alignment; plain numbers, no tensors.

Source: Megatron core's `_ParamAndGradBuffer`: parameters in reverse order, so that the first gradients of a backward
fill the first bucket; a bucket ends when it has reached its size.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ParameterRange:
    """Elements `start` to `stop` of the buffer hold parameter number `index` (in module order), in bucket `bucket`."""

    index: int
    start: int
    stop: int
    bucket: int


@dataclass(frozen=True)
class BufferLayout:
    """Layout of one buffer.

    Attributes:
        parameters (tuple[ParameterRange]): in buffer order.
        buckets (tuple[tuple[int, int]]): start and stop of each bucket; they touch and cover the buffer.
        numel (int): elements with padding.
        numel_unpadded (int): elements of the parameters.
    """

    parameters: tuple
    buckets: tuple
    numel: int
    numel_unpadded: int


def plan_buffer(sizes, bucket_size=None, parameter_alignment=1, bucket_alignment=1, alone=(), units=None):
    """Lay parameters out in a buffer.

    Args:
        sizes (list[int]): elements of each parameter, in module order.
        bucket_size (Optional[int]): a bucket ends once it holds this many elements; None for a single bucket.
        parameter_alignment (int): each parameter starts at a multiple of this.
        bucket_alignment (int): each bucket ends at a multiple of this.
        alone (Iterable[int]): indices of parameters that need a bucket of their own.
        units (Optional[list[int]]): a number of each parameter; a bucket holds parameters with the same.

    Returns:
        BufferLayout
    """
    alone = frozenset(alone)
    ranges, buckets = [], []
    position = bucket_start = held = 0

    def close_bucket():
        nonlocal position, bucket_start, held
        if held:
            position = _round_up(position, bucket_alignment)
            buckets.append((bucket_start, position))
            bucket_start, held = position, 0

    for index in range(len(sizes) - 1, -1, -1):
        changes_unit = units is not None and index + 1 < len(sizes) and units[index] != units[index + 1]
        if index in alone or changes_unit:
            close_bucket()
        start = _round_up(position, parameter_alignment)
        position = start + sizes[index]
        ranges.append(ParameterRange(index, start, position, len(buckets)))
        held += sizes[index]
        if index in alone or (bucket_size is not None and held >= bucket_size):
            close_bucket()
    close_bucket()
    return BufferLayout(tuple(ranges), tuple(buckets), position, sum(sizes))


def alignments(data_parallel_size, element_size, use_distributed_optimizer, enable_mem_align):
    """(parameter_alignment, bucket_alignment) in elements.

    The distributed optimizer's rules are those of Megatron's checkpoints: parameters at multiples of 64 elements,
    buckets at multiples of lcm(data-parallel size, 128). `enable_mem_align` adds 512 bytes per parameter and per shard.
    """
    parameter, bucket = (64, math.lcm(data_parallel_size, 128)) if use_distributed_optimizer else (1, 1)
    if enable_mem_align:
        elements = max(512 // element_size, 1)
        parameter = math.lcm(parameter, elements)
        bucket = math.lcm(bucket, elements * data_parallel_size)
    return parameter, bucket


def _round_up(number, divisor):
    return -(-number // divisor) * divisor
