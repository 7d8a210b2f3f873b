"""SGD with momentum and L2 decay over shards."""

import mindspore as ms

from mindspeed_ms import ops
from mindspeed_ms.core import storage


class SGD:
    """One operator call per run of neighbouring parameters with equal settings. The arithmetic is torch's SGD.

    Args:
        shards (list[OptimizerShard]): what to update.
        momentum (float): of the update; 0 keeps no buffer.

    Attributes:
        step_count (int): updates done.
        state (dict[str, list[FlatBuffer]]): float32 momentum_buffer of each shard, if there is momentum.
    """

    def __init__(self, shards, momentum=0.9):
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"sgd_momentum is {momentum}: expected 0 <= momentum < 1.")
        self.momentum = momentum
        self.step_count = 0
        self.STATE_NAMES = ("momentum_buffer",) if momentum else ()
        self.state = {name: [storage.FlatBuffer(shard.numel, ms.float32) for shard in shards] for name in self.STATE_NAMES}
        self._runs = [
            (
                run.key,
                shard.slice_main(run.start, run.stop),
                self._momentum_slice(index, run),
                shard.slice_grad(run.start, run.stop),
            )
            for index, shard in enumerate(shards)
            for run in shard.runs
        ]

    def _momentum_slice(self, index, run):
        return self.state["momentum_buffer"][index].slice(run.start, run.stop) if self.momentum else None

    def step(self, param_groups, grad_scale=1.0):
        """Update everything once; see `AdamW.step`."""
        self.step_count += 1
        for group, param, momentum_buffer, grad in self._runs:
            settings = param_groups[group]
            ops.sgd_step(
                param,
                momentum_buffer,
                grad,
                learning_rate=settings["lr"],
                momentum=self.momentum,
                weight_decay=settings["weight_decay"],
                first_step=self.step_count == 1,
                grad_scale=grad_scale,
            )

    @property
    def nbytes(self):
        """Bytes of the momentum."""
        return sum(buffer.nbytes for buffers in self.state.values() for buffer in buffers)
