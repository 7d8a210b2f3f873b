"""Buckets of ZeRO levels z2 and z3: a rank holds only its part of the gradients (z2), and of the parameters too (z3)."""

from mindspeed_ms import ops
from mindspeed_ms.core import storage
from mindspeed_ms.core.distributed.bucket import Bucket


class ShardedGradBucket(Bucket):
    """Bucket of ZeRO z2: keeps this rank's part of the gradients; full ones exist from a backward until their reduction.

    Each micro-batch's gradients are reduce-scattered and accumulated in this rank's part; with
    `allreduce_after_grad_accumulation` they are first accumulated in full.

    Attributes:
        grad_bytes (int): bytes of the gradients in full that exist now.
    """

    def _take_memory(self):
        buffer = self.buffer
        self._take_param_memory()
        self._place_of = {id(param): placed for param, placed in zip(self.params, self.places)}
        first = self.start // self.shard_size
        self._grad_shard = buffer.grad_buffer.slice(first, first + self.shard_stop - self.shard_start)

    def _take_param_memory(self):
        buffer = self.buffer
        self.param_data = buffer.param_buffer.slice(self.start, self.stop)
        self._param_shard = buffer.param_buffer.slice(self.shard_start, self.shard_stop)

    def reset(self):
        """Forget this step's gradients; no reduction may be under way."""
        self._ready = set()
        self.non_finite = []
        self._whole, self._grads = None, {}
        self._pending = None
        self._has_sum = self._finished = False
        for param in self.params:
            param.main_grad = None

    @property
    def grad_bytes(self):
        """Bytes of full gradients that exist now."""
        buffers = [self._whole, self._pending[2] if self._pending else None]
        return sum(buffer.nbytes for buffer in buffers if buffer is not None)

    def add_grad(self, param, grad, reduces):
        """Add the gradient of a backward; with `reduces` the bucket's last parameter starts the reduction."""
        if self._whole is None:
            self._whole = storage.FlatBuffer(self.stop - self.start, self.buffer.grad_dtype)
        if id(param) in self._grads:
            ops.add_into(self._grads[id(param)], grad)
        else:
            placed = self._place_of[id(param)]
            view = self._whole.slice(placed.start - self.start, placed.stop - self.start)
            storage.write(view, grad)
            self._grads[id(param)] = view
        if reduces:
            self._ready.add(id(param))
            if len(self._ready) == len(self.params):
                self._reduce()

    def _reduce(self):
        """Reduce-scatter the full gradients over the shards' group and add the result to this rank's part."""
        self._finish_pending()
        buffer, config = self.buffer, self.buffer.ddp_config
        whole = self._whole or storage.FlatBuffer(self.stop - self.start, buffer.grad_dtype)
        if config.check_for_nan_in_grad:
            self._check_finite(self._grads, whole.tensor)
        if not config.average_in_collective and buffer.gradient_scaling_factor != 1.0:
            ops.scale_in_place(whole.tensor, buffer.gradient_scaling_factor)
        if self.shard_size == 1:
            handle, part = None, whole.tensor
        else:
            part = storage.FlatBuffer(self._grad_shard.size, buffer.grad_dtype).tensor
            handle = self._reduce_scatter(part, whole.tensor)
        self._pending = handle, part, whole
        self._whole, self._grads, self._ready = None, {}, set()
        if not config.overlap_grad_reduce:
            self._finish_pending()

    def _finish_pending(self):
        if self._pending is None:
            return
        handle, part, _ = self._pending
        self._wait(handle, "reduced the gradients")
        if self._has_sum:
            ops.add_into(self._grad_shard, part)
        else:
            storage.write(self._grad_shard, part)
        self._has_sum, self._pending = True, None

    def start_grad_sync(self):
        """Do nothing: reductions start as gradients arrive, the rest in `finish_grad_sync`."""

    def finish_grad_sync(self):
        """Complete this rank's part; each parameter's `main_grad` becomes its piece of it (flat, maybe empty)."""
        if self._finished:
            return
        self._finished = True
        if self._whole is not None or (self._pending is None and not self._has_sum):
            self._reduce()
        self._finish_pending()
        self._finish_reduction(self._grad_shard)
        nothing = storage.FlatBuffer(0, self.buffer.grad_dtype).tensor
        for param, placed in zip(self.params, self.places):
            start, stop = max(placed.start, self.shard_start), min(placed.stop, self.shard_stop)
            first = start - self.shard_start + self.start // self.shard_size
            param.main_grad = self.buffer.grad_buffer.slice(first, first + stop - start) if start < stop else nothing


class ShardedParamBucket(ShardedGradBucket):
    """Bucket of ZeRO z3: parameters too exist in full only while a forward or backward needs them.

    Attributes:
        param_bytes (int): bytes of the parameters in full that exist now.
    """

    def _take_param_memory(self):
        first = self.start // self.shard_size
        self._param_shard = self.buffer.param_buffer.slice(first, first + self.shard_stop - self.shard_start)
        self._whole_params = self._new_whole()
        for param, view in self._views():
            storage.write(view, param)
            storage.set_data(param, view)
        self._is_placed = True
        self.broadcast_params()
        self.keep_params()
        self.release_params()

    def _new_whole(self):
        return storage.FlatBuffer(self.stop - self.start, self.buffer.param_dtype)

    def _views(self):
        """(parameter, its part of the full memory) of all parameters."""
        for param, placed in zip(self.params, self.places):
            yield (
                param,
                self._whole_params.slice(placed.start - self.start, placed.stop - self.start, self.buffer.shapes[placed.index]),
            )

    @property
    def param_bytes(self):
        """Bytes of full parameters that exist now."""
        return self._whole_params.nbytes if self._whole_params is not None else 0

    def start_param_gather(self, async_op=False):
        """All-gather the ranks' parts into new memory; `finish_param_gather` puts it under the parameters."""
        if self._whole_params is not None:
            return
        whole = self._new_whole()
        if self.shard_size > 1:
            self._gathering = self._gather_into(whole.tensor, async_op)
        else:
            storage.write(whole.tensor, self._param_shard)
        self._whole_params, self._is_placed = whole, False

    def finish_param_gather(self):
        """Wait for the gather (start it if nothing did), and put its memory under the parameters."""
        self.start_param_gather()
        if self._is_placed:
            return
        super().finish_param_gather()
        for param, view in self._views():
            storage.set_data(param, view)
        self._is_placed = True

    def broadcast_params(self):
        """Broadcast the full parameters of the data-parallel group's first rank."""
        self.buffer.broadcast(self._whole_params.tensor)

    def keep_params(self):
        """Copy this rank's part from the full parameters after a change of them."""
        first = self.shard_start - self.start
        storage.write(self._param_shard, self._whole_params.slice(first, first + self._param_shard.size))

    def release_params(self):
        """Release the full parameters."""
        if self._whole_params is None:
            return
        if self._gathering is not None:
            self.finish_param_gather()
        for param in self.params:
            storage.release(param)
        self._whole_params, self._is_placed = None, False
