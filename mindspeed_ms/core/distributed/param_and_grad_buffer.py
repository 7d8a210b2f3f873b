"""Flat memory for parameters and gradients, and the reduction of gradients bucket by bucket.

Source: Megatron core, `param_and_grad_buffer.py`. Parameters and gradients of one kind have the same offsets, so an
optimizer works on ranges of both at once, and a shard of a bucket is a range too.
"""
import logging
import math

from mindspeed_ms import ops
from mindspeed_ms.core import storage
from mindspeed_ms.core.device import dtype_name, dtype_size
from mindspeed_ms.core.distributed.buffer_layout import alignments, plan_buffer

logger = logging.getLogger("mindspeed_ms")


class Bucket:
    """A range of a buffer whose gradients are reduced together.

    Attributes:
        index (int): number of the bucket in its buffer.
        params (list[Parameter]): the parameters in it, in buffer order.
        start, stop (int): its range in the buffer.
        grad_data, param_data (Tensor): flat, over the buffers' memory.
    """

    def __init__(self, buffer, index, params, start, stop):
        self.buffer = buffer
        self.index = index
        self.params = params
        self.start, self.stop = start, stop
        self.grad_data = buffer.grad_buffer.slice(start, stop)
        self.param_data = buffer.param_buffer.slice(start, stop)
        self.reset()

    def reset(self):
        """Forget this step's gradients; no reduction may be under way."""
        self._ready = set()
        self._handle = None
        self._started = self._finished = False

    def register_grad_ready(self, param):
        """Note that the last gradient of the step arrived; the last parameter of the bucket starts the reduction."""
        self._ready.add(id(param))
        if len(self._ready) == len(self.params):
            self.start_grad_sync()

    def start_grad_sync(self):
        """Begin to sum the gradients over the data-parallel group (asynchronously with `overlap_grad_reduce`)."""
        if self._started:
            return
        self._started = True
        buffer, config = self.buffer, self.buffer.ddp_config
        if config.check_for_nan_in_grad:
            self._check_finite()
        if not config.average_in_collective and buffer.gradient_scaling_factor != 1.0:
            ops.scale_in_place(self.grad_data, buffer.gradient_scaling_factor)
        if buffer.data_parallel_group.size > 1:
            self._handle = buffer.data_parallel_group.all_reduce_in_place(
                self.grad_data, op="sum", async_op=config.overlap_grad_reduce)

    def finish_grad_sync(self):
        """Wait until `grad_data` holds the reduced gradients; starts the reduction if nothing did."""
        if self._finished:
            return
        self.start_grad_sync()
        self._finished = True
        buffer = self.buffer
        if self._handle is not None and hasattr(self._handle, "wait"):
            self._handle.wait()
        self._handle = None
        if buffer.ddp_config.average_in_collective and buffer.gradient_scaling_factor != 1.0:
            ops.scale_in_place(self.grad_data, buffer.gradient_scaling_factor)

    def _check_finite(self):
        if not math.isfinite(ops.sum_of_squares(self.grad_data)):
            names = [name for name, param in zip(self.buffer.names_of(self.params), self.params)
                     if not math.isfinite(ops.sum_of_squares(param.main_grad))]
            group = self.buffer.data_parallel_group
            raise RuntimeError(
                f"rank {group.ranks[group.rank]} found NaN or infinity in its local gradients of "
                f"{', '.join(names[:5])}{' and others' if len(names) > 5 else ''} before the data-parallel reduction "
                "(check_for_nan_in_grad). Lower the learning rate or the loss scale, or look at this iteration's "
                "batch.")


class ParamAndGradBuffer:
    """All parameters of one kind (dtype, gradient dtype, expert or not) of a model chunk, and their gradients.

    The parameters' data move into the buffer; each gets `main_grad`, its slice of the gradient buffer in its own shape.

    Args:
        ddp_config (DistributedDataParallelConfig): options.
        param_dtype, grad_dtype (mindspore dtype): of the two buffers.
        named_params (list[tuple[str, Parameter]]): in module order.
        data_parallel_group (ProcessGroup): ranks that hold the same parameters.
        bucket_size (Optional[int]): elements of a bucket; None for one bucket.
        gradient_scaling_factor (float): multiplies the gradients around the reduction.
        is_expert (bool): the parameters belong to experts.
    """

    def __init__(self, ddp_config, param_dtype, grad_dtype, named_params, data_parallel_group, bucket_size,
                 gradient_scaling_factor, is_expert=False):
        self.ddp_config = ddp_config
        self.param_dtype, self.grad_dtype = param_dtype, grad_dtype
        self.names = [name for name, _ in named_params]
        self.params = [param for _, param in named_params]
        self.data_parallel_group = data_parallel_group
        self.gradient_scaling_factor = gradient_scaling_factor
        self.is_expert = is_expert
        alone = [index for index, param in enumerate(self.params)
                 if ddp_config.use_distributed_optimizer and getattr(param, "shared_embedding", False)]
        parameter_alignment, bucket_alignment = alignments(
            data_parallel_group.size, dtype_size(param_dtype), ddp_config.use_distributed_optimizer,
            ddp_config.enable_mem_align)
        self.layout = plan_buffer([param.size for param in self.params], bucket_size, parameter_alignment,
                                  bucket_alignment, alone)
        self.param_buffer = storage.FlatBuffer(self.layout.numel, param_dtype)
        self.grad_buffer = storage.FlatBuffer(self.layout.numel, grad_dtype)
        self._move_parameters()
        self.buckets = [self._make_bucket(index) for index in range(len(self.layout.buckets))]
        self._bucket_of = {id(param): bucket for bucket in self.buckets for param in bucket.params}
        logger.debug("buffer of %d %s parameters with %s gradients: %d elements (%d padding) in %d buckets",
                     len(self.params), dtype_name(param_dtype), dtype_name(grad_dtype), self.layout.numel,
                     self.layout.numel - self.layout.numel_unpadded, len(self.buckets))

    def _move_parameters(self):
        for placed in self.layout.parameters:
            param = self.params[placed.index]
            data = self.param_buffer.slice(placed.start, placed.stop, param.shape)
            storage.write(data, param)
            storage.set_data(param, data)
            param.main_grad = self.grad_buffer.slice(placed.start, placed.stop, param.shape)

    def _make_bucket(self, index):
        params = [self.params[placed.index] for placed in self.layout.parameters if placed.bucket == index]
        return Bucket(self, index, params, *self.layout.buckets[index])

    def bucket_of(self, param):
        """The bucket that holds this parameter."""
        return self._bucket_of[id(param)]

    def names_of(self, params):
        """State-dict keys of these parameters."""
        names = {id(param): name for name, param in zip(self.names, self.params)}
        return [names[id(param)] for param in params]

    def reset(self):
        """Forget this step's gradients without touching their memory."""
        for bucket in self.buckets:
            bucket.reset()

    def scale_gradients(self, factor):
        """Multiply all gradients by a number."""
        ops.scale_in_place(self.grad_buffer.tensor, factor)

    @property
    def nbytes(self):
        """Bytes of both buffers."""
        return self.param_buffer.nbytes + self.grad_buffer.nbytes
