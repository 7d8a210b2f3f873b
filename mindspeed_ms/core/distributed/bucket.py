"""Bucket: a range of a gradient and parameter buffer that is communicated at once."""

import math
from contextlib import contextmanager

from mindspeed_ms import ops
from mindspeed_ms.core.comm.errors import MismatchError

_NAMES = 3  # that an error lists


class Bucket:
    """Bucket with full parameters and gradients: a range of a buffer whose gradients are reduced together.

    With a sharding the gradients are reduced into this rank's part of `grad_data`, the rest of it is then meaningless,
    and `param_data` is gathered from the ranks' parts after the update.

    Attributes:
        index (int): number of the bucket in its buffer.
        params (list[Parameter]): the parameters in it, in buffer order.
        start, stop (int): its range in the buffer.
        shard_start, shard_stop (int): this rank's part, in elements of the buffer; all without a sharding.
        grad_data, param_data (Tensor): flat, over the buffers' memory.
    """

    def __init__(self, buffer, index, places, start, stop):
        self.buffer = buffer
        self.index = index
        self.places = places
        self.params = [buffer.params[placed.index] for placed in places]
        self.start, self.stop = start, stop
        sharding = buffer.sharding
        self.shard_size = sharding.group.size if sharding is not None else 1
        numel = (stop - start) // self.shard_size
        self.shard_start = start + (sharding.group.rank * numel if sharding is not None else 0)
        self.shard_stop = self.shard_start + numel
        self._gathering = None
        self._take_memory()
        self.reset()

    def _take_memory(self):
        buffer = self.buffer
        self.grad_data = buffer.grad_buffer.slice(self.start, self.stop)
        self.param_data = buffer.param_buffer.slice(self.start, self.stop)
        self._grad_shard = buffer.grad_buffer.slice(self.shard_start, self.shard_stop)
        self._param_shard = buffer.param_buffer.slice(self.shard_start, self.shard_stop)

    def reset(self):
        """Forget this step's gradients; no reduction may be under way."""
        self._ready = set()
        self.non_finite = []
        self._handle = None
        self._started = self._finished = False

    # ---- gradients ----------------------------------------------------------------------------------------------------

    def register_grad_ready(self, param):
        """Note that the last gradient of the step has arrived for a parameter; the bucket's last one starts the reduction."""
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
            self._check_finite({id(param): param.main_grad for param in self.params}, self.grad_data)
        if not config.average_in_collective and buffer.gradient_scaling_factor != 1.0:
            ops.scale_in_place(self.grad_data, buffer.gradient_scaling_factor)
        if buffer.sharding is not None:
            self._handle = self._reduce_scatter(self._grad_shard, self.grad_data)
        elif buffer.data_parallel_group.size > 1:
            with self._explained("reduced the gradients"):
                self._handle = buffer.data_parallel_group.all_reduce_in_place(
                    self.grad_data, op="sum", async_op=config.overlap_grad_reduce
                )

    def finish_grad_sync(self):
        """Wait for the reduction of the gradients; start it first if nothing did."""
        if self._finished:
            return
        self.start_grad_sync()
        self._finished = True
        self._wait(self._handle, "reduced the gradients")
        self._handle = None
        self._finish_reduction(self._grad_shard)

    def _reduce_scatter(self, part, whole):
        """Sum `whole` over the shards' group into `part`; returns a handle with `overlap_grad_reduce`."""
        if self.shard_size == 1:
            return None
        with self._explained("reduced the gradients"):
            return self.buffer.sharding.group.reduce_scatter_into(
                part, whole, op="sum", async_op=self.buffer.ddp_config.overlap_grad_reduce
            )

    def _finish_reduction(self, reduced):
        """Complete a reduction after that inside the shards' group: sum over the replicas, average."""
        buffer = self.buffer
        if buffer.sharding is not None and buffer.sharding.replicas.size > 1:
            with self._explained("reduced the gradients"):
                buffer.sharding.replicas.all_reduce_in_place(reduced, op="sum")
        if buffer.ddp_config.average_in_collective and buffer.gradient_scaling_factor != 1.0:
            ops.scale_in_place(reduced, buffer.gradient_scaling_factor)

    def _check_finite(self, grads, whole):
        """Note the parameters whose local gradients hold NaN or infinity; an exception here would leave the peers waiting."""
        if not math.isfinite(ops.sum_of_squares(whole)):
            self.non_finite += [
                name
                for name, param in zip(self.buffer.names_of(self.params), self.params)
                if id(param) in grads and not math.isfinite(ops.sum_of_squares(grads[id(param)]))
            ]

    # ---- parameters ---------------------------------------------------------------------------------------------------

    def start_param_gather(self, async_op=False):
        """All-gather the updated parameters of all ranks' shards into `param_data`."""
        if self.shard_size > 1 and self._gathering is None:
            self._gathering = self._gather_into(self.param_data, async_op)

    def _gather_into(self, whole, async_op):
        """All-gather the ranks' parts into `whole`; returns a handle with `async_op`."""
        with self._explained("gathered the parameters"):
            return self.buffer.sharding.group.all_gather_into(whole, self._param_shard, async_op=async_op)

    def finish_param_gather(self):
        """Wait until `param_data` is up to date."""
        self._wait(self._gathering, "gathered the parameters")
        self._gathering = None

    # ---- communication ------------------------------------------------------------------------------------------------

    def _wait(self, handle, action):
        """Wait for an asynchronous call; does nothing for a synchronous one, which returned a tensor."""
        if hasattr(handle, "wait"):
            with self._explained(action):
                handle.wait()

    @contextmanager
    def _explained(self, action):
        """Context manager: add this rank's action and the likely cause to a MismatchError."""
        try:
            yield
        except MismatchError as error:
            names = self.buffer.names_of(self.params)
            more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
            raise type(error)(
                f"{error} Here this rank {action} of bucket {self.index} ({', '.join(names[:_NAMES])}{more}). If the ranks' "
                "models and options are the same, they may have used different parameters in this step: all data-parallel "
                "ranks must use the same, multiplied by zero where they do not count."
            ) from error
