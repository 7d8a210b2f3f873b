"""DistributedDataParallel: gradients of several micro-batches gather in flat buffers and are reduced once."""
import logging
from contextlib import contextmanager

import mindspore as ms
from mindspore import nn

from mindspeed_ms import ops
from mindspeed_ms.core import autograd, parallel_state, storage
from mindspeed_ms.core.distributed.param_and_grad_buffer import ParamAndGradBuffer

logger = logging.getLogger("mindspeed_ms")


class DistributedDataParallel(nn.Cell):
    """Wraps a model chunk: calls go through, gradients go to buffers. Source: Megatron core, upstream.

    After each backward a hook adds the parameter's gradient to `param.main_grad` and clears it. `finish_grad_sync`
    leaves the average over the data-parallel group there. Also without data parallelism: the optimizer works on the
    buffers.

    Args:
        config: the model's configuration; read: `gradient_accumulation_fusion` and `calculate_per_token_loss`
            (gradients are then summed, not averaged).
        ddp_config (DistributedDataParallelConfig): options.
        module (nn.Cell): the model chunk; its parameters' data move into the buffers.
        disable_bucketing (bool): one bucket, whatever `ddp_config` says (later pipeline stages and chunks).

    Raises:
        ValueError: the module has no parameter that requires a gradient.
    """

    def __init__(self, config, ddp_config, module, disable_bucketing=False):
        # without auto_prefix the parameters keep their state-dict keys
        super().__init__(auto_prefix=False)
        self.config = config
        self.ddp_config = ddp_config
        self.module = module
        self.is_last_microbatch = True
        self._data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.bucket_size = self._resolved_bucket_size(disable_bucketing)
        self.buffers = self._make_buffers()
        self._buffer_of = {id(param): buffer for buffer in self.buffers for param in buffer.params}
        # gradients fused into the backward add to main_grad by themselves and need zeros there
        self._zero_eagerly = bool(getattr(config, "gradient_accumulation_fusion", False))
        self._unwritten = set(self._buffer_of)
        self._hooks = [autograd.post_accumulate_hook(param, self._accumulate) for buffer in self.buffers
                       for param in buffer.params]
        self.broadcast_params()

    def _resolved_bucket_size(self, disable_bucketing):
        if disable_bucketing or not self.ddp_config.overlap_grad_reduce:
            return None
        return self.ddp_config.bucket_size or max(40_000_000, 1_000_000 * self._data_group.size)

    def _make_buffers(self):
        kinds = {}
        for name, param in self.module.parameters_and_names():
            if param.requires_grad:
                kinds.setdefault((param.dtype, self._grad_dtype(param), is_expert(param)), []).append((name, param))
        if not kinds:
            raise ValueError(f"{type(self.module).__name__} has no parameter that requires a gradient: nothing to "
                             "train.")
        factor = 1.0 if getattr(self.config, "calculate_per_token_loss", False) else 1.0 / self._data_group.size
        return [ParamAndGradBuffer(self.ddp_config, param_dtype, grad_dtype, named_params,
                                   parallel_state.get_expert_data_parallel_group() if expert else self._data_group,
                                   self.bucket_size, factor, expert)
                for (param_dtype, grad_dtype, expert), named_params in kinds.items()]

    def _grad_dtype(self, param):
        return ms.float32 if self.ddp_config.grad_reduce_in_fp32 else param.dtype

    def construct(self, *args, **kwargs):
        """The module's own construct."""
        return self.module(*args, **kwargs)

    def _accumulate(self, param):
        grad = autograd.tensor_grad(param)
        if grad is not None:
            autograd.set_grad(param, None)
            if id(param) in self._unwritten and not self._zero_eagerly:
                storage.write(param.main_grad, grad)
            elif not getattr(param, "grad_added_to_main_grad", False):
                ops.add_into(param.main_grad, grad)
        self._unwritten.discard(id(param))
        if self.ddp_config.overlap_grad_reduce and self.is_last_microbatch:
            self._buffer_of[id(param)].bucket_of(param).register_grad_ready(param)

    @contextmanager
    def no_sync(self):
        """Inside, backwards only accumulate: for all micro-batches but the last."""
        self.is_last_microbatch = False
        try:
            yield
        finally:
            self.is_last_microbatch = True

    def enable_sync(self, flag):
        """Upstream's form of `no_sync`: whether the next backward is the step's last."""
        self.is_last_microbatch = bool(flag)

    def zero_grad_buffer(self):
        """Start a step: gradients count from zero again.

        The memory is written by the first backward, not cleared here; parameters without a gradient are cleared in
        `start_grad_sync`.
        """
        for buffer in self.buffers:
            buffer.reset()
            if self._zero_eagerly:
                buffer.grad_buffer.zero()
        self._unwritten = set(self._buffer_of)

    def start_grad_sync(self, *unused):
        """Begin the reduction of all buckets that were not begun by a hook."""
        self._clear_unwritten()
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                bucket.start_grad_sync()

    def finish_grad_sync(self):
        """Leave the reduced gradients in every `main_grad`."""
        self._clear_unwritten()
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                bucket.finish_grad_sync()

    issue_grad_reduce = start_grad_sync
    final_grad_reduce = finish_grad_sync

    def _clear_unwritten(self):
        if self._unwritten and not self._zero_eagerly:
            for buffer in self.buffers:
                for param in buffer.params:
                    if id(param) in self._unwritten:
                        storage.zero(param.main_grad)
        self._unwritten = set()

    def scale_gradients(self, factor):
        """Multiply all gradients by a number."""
        for buffer in self.buffers:
            buffer.scale_gradients(factor)

    def broadcast_params(self):
        """Give every rank of a data-parallel group the parameters of the group's first rank."""
        for buffer in self.buffers:
            group = buffer.data_parallel_group
            if group.size > 1:
                group.broadcast_in_place(buffer.param_buffer.tensor, group.ranks[0])

    def set_input_tensor(self, input_tensor):
        """Hand the input of a later pipeline stage to the module."""
        self.module.set_input_tensor(input_tensor)

    @property
    def nbytes(self):
        """Bytes of all parameter and gradient buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)


def is_expert(param):
    """Whether a parameter belongs to an expert (its layer said so)."""
    return bool(getattr(param, "is_expert", False))


def unwrap_model(model):
    """The module inside DistributedDataParallel (or the cell itself); a list gives a list."""
    if isinstance(model, (list, tuple, nn.CellList)):
        return [unwrap_model(chunk) for chunk in model]
    return model.module if isinstance(model, DistributedDataParallel) else model
