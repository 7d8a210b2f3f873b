"""Gradient scalers: constant and dynamic loss scales for half precision.

Source: Megatron core, `grad_scaler.py`. Here the scale is a Python float: it multiplies the seed of the backward, and
its inverse goes into the optimizer's update, so no pass over the gradients is needed.
"""


class ConstantGradScaler:
    """Gradient scaler with a constant loss scale.

    Args:
        initial_scale (float): the scale, positive.
    """

    def __init__(self, initial_scale):
        if not initial_scale > 0.0:
            raise ValueError(f"loss scale is {initial_scale}: expected a positive number.")
        self.scale = float(initial_scale)

    def update(self, found_inf):
        """Do nothing: a constant scale does not react to an overflow."""

    def state_dict(self):
        """Picklable state (dict)."""
        return {}

    def load_state_dict(self, state_dict):
        """Restore `state_dict()`; does nothing for a constant scale."""


class DynamicGradScaler(ConstantGradScaler):
    """Gradient scaler with a loss scale that shrinks after overflows and grows after a run of finite steps.

    Args:
        initial_scale (float): scale at the start.
        min_scale (float): lowest scale.
        growth_factor (float): growth after `growth_interval` finite steps in a row; above 1.
        backoff_factor (float): shrinkage after `hysteresis` overflows; between 0 and 1.
        growth_interval (int): see `growth_factor`.
        hysteresis (int): overflows that are tolerated before the scale shrinks.
    """

    def __init__(self, initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis):
        super().__init__(initial_scale)
        checks = {
            "min_scale": (min_scale, 0.0 < min_scale <= initial_scale, f"above 0, at most {initial_scale}"),
            "growth_factor": (growth_factor, growth_factor > 1.0, "above 1"),
            "backoff_factor": (backoff_factor, 0.0 < backoff_factor < 1.0, "between 0 and 1"),
            "growth_interval": (growth_interval, growth_interval > 0, "positive"),
            "hysteresis": (hysteresis, hysteresis > 0, "positive"),
        }
        for name, (value, holds, expectation) in checks.items():
            if not holds:
                raise ValueError(f"{name} of the loss scale is {value}: expected {expectation}.")
        self.min_scale = float(min_scale)
        self.growth_factor = float(growth_factor)
        self.backoff_factor = float(backoff_factor)
        self.growth_interval = int(growth_interval)
        self.hysteresis = int(hysteresis)
        self._growth_tracker = 0
        self._hysteresis_tracker = self.hysteresis

    def update(self, found_inf):
        """Update the scale after a step; `found_inf`: the step overflowed."""
        if found_inf:
            self._growth_tracker = 0
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self._growth_tracker += 1
        if self._growth_tracker == self.growth_interval:
            self._growth_tracker = 0
            self._hysteresis_tracker = self.hysteresis
            self.scale *= self.growth_factor

    def state_dict(self):
        """Scale and counters (dict)."""
        return {"scale": self.scale, "growth_tracker": self._growth_tracker, "hysteresis_tracker": self._hysteresis_tracker}

    def load_state_dict(self, state_dict):
        """Restore `state_dict()`."""
        self.scale = float(state_dict["scale"])
        self._growth_tracker = int(state_dict["growth_tracker"])
        self._hysteresis_tracker = int(state_dict["hysteresis_tracker"])


def get_grad_scaler(config):
    """Gradient scaler of a configuration; None if no loss scale is set and the dtype is not fp16.

    Args:
        config (OptimizerConfig): read: fp16, loss_scale and the settings of the dynamic scale.
    """
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        config.initial_loss_scale,
        config.min_loss_scale,
        config.loss_scale_factor,
        1.0 / config.loss_scale_factor,
        config.loss_scale_window,
        config.hysteresis,
    )
