"""Options of data parallelism."""
from dataclasses import dataclass


@dataclass
class DistributedDataParallelConfig:
    """Options of `DistributedDataParallel`. Source: Megatron core and upstream, whose names are kept.

    Attributes:
        grad_reduce_in_fp32 (bool): accumulate and reduce gradients in float32 whatever the parameters' dtype is.
        overlap_grad_reduce (bool): start the reduction of a bucket as soon as its last gradient has arrived.
        use_distributed_optimizer (bool): shard the optimizer; adds the padding that its shards need.
        bucket_size (Optional[int]): elements of a bucket; None: max(40e6, 1e6 * data-parallel size) with
            `overlap_grad_reduce`, one bucket without.
        average_in_collective (bool): divide by the group's size after the sum instead of before it.
        check_for_nan_in_grad (bool): look for NaN and infinity in each bucket before it is reduced.
        enable_mem_align (bool): start every parameter at a multiple of 512 bytes.
    """
    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    use_distributed_optimizer: bool = False
    bucket_size: int | None = None
    average_in_collective: bool = False
    check_for_nan_in_grad: bool = False
    enable_mem_align: bool = False

    def __post_init__(self):
        if self.bucket_size is not None and self.bucket_size <= 0:
            raise ValueError(f"bucket_size is {self.bucket_size}: expected a positive number of elements, or None.")
