"""SGD with momentum and L2 decay over shards; the arithmetic is torch's."""

from mindspeed_ms import ops
from mindspeed_ms.core.optimizer.update_rule import UpdateRule


class SGD(UpdateRule):
    """SGD update rule with the state momentum_buffer (with momentum only).

    Args:
        shards (list[OptimizerShard]): what to update.
        momentum (float): of the update; 0 keeps no buffer.

    Raises:
        ValueError: a momentum out of its range.
    """

    def __init__(self, shards, momentum=0.9):
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"sgd_momentum is {momentum}: expected 0 <= momentum < 1.")
        super().__init__(shards, ("momentum_buffer",) if momentum else ())
        self.momentum = momentum

    @classmethod
    def from_config(cls, shards, config):
        """Build the rule from sgd_momentum of `config`."""
        return cls(shards, config.sgd_momentum)

    def update(self, param, grad, momentum_buffer=None, **settings):
        """See `UpdateRule.update`."""
        is_first = self.step_count == 1
        ops.sgd_step(param, momentum_buffer, grad, momentum=self.momentum, first_step=is_first, **settings)
