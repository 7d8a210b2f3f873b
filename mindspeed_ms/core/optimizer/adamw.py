"""Megatron's AdamW over shards: bias-corrected, decoupled decay, eps outside the root."""

from mindspeed_ms import ops
from mindspeed_ms.core.optimizer.update_rule import UpdateRule


class AdamW(UpdateRule):
    """AdamW update rule with the states exp_avg and exp_avg_sq; `step_count` counts from 1 in the bias correction.

    Args:
        shards (list[OptimizerShard]): what to update.
        beta1, beta2, eps (float): of the update.

    Raises:
        ValueError: a value out of its range.
    """

    def __init__(self, shards, beta1=0.9, beta2=0.999, eps=1e-8):
        for name, beta in (("adam_beta1", beta1), ("adam_beta2", beta2)):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"{name} is {beta}: expected 0 <= {name} < 1.")
        if not eps > 0.0:
            raise ValueError(f"adam_eps is {eps}: expected a positive number.")
        super().__init__(shards, ("exp_avg", "exp_avg_sq"))
        self.options = {"beta1": beta1, "beta2": beta2, "eps": eps}

    @classmethod
    def from_config(cls, shards, config):
        """Build the rule from adam_beta1, adam_beta2 and adam_eps of `config`."""
        return cls(shards, config.adam_beta1, config.adam_beta2, config.adam_eps)

    def update(self, param, grad, exp_avg, exp_avg_sq, **settings):
        """See `UpdateRule.update`."""
        ops.adamw_step(param, exp_avg, exp_avg_sq, grad, step=self.step_count, **self.options, **settings)
