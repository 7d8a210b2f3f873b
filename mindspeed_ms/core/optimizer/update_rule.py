"""UpdateRule: base class of the optimizers (AdamW, SGD), which `OPTIMIZERS` of `config/sections/optimizer.py` names."""

import importlib

import mindspore as ms

from mindspeed_ms.config.sections.optimizer import OPTIMIZERS
from mindspeed_ms.core import storage


class UpdateRule:
    """Update rule over shards: one call per run of neighbouring parameters with equal settings.

    A rule defines `from_config` and `update`, and names its state: sharding, saving, loading and counting go by these
    names.

    Args:
        shards (list[OptimizerShard]): what to update.
        state_names (tuple[str]): the float32 values kept of each element; the names are those of a checkpoint.

    Attributes:
        step_count (int): updates done, the present one included.
        state (dict[str, list[FlatBuffer]]): float32 buffers of each shard.
    """

    def __init__(self, shards, state_names=()):
        self.step_count = 0
        self.state = {name: [storage.FlatBuffer(shard.numel, ms.float32) for shard in shards] for name in state_names}
        self._runs = [
            (
                run.key,
                shard.slice_main(run.start, run.stop),
                shard.slice_grad(run.start, run.stop),
                [buffers[index].slice(run.start, run.stop) for buffers in self.state.values()],
            )
            for index, shard in enumerate(shards)
            for run in shard.runs
        ]

    @classmethod
    def from_config(cls, shards, config):
        """Build the rule from the options of an `OptimizerConfig`."""
        raise NotImplementedError

    def update(self, param, grad, *state, learning_rate, weight_decay, grad_scale):
        """Update one run.

        Args:
            param, grad (Tensor): flat float32 (or the gradients' dtype) over the buffers' memory; written by `storage.write`
                or by an operator of `ops`.
            state (Tensor): flat float32, one for each of the state's names.
            learning_rate, weight_decay (float): of the parameter group.
            grad_scale (float): multiplies the gradients (loss scale and clipping).
        """
        raise NotImplementedError

    def step(self, param_groups, grad_scale=1.0):
        """Update all runs once; `param_groups` (list[dict]) gives lr and weight_decay of each group."""
        self.step_count += 1
        for number, param, grad, state in self._runs:
            group = param_groups[number]
            rates = {"learning_rate": group["lr"], "weight_decay": group["weight_decay"]}
            self.update(param, grad, *state, **rates, grad_scale=grad_scale)

    @property
    def nbytes(self):
        """Bytes of the state."""
        return sum(buffer.nbytes for buffers in self.state.values() for buffer in buffers)


def update_rule(name):
    """UpdateRule class of the optimizer `name` in the configuration (any case).

    Raises:
        ValueError: unknown; names the known ones.
    """
    for path, names in OPTIMIZERS.items():
        if name.lower() in map(str.lower, names):
            module, kind = path.split(".")
            return getattr(importlib.import_module(f"mindspeed_ms.core.optimizer.{module}"), kind)
    known = ", ".join(name for names in OPTIMIZERS.values() for name in names)
    raise ValueError(f"optimizer is {name!r}: expected one of {known}.")
