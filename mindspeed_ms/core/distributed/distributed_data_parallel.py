"""DistributedDataParallel: gradients of several micro-batches are accumulated in flat buffers and reduced once."""

from contextlib import contextmanager

import mindspore as ms

from mindspeed_ms import ops
from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core import autograd, parallel_state, storage
from mindspeed_ms.core.distributed.interface import ShardedModel
from mindspeed_ms.core.distributed.param_and_grad_buffer import ParamAndGradBuffer
from mindspeed_ms.core.distributed.param_gather import OverlappedParamGather
from mindspeed_ms.core.distributed.sharded_units import ShardedUnits
from mindspeed_ms.core.distributed.sharding import make_sharding
from mindspeed_ms.core.tensor_parallel.cell import description_of


class DistributedDataParallel(ShardedModel):
    """Wraps a model chunk: calls go through, gradients go to buffers. Source: Megatron core, upstream.

    After each backward a hook adds the parameter's gradient to `param.main_grad` and clears it. `finish_grad_sync`
    leaves the average over the data-parallel group there. Also without data parallelism: the optimizer works on the
    buffers. With the distributed optimizer or a ZeRO level this rank gets the average of its part only, and with z2 and
    z3 holds nothing else; `whole_parameters` gives access to parameters that are sharded.

    Args:
        config: TransformerConfig, AllConfig or ModelDescription, which schedules with several stages need; None without.
            `calculate_per_token_loss` and `gradient_accumulation_fusion` count where this or `ddp_config` has them.
        ddp_config (DistributedDataParallelConfig): options.
        module (nn.Cell): the model chunk; its parameters' data move into the buffers.
        disable_bucketing (bool): one bucket, whatever `ddp_config` says (later pipeline stages and chunks).

    Raises:
        ValueError: the module is the whole model and has no parameter that requires a gradient.
    """

    def __init__(self, config, ddp_config, module, disable_bucketing=False):
        description = describe_model(config) if config is not None else None
        per_token = description is not None and description.calculate_per_token_loss
        super().__init__(module, description, per_token or ddp_config.calculate_per_token_loss)
        self.ddp_config = ddp_config
        self.is_last_microbatch = True
        self._data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.bucket_size = self._resolved_bucket_size(disable_bucketing)
        self._units = ShardedUnits(module, ddp_config) if ddp_config.shards_params else None
        # before the buffers may release the parameters
        self._hooks = [
            autograd.post_accumulate_hook(param, self._accumulate) for param in module.get_parameters() if param.requires_grad
        ]
        self.buffers = self._make_buffers()
        self._buffer_of = {id(param): buffer for buffer in self.buffers for param in buffer.params}
        self._param_gather = None
        if self._units is not None:
            self._units.attach(self.buffers)
        elif ddp_config.overlap_param_gather:
            self._param_gather = OverlappedParamGather(module, self.buffers)
        # gradients fused into the backward add to main_grad by themselves and need zeros there; where gradients are
        # sharded there is no main_grad then, and nothing is fused
        is_fused = description is not None and description.parallel.gradient_accumulation_fusion
        self._zero_eagerly = (is_fused or ddp_config.gradient_accumulation_fusion) and not ddp_config.shards_grads
        self._unwritten = set(self._buffer_of)

    def _resolved_bucket_size(self, disable_bucketing):
        config = self.ddp_config
        if (disable_bucketing or not config.overlap_grad_reduce) and not config.shards_grads:
            return None
        return self.ddp_config.bucket_size or max(40_000_000, 1_000_000 * self._data_group.size)

    def _make_buffers(self):
        kinds = {}
        for name, param in self.module.parameters_and_names():
            if param.requires_grad:
                kind = param.dtype, self._grad_dtype(param), description_of(param).expert
                kinds.setdefault(kind, []).append((name, param))
        # a pipeline stage may hold nothing but no-op layers
        if not kinds and parallel_state.get_pipeline_model_parallel_world_size() == 1:
            raise ValueError(f"{type(self.module).__name__} has no parameter that requires a gradient: nothing to train.")
        sums = self.calculate_per_token_loss or self.ddp_config.sum_gradients
        factor = 1.0 if sums else 1.0 / self._data_group.size
        groups = {
            expert: parallel_state.get_expert_data_parallel_group() if expert else self._data_group
            for expert in sorted({expert for _, _, expert in kinds})
        }
        shardings = {expert: make_sharding(self.ddp_config, group) for expert, group in groups.items()}
        return [
            ParamAndGradBuffer(
                self.ddp_config,
                param_dtype,
                grad_dtype,
                named_params,
                groups[expert],
                self.bucket_size,
                factor,
                expert,
                shardings[expert],
                self._units.unit_of if self._units is not None else None,
            )
            for (param_dtype, grad_dtype, expert), named_params in kinds.items()
        ]

    def _grad_dtype(self, param):
        return ms.float32 if self.ddp_config.grad_reduce_in_fp32 else param.dtype

    def construct(self, *args, **kwargs):
        """The module's own construct, with the parameters that it needs."""
        if self._units is not None:
            self._units.begin_forward()
            output = self.module(*args, **kwargs)
            self._units.end_forward(output)
            return output
        if self._param_gather is not None:
            self._param_gather.begin_forward()
            output = self.module(*args, **kwargs)
            self._param_gather.end_forward()
            return output
        return super().construct(*args, **kwargs)

    def _accumulate(self, param):
        grad = autograd.tensor_grad(param)
        if self.ddp_config.shards_grads:
            self._accumulate_sharded(param, grad)
            return
        if grad is not None:
            autograd.set_grad(param, None)
            if id(param) in self._unwritten and not self._zero_eagerly:
                storage.write(param.main_grad, grad)
            elif not getattr(param, "grad_added_to_main_grad", False):
                ops.add_into(param.main_grad, grad)
        self._unwritten.discard(id(param))
        if self.ddp_config.overlap_grad_reduce and self.is_last_microbatch:
            self._buffer_of[id(param)].bucket_of(param).register_grad_ready(param)

    def _accumulate_sharded(self, param, grad):
        if grad is None:
            return
        autograd.set_grad(param, None)
        bucket = self._buffer_of[id(param)].bucket_of(param)
        bucket.add_grad(param, grad, self.is_last_microbatch or not self.ddp_config.allreduce_after_grad_accumulation)
        if self._units is not None:
            self._units.grad_arrived(param, bucket)

    @contextmanager
    def no_sync(self):
        """Context manager: backwards only accumulate, for all micro-batches but the last."""
        self.is_last_microbatch = False
        try:
            yield
        finally:
            self.is_last_microbatch = True

    def enable_sync(self, flag):
        """Upstream's form of `no_sync`: whether the next backward is the step's last."""
        self.is_last_microbatch = bool(flag)

    def zero_grad_buffer(self):
        """Start a step: reset the gradients to zero.

        The memory is written by the first backward, not cleared here; parameters without a gradient are cleared in
        `start_grad_sync`.
        """
        for buffer in self.buffers:
            buffer.reset()
            if self._zero_eagerly:
                buffer.grad_buffer.zero()
        self._unwritten = set(self._buffer_of)

    def non_finite_gradients(self):
        """Names of the parameters whose local gradients of this step held NaN or infinity (`check_for_nan_in_grad`)."""
        return [name for buffer in self.buffers for bucket in buffer.buckets for name in bucket.non_finite]

    def start_grad_sync(self, *unused):
        """Start the reduction of all buckets that no hook has started."""
        self._clear_unwritten()
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                bucket.start_grad_sync()

    def finish_grad_sync(self):
        """Complete the reductions: every `main_grad` holds the reduced gradients (of this rank's part if they are sharded)."""
        self._clear_unwritten()
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                bucket.finish_grad_sync()
        if self._units is not None:
            self._units.release_all()

    issue_grad_reduce = start_grad_sync
    final_grad_reduce = finish_grad_sync

    def _clear_unwritten(self):
        if self._unwritten and not self._zero_eagerly and not self.ddp_config.shards_grads:
            for buffer in self.buffers:
                for param in buffer.params:
                    if id(param) in self._unwritten:
                        storage.zero(param.main_grad)
        self._unwritten = set()

    def scale_gradients(self, factor):
        """Multiply all gradients by a number."""
        for buffer in self.buffers:
            buffer.scale_gradients(factor)

    # ---- parameters after an update, and in full ---------------------------------------------------------------------

    def start_param_sync(self):
        """All-gather the updated shards of parameters that are held in full.

        With `overlap_param_gather` they are complete after `finish_param_sync` only, which the next forward calls as it
        needs them.
        """
        if not self.ddp_config.shards_optimizer or self._units is not None:
            return
        if self._param_gather is not None:
            self._param_gather.start()
            return
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                bucket.start_param_gather()
                bucket.finish_param_gather()

    def finish_param_sync(self):
        """Wait until parameters that are held in full are up to date; all data-parallel ranks call it."""
        if self._param_gather is not None:
            self._param_gather.finish()

    @contextmanager
    def whole_parameters(self, changes=False):
        """Context manager: every parameter is up to date and in full; all data-parallel ranks enter together.

        Args:
            changes (bool): values are written inside: ranks keep their parts of them.
        """
        self.finish_param_sync()
        if self._units is None:
            yield
            return
        self._units.gather_all()
        try:
            yield
            if changes:
                for buffer in self.buffers:
                    for bucket in buffer.buckets:
                        bucket.keep_params()
        finally:
            self._units.release_all()

    def broadcast_params(self):
        """Give every rank of a data-parallel group the parameters of the group's first rank."""
        with self.whole_parameters(changes=True):
            for buffer in self.buffers:
                if self._units is None:
                    buffer.broadcast(buffer.param_buffer.tensor)
                for bucket in buffer.buckets if self._units is not None else ():
                    bucket.broadcast_params()

    def parameter_pieces(self):
        """See `ShardedModel`: with z3, all that are trained."""
        pieces = {}
        for buffer in self.buffers if self._units is not None else ():
            for placed in buffer.layout.parameters:
                held = []
                for shard_start, shard_stop in buffer.shard_ranges():
                    start, stop = max(placed.start, shard_start), min(placed.stop, shard_stop)
                    if start < stop:
                        held.append((start - placed.start, stop - placed.start, buffer.slice_param(start, stop)))
                pieces[id(buffer.params[placed.index])] = buffer.shapes[placed.index], held
        return pieces

    def replicas(self):
        """See `ShardedModel`: one entry per buffer; ranks whose parameters are sharded hold the same as their replicas only."""
        return [
            (buffer.data_parallel_group if self._units is None else buffer.sharding.replicas, buffer.param_buffer.tensor)
            for buffer in self.buffers
        ]

    @property
    def whole_nbytes(self):
        """Bytes of sharded parameters and gradients that exist in full now."""
        return sum(
            getattr(bucket, "param_bytes", 0) + getattr(bucket, "grad_bytes", 0)
            for buffer in self.buffers
            for bucket in buffer.buckets
        )

    @property
    def nbytes(self):
        """Bytes of all parameter and gradient buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)
