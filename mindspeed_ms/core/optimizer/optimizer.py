"""MegatronOptimizer: optimizer of a model whose parameters and gradients lie in flat buffers.

Source: Megatron core, `optimizer.py`: names and order of a step (unscale, look for infinities, norm, clip, update,
round the masters). Unscaling and clipping are one factor inside the update, the norm is one pass.
"""

from contextlib import ExitStack

from mindspeed_ms.core.optimizer.clip_grads import ModelStatistics, clip_by_value, clip_coefficient
from mindspeed_ms.core.optimizer.grad_scaler import get_grad_scaler
from mindspeed_ms.core.optimizer.param_groups import get_param_groups
from mindspeed_ms.core.optimizer.shard import OptimizerShard
from mindspeed_ms.core.optimizer.update_rule import update_rule


class MegatronOptimizer:
    """Optimizer of model chunks that `DistributedDataParallel` wraps.

    Half-precision parameters have float32 masters, which are updated and rounded into them (Megatron's
    `Float16OptimizerWithFloat16Params`); float32 parameters are updated themselves.

    Args:
        config (OptimizerConfig): options.
        model_chunks (list[DistributedDataParallel]): this rank's chunks.
        no_weight_decay_cond, scale_lr_cond, lr_mult: see `get_param_groups`.

    Attributes:
        grad_scaler (Optional[ConstantGradScaler]): the loss scale; see `get_grad_scaler`.
        param_groups (list[dict]): a scheduler sets `lr` and `weight_decay` in them.
        shards (list[OptimizerShard]): what this rank updates.
        found_inf (bool): the last step met an infinite or NaN gradient and changed nothing.
    """

    def __init__(self, config, model_chunks, no_weight_decay_cond=None, scale_lr_cond=None, lr_mult=1.0):
        self.config = config
        self.model_chunks = list(model_chunks)
        self.grad_scaler = get_grad_scaler(config)
        self.found_inf = False
        named_params = [
            (name, param)
            for chunk in self.model_chunks
            for name, param in chunk.module.parameters_and_names()
            if param.requires_grad
        ]
        with ExitStack() as stack:
            for chunk in self.model_chunks:
                stack.enter_context(chunk.whole_parameters())
            self.param_groups = get_param_groups(named_params, config, no_weight_decay_cond, scale_lr_cond, lr_mult)
        group_of = {id(param): number for number, group in enumerate(self.param_groups) for param in group["params"]}
        self.shards = self._make_shards(group_of)
        self.update = update_rule(config.optimizer).from_config(self.shards, config)
        self.statistics = ModelStatistics(self.shards)

    def _make_shards(self, group_of):
        return [
            OptimizerShard(buffer, start, stop, group_of)
            for chunk in self.model_chunks
            for buffer in chunk.buffers
            for start, stop in buffer.shard_ranges()
        ]

    def zero_grad(self, set_to_none=True):
        """Start a step: reset the gradients to zero. `set_to_none` is Megatron's argument; buffers are kept."""
        del set_to_none
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()

    def get_loss_scale(self):
        """Current loss scale (float); 1 without a scaler. `BackwardScale` applies it."""
        return self.grad_scaler.scale if self.grad_scaler is not None else 1.0

    def get_params_norm(self):
        """Norm of the weights over all ranks (float)."""
        return ModelStatistics(self.shards, lambda shard, start, stop: shard.slice_main(start, stop)).norm()

    def step(self):
        """Update the parameters once from the gradients in the buffers.

        Returns:
            (success, grad_norm, num_zeros): `success` is False if a gradient was infinite or NaN; then nothing was
            changed. `grad_norm` is the norm before clipping. `num_zeros` is None unless `log_num_zeros_in_grad`.
        """
        inverse_scale = 1.0 / self.get_loss_scale()
        norm, is_finite = self.statistics.norm_and_finite()
        grad_norm = norm * inverse_scale
        self.found_inf = not is_finite
        if self.grad_scaler is not None:
            self.grad_scaler.update(self.found_inf)
        if self.found_inf:
            return False, grad_norm, None
        num_zeros = self.statistics.num_zeros() if self.config.log_num_zeros_in_grad else None
        self.update.step(self.param_groups, inverse_scale * self._clip(grad_norm, inverse_scale))
        self._update_model_params()
        return True, grad_norm, num_zeros

    def _update_model_params(self):
        """Round the masters into the parameters; all-gather sharded ones."""
        for shard in self.shards:
            shard.copy_main_params_to_model_params()
        for chunk in self.model_chunks:
            chunk.start_param_sync()

    def _clip(self, grad_norm, inverse_scale):
        if self.config.grad_clip_type == "GradClipByValue":
            if self.config.clip_grad > 0.0:
                clip_by_value(self.shards, self.config.clip_grad / inverse_scale)
            return 1.0
        return clip_coefficient(grad_norm, self.config.clip_grad)

    def reload_model_params(self):
        """Copy the parameters' present values into the masters, after weights were loaded."""
        for shard in self.shards:
            shard.copy_model_params_to_main_params()

    def pieces_with_states(self):
        """Yield (Piece, state) of every parameter held here; sharded state as this rank's pieces (flat unless whole).

        `state` maps the names of the update's state (exp_avg, ...) and, with masters, fp32_param to float32 Tensors over
        the optimizer's own memory, in the parameter's shape: reading saves them, `storage.write` restores them.
        """
        for index, shard in enumerate(self.shards):
            for piece in shard.pieces:
                shape = piece.shape if piece.is_whole else None
                state = {
                    name: buffers[index].slice(piece.start, piece.stop, shape) for name, buffers in self.update.state.items()
                }
                if shard.has_masters:
                    state["fp32_param"] = shard.slice_main(piece.start, piece.stop, shape)
                yield piece, state

    def counters(self):
        """State of a checkpoint beside the tensors: step (int) and grad_scaler (dict)."""
        return {
            "step": self.update.step_count,
            "grad_scaler": self.grad_scaler.state_dict() if self.grad_scaler is not None else {},
        }

    def load_counters(self, counters):
        """Restore `counters()`, and round previously loaded masters into the parameters."""
        self.update.step_count = int(counters["step"])
        if self.grad_scaler is not None and counters["grad_scaler"]:
            self.grad_scaler.load_state_dict(counters["grad_scaler"])
        self._update_model_params()

    @property
    def nbytes(self):
        """Bytes of moments and masters on this rank."""
        return self.update.nbytes + sum(shard.nbytes for shard in self.shards)
