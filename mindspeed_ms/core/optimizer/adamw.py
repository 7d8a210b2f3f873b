"""Megatron's AdamW over shards: bias-corrected, decoupled decay, eps outside the root."""

import mindspore as ms

from mindspeed_ms import ops
from mindspeed_ms.core import storage


class AdamW:
    """One operator call per run of neighbouring parameters with equal settings.

    Args:
        shards (list[OptimizerShard]): what to update.
        beta1, beta2, eps (float): of the update.

    Attributes:
        step_count (int): updates done; counts from 1 in the bias correction.
        state (dict[str, list[FlatBuffer]]): float32 exp_avg and exp_avg_sq of each shard.
    """

    STATE_NAMES = ("exp_avg", "exp_avg_sq")

    def __init__(self, shards, beta1=0.9, beta2=0.999, eps=1e-8):
        _check_betas(beta1, beta2, eps)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.step_count = 0
        self.state = {name: [storage.FlatBuffer(shard.numel, ms.float32) for shard in shards] for name in self.STATE_NAMES}
        self._runs = [
            (
                run.key,
                shard.slice_main(run.start, run.stop),
                exp_avg.slice(run.start, run.stop),
                exp_avg_sq.slice(run.start, run.stop),
                shard.slice_grad(run.start, run.stop),
            )
            for shard, exp_avg, exp_avg_sq in zip(shards, self.state["exp_avg"], self.state["exp_avg_sq"])
            for run in shard.runs
        ]

    def step(self, param_groups, grad_scale=1.0):
        """Update everything once.

        Args:
            param_groups (list[dict]): read: lr and weight_decay of each group.
            grad_scale (float): multiplies the gradients (loss scale and clipping).
        """
        self.step_count += 1
        for group, param, exp_avg, exp_avg_sq, grad in self._runs:
            settings = param_groups[group]
            ops.adamw_step(
                param,
                exp_avg,
                exp_avg_sq,
                grad,
                learning_rate=settings["lr"],
                beta1=self.beta1,
                beta2=self.beta2,
                eps=self.eps,
                weight_decay=settings["weight_decay"],
                step=self.step_count,
                grad_scale=grad_scale,
            )

    @property
    def nbytes(self):
        """Bytes of the moments."""
        return sum(buffer.nbytes for buffers in self.state.values() for buffer in buffers)


def _check_betas(beta1, beta2, eps):
    for name, beta in (("adam_beta1", beta1), ("adam_beta2", beta2)):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"{name} is {beta}: expected 0 <= {name} < 1.")
    if not eps > 0.0:
        raise ValueError(f"adam_eps is {eps}: expected a positive number.")
