"""ParamAndGradBuffer: flat buffers of parameters and gradients, cut into buckets.

Source: Megatron core, `param_and_grad_buffer.py`. Parameters and gradients of one kind have the same offsets, so an
optimizer works on ranges of both at once, and a shard of a bucket is a range too.
"""

from mindspeed_ms import ops
from mindspeed_ms.core import storage
from mindspeed_ms.core.device import dtype_name, dtype_size
from mindspeed_ms.core.distributed.bucket import Bucket
from mindspeed_ms.core.distributed.buffer_layout import alignments, plan_buffer
from mindspeed_ms.core.distributed.sharded_bucket import ShardedGradBucket, ShardedParamBucket
from mindspeed_ms.core.logging import logger
from mindspeed_ms.core.tensor_parallel.cell import description_of

__all__ = ["Bucket", "ParamAndGradBuffer"]


class ParamAndGradBuffer:
    """Parameters of one kind (dtype, gradient dtype, expert or not) of a model chunk and their gradients, in flat memory.

    The parameters' data move into the buffer; each gets `main_grad`, its slice of the gradient buffer in its own shape.
    A sharded buffer (`param_buffer`, `grad_buffer`) holds only this rank's parts of all buckets, one after another, and
    after the reduction `main_grad` is the parameter's piece of them.

    Args:
        ddp_config (DistributedDataParallelConfig): options.
        param_dtype, grad_dtype (mindspore dtype): of the two buffers.
        named_params (list[tuple[str, Parameter]]): in module order.
        data_parallel_group (ProcessGroup): ranks that hold the same parameters.
        bucket_size (Optional[int]): elements of a bucket; None for one bucket.
        gradient_scaling_factor (float): multiplies the gradients around the reduction.
        is_expert (bool): the parameters belong to experts.
        sharding (Optional[Sharding]): over which ranks optimizer, gradients and parameters are sharded.
        unit_of (Optional[Callable[[Parameter], int]]): number of the unit that a parameter is gathered with; a bucket
            holds parameters of one unit.

    Attributes:
        shapes (list[tuple[int]]): of the parameters in full.
    """

    def __init__(
        self,
        ddp_config,
        param_dtype,
        grad_dtype,
        named_params,
        data_parallel_group,
        bucket_size,
        gradient_scaling_factor,
        is_expert=False,
        sharding=None,
        unit_of=None,
    ):
        self.ddp_config = ddp_config
        self.param_dtype, self.grad_dtype = param_dtype, grad_dtype
        self.names = [name for name, _ in named_params]
        self.params = [param for _, param in named_params]
        self.shapes = [tuple(param.shape) for param in self.params]
        self.data_parallel_group = data_parallel_group
        self.gradient_scaling_factor = gradient_scaling_factor
        self.is_expert = is_expert
        self.sharding = sharding
        self.layout = self._plan(bucket_size, unit_of)
        shards = sharding.group.size if sharding is not None else 1
        held = self.layout.numel // (shards if ddp_config.shards_params else 1)
        self.param_buffer = storage.FlatBuffer(held, param_dtype)
        held = self.layout.numel // (shards if ddp_config.shards_grads else 1)
        self.grad_buffer = storage.FlatBuffer(held, grad_dtype)
        if not ddp_config.shards_params:
            self._move_parameters()
        self.buckets = [self._make_bucket(index) for index in range(len(self.layout.buckets))]
        self._bucket_of = {id(param): bucket for bucket in self.buckets for param in bucket.params}
        logger.debug(
            "buffer of %d %s parameters with %s gradients: %d elements (%d padding) in %d buckets",
            len(self.params),
            dtype_name(param_dtype),
            dtype_name(grad_dtype),
            self.layout.numel,
            self.layout.numel - self.layout.numel_unpadded,
            len(self.buckets),
        )

    def _plan(self, bucket_size, unit_of):
        config = self.ddp_config
        shared = [index for index, param in enumerate(self.params) if description_of(param).shared]
        alone = shared if config.shards_optimizer else []
        parameter_alignment, bucket_alignment = alignments(
            self.data_parallel_group.size, dtype_size(self.param_dtype), config.shards_optimizer, config.enable_mem_align
        )
        units = [unit_of(param) for param in self.params] if unit_of is not None else None
        return plan_buffer(
            [param.size for param in self.params], bucket_size, parameter_alignment, bucket_alignment, alone, units
        )

    def _move_parameters(self):
        for placed in self.layout.parameters:
            param = self.params[placed.index]
            data = self.param_buffer.slice(placed.start, placed.stop, param.shape)
            storage.write(data, param)
            storage.set_data(param, data)
            if not self.ddp_config.shards_grads:
                param.main_grad = self.grad_buffer.slice(placed.start, placed.stop, param.shape)
        self.broadcast(self.param_buffer.tensor)

    def broadcast(self, tensor):
        """Give every rank of the data-parallel group the values of the group's first rank."""
        if self.data_parallel_group.size > 1:
            self.data_parallel_group.broadcast_in_place(tensor, self.data_parallel_group.ranks[0])

    def _make_bucket(self, index):
        config = self.ddp_config
        kind = ShardedParamBucket if config.shards_params else ShardedGradBucket if config.shards_grads else Bucket
        return kind(
            self, index, [placed for placed in self.layout.parameters if placed.bucket == index], *self.layout.buckets[index]
        )

    def bucket_of(self, param):
        """Bucket of a parameter."""
        return self._bucket_of[id(param)]

    def names_of(self, params):
        """State-dict keys of parameters."""
        names = {id(param): name for name, param in zip(self.names, self.params)}
        return [names[id(param)] for param in params]

    def shard_ranges(self):
        """Ranges (start, stop) that this rank's optimizer updates: its part of each bucket, or the whole buffer."""
        if self.sharding is None:
            return [(0, self.layout.numel)]
        return [(bucket.shard_start, bucket.shard_stop) for bucket in self.buckets]

    def slice_param(self, start, stop, shape=None):
        """Tensor over parameters in a shard range; `start` and `stop` count elements of the whole buffer."""
        first = self._held(start, self.ddp_config.shards_params)
        return self.param_buffer.slice(first, first + stop - start, shape)

    def slice_grad(self, start, stop):
        """Tensor over reduced gradients in a shard range; see `slice_param`."""
        first = self._held(start, self.ddp_config.shards_grads)
        return self.grad_buffer.slice(first, first + stop - start)

    def _held(self, position, is_sharded):
        """Position, in the memory of this rank, of an element of the whole buffer."""
        if not is_sharded:
            return position
        bucket = next(bucket for bucket in self.buckets if bucket.shard_start <= position < bucket.shard_stop)
        return bucket.start // bucket.shard_size + position - bucket.shard_start

    def reset(self):
        """Forget this step's gradients without touching their memory."""
        for bucket in self.buckets:
            bucket.reset()

    def scale_gradients(self, factor):
        """Multiply all gradients by a number."""
        ops.scale_in_place(self.grad_buffer.tensor, factor)

    @property
    def nbytes(self):
        """Bytes of the parameter and the gradient buffer."""
        return self.param_buffer.nbytes + self.grad_buffer.nbytes
