"""DistributedDataParallelConfig: options of data parallelism."""

from dataclasses import dataclass

from mindspeed_ms.config.sections.parallel import ZERO_LEVELS


@dataclass
class DistributedDataParallelConfig:
    """Options of `DistributedDataParallel`, under the names of Megatron core and upstream.

    Attributes:
        grad_reduce_in_fp32 (bool): accumulate and reduce gradients in float32 whatever the parameters' dtype is.
        overlap_grad_reduce (bool): start the reduction of a bucket as soon as its last gradient has arrived.
        use_distributed_optimizer (bool): shard the optimizer over the data-parallel group; the same as level z1.
        bucket_size (Optional[int]): elements of a bucket; None: max(40e6, 1e6 * data-parallel size) with
            `overlap_grad_reduce` or sharded gradients, one bucket without.
        average_in_collective (bool): divide by the group's size after the sum instead of before it.
        check_for_nan_in_grad (bool): look for NaN and infinity in each bucket before it is reduced.
        enable_mem_align (bool): start every parameter at a multiple of 512 bytes.
        overlap_param_gather (bool): gather updated parameters while the next forward runs; with z3, gather the next
            unit's while this one computes.
        zero_level (Optional[str]): what each rank holds only its part of: optimizer state (z1), gradients too (z2),
            parameters too (z3).
        zero_shard_size (Optional[int]): shard inside groups of this many neighbouring ranks of the data-parallel group,
            which hold equal shards; None: over the whole group.
        allreduce_after_grad_accumulation (bool): with z2 and z3 reduce once a step instead of after each micro-batch:
            one reduction and the same bits as z1, but gradients in full until then.
        param_resident (bool): with z3 keep parameters in full from the forward to the last backward of the step.
        unit_modules (Optional[sequence]): with z3, the cells that are gathered and released as one: names with wildcards
            ("*.layers.*") or classes; None: the layers of all lists of layers.
        calculate_per_token_loss (bool): losses are sums over tokens; see `ShardedModel`.
        gradient_accumulation_fusion (bool): linear layers add their weights' gradients to `main_grad` by themselves.
        sum_gradients (bool): sum the gradients of the data-parallel ranks instead of averaging them.
    """

    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    use_distributed_optimizer: bool = False
    bucket_size: int | None = None
    average_in_collective: bool = False
    check_for_nan_in_grad: bool = False
    enable_mem_align: bool = False
    overlap_param_gather: bool = False
    zero_level: str | None = None
    zero_shard_size: int | None = None
    allreduce_after_grad_accumulation: bool = False
    param_resident: bool = False
    unit_modules: tuple | None = None
    calculate_per_token_loss: bool = False
    gradient_accumulation_fusion: bool = False
    sum_gradients: bool = False

    def __post_init__(self):
        if self.bucket_size is not None and self.bucket_size <= 0:
            raise ValueError(f"bucket_size is {self.bucket_size}: expected a positive number of elements, or None.")
        if self.zero_level not in (None, *ZERO_LEVELS):
            raise ValueError(f"zero_level is {self.zero_level!r}: expected one of {', '.join(ZERO_LEVELS)}, or None.")
        if not self.shards_optimizer:
            for name in ("overlap_param_gather", "zero_shard_size"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} is {getattr(self, name)}, but nothing is sharded: set use_distributed_optimizer or zero_level."
                    )
        if self.allreduce_after_grad_accumulation and not self.shards_grads:
            raise ValueError(
                "allreduce_after_grad_accumulation is set: without zero_level z2 or z3 the reduction always "
                "comes after the accumulation; leave it out."
            )
        if self.param_resident and not self.shards_params:
            raise ValueError("param_resident is set: parameters are always resident without zero_level z3; leave it out.")
        if self.unit_modules is not None and not self.shards_params:
            raise ValueError(f"unit_modules is {self.unit_modules!r}: units exist with zero_level z3 only; leave it out.")

    @property
    def shards_optimizer(self):
        """Whether ranks hold parts of the optimizer state."""
        return self.use_distributed_optimizer or self.zero_level is not None

    @property
    def shards_grads(self):
        """Whether ranks hold parts of the gradients."""
        return self.zero_level in ("z2", "z3")

    @property
    def shards_params(self):
        """Whether ranks hold parts of the parameters."""
        return self.zero_level == "z3"
