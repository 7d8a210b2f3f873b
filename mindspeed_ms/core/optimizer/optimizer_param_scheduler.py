"""OptimizerParamScheduler: learning rate (warm-up, decay) and weight decay over a training, counted in samples.

Source: Megatron core, `optimizer_param_scheduler.py`: the same arithmetic, so that rates are bit-equal. The rate used
by the first step is the one at 0 samples: with a warm-up from 0 it is 0.
"""

import math

from mindspeed_ms.config.sections.optimizer import LR_DECAY_STYLES, WEIGHT_DECAY_STYLES, WSD_DECAY_STYLES
from mindspeed_ms.core.logging import logger

_SETTINGS = (  # saved, under Megatron's keys
    *("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style"),
    *("start_wd", "end_wd", "wd_incr_steps", "wd_incr_style"),
)


class OptimizerParamScheduler:
    """Schedule of `lr` and `weight_decay` of every parameter group of an optimizer. All steps are counted in samples.

    Args:
        optimizer: object with `param_groups`, a list of dicts; read: max_lr, min_lr, lr_mult, wd_mult (all optional).
        init_lr (float): rate at the start of the warm-up.
        max_lr (float): rate after the warm-up.
        min_lr (float): lowest rate of the decay.
        lr_warmup_steps (int): length of the warm-up; 0 for none.
        lr_decay_steps (int): where the decay ends, counted from 0.
        lr_decay_style (str): constant, linear, cosine, inverse-square-root or WSD.
        start_wd, end_wd (float): weight decay at the start and the end.
        wd_incr_steps (int): over how many steps it moves from one to the other.
        wd_incr_style (str): constant (both ends equal), linear or cosine.
        use_checkpoint_opt_param_scheduler (bool): on load, take the checkpoint's settings without comparing.
        override_opt_param_scheduler (bool): on load, keep this run's settings.
        wsd_decay_steps (Optional[int]): length of the final decay of WSD.
        lr_wsd_decay_style (Optional[str]): linear, cosine, exponential or minus_sqrt.

    Raises:
        ValueError: settings that contradict each other, named with their values.
    """

    def __init__(
        self,
        optimizer,
        init_lr,
        max_lr,
        min_lr,
        lr_warmup_steps,
        lr_decay_steps,
        lr_decay_style,
        start_wd,
        end_wd,
        wd_incr_steps,
        wd_incr_style,
        use_checkpoint_opt_param_scheduler=True,
        override_opt_param_scheduler=False,
        wsd_decay_steps=None,
        lr_wsd_decay_style=None,
    ):
        self.optimizer = optimizer
        self.init_lr, self.max_lr, self.min_lr = init_lr, float(max_lr), min_lr
        self.lr_warmup_steps, self.lr_decay_steps = lr_warmup_steps, lr_decay_steps
        self.lr_decay_style = lr_decay_style
        self.wsd_decay_steps, self.lr_wsd_decay_style = wsd_decay_steps, lr_wsd_decay_style
        self.start_wd, self.end_wd = start_wd, end_wd
        self.wd_incr_steps, self.wd_incr_style = wd_incr_steps, wd_incr_style
        self.use_checkpoint_opt_param_scheduler = use_checkpoint_opt_param_scheduler
        self.override_opt_param_scheduler = override_opt_param_scheduler
        self.num_steps = 0
        self._check()
        self.step(0)

    @classmethod
    def from_config(cls, optimizer, settings, batch, length):
        """Build the schedule of a configuration, whose lengths may be given in steps or in samples.

        Args:
            optimizer: see the class.
            settings (OptimizerConfig): the section `optimizer_config`.
            batch (int): samples of a step at full batch size.
            length (int): samples of the run.
        """
        decay_steps = _in_samples(settings.lr_decay_samples, settings.lr_decay_iters, batch) or length
        if settings.lr_warmup_fraction is not None:
            warmup_steps = settings.lr_warmup_fraction * decay_steps
        else:
            warmup_steps = _in_samples(settings.lr_warmup_samples, settings.lr_warmup_iters, batch)
        is_wsd = settings.lr_decay_style == "WSD"
        return cls(
            optimizer,
            init_lr=settings.lr_warmup_init,
            max_lr=settings.learning_rate,
            min_lr=settings.min_lr,
            lr_warmup_steps=warmup_steps,
            lr_decay_steps=decay_steps,
            lr_decay_style=settings.lr_decay_style,
            start_wd=settings.start_weight_decay,
            end_wd=settings.end_weight_decay,
            wd_incr_steps=length,
            wd_incr_style=settings.weight_decay_incr_style,
            use_checkpoint_opt_param_scheduler=settings.use_checkpoint_opt_param_scheduler,
            override_opt_param_scheduler=settings.override_opt_param_scheduler,
            wsd_decay_steps=_in_samples(settings.lr_wsd_decay_samples, settings.lr_wsd_decay_iters, batch) if is_wsd else None,
            lr_wsd_decay_style=settings.lr_wsd_decay_style,
        )

    def _check(self):
        decay, warmup, wsd = self.lr_decay_steps, self.lr_warmup_steps, self.wsd_decay_steps
        _expect(
            0 <= self.min_lr <= self.max_lr,
            f"min_lr is {self.min_lr} and the learning rate {self.max_lr}: expected 0 <= min_lr <= learning rate.",
        )
        _expect(self.init_lr <= self.max_lr, f"lr_warmup_init is {self.init_lr}, above the learning rate {self.max_lr}.")
        _expect(
            decay > 0,
            f"lr_decay_steps is {decay}: expected a positive number. Set training_iters, train_samples, lr_decay_iters or "
            "lr_decay_samples.",
        )
        _expect(
            0 <= warmup < decay,
            f"the warm-up takes {warmup} samples and the decay ends at {decay}: expected a shorter warm-up. Lower "
            "lr_warmup_iters or raise lr_decay_iters.",
        )
        _expect_one_of("lr_decay_style", self.lr_decay_style, LR_DECAY_STYLES)
        if self.lr_decay_style == "WSD":
            _expect(wsd, "lr_decay_style WSD needs lr_wsd_decay_iters or lr_wsd_decay_samples.")
            _expect(
                wsd <= decay,
                f"the last part of WSD takes {wsd} samples, but the decay ends at {decay}: expected a shorter last part.",
            )
            _expect_one_of("lr_wsd_decay_style", self.lr_wsd_decay_style, WSD_DECAY_STYLES)
        _expect_one_of("weight_decay_incr_style", self.wd_incr_style, WEIGHT_DECAY_STYLES)
        ends = f"start_weight_decay is {self.start_wd} and end_weight_decay {self.end_wd}"
        _expect(0 <= self.start_wd <= self.end_wd, f"{ends}: expected 0 <= start <= end.")
        _expect(
            self.wd_incr_style != "constant" or self.start_wd == self.end_wd,
            f"weight_decay_incr_style is constant but {ends}: expected equal ones.",
        )
        _expect(
            not (self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler),
            "override_opt_param_scheduler and use_checkpoint_opt_param_scheduler are both set: keep one of them.",
        )

    def get_wd(self):
        """Current weight decay, before the group's `wd_mult`."""
        if self.num_steps > self.wd_incr_steps or self.wd_incr_style == "constant":
            return self.end_wd
        ratio = float(self.num_steps) / float(self.wd_incr_steps) if self.wd_incr_steps else 1.0
        coefficient = ratio if self.wd_incr_style == "linear" else 0.5 * (math.cos(math.pi * (1 - ratio)) + 1.0)
        return self.start_wd + coefficient * (self.end_wd - self.start_wd)

    def get_lr(self, param_group=None):
        """Current learning rate of a group (its own max_lr and min_lr count), before its `lr_mult`."""
        param_group = param_group or {}
        max_lr, min_lr = _own(param_group, "max_lr", self.max_lr), _own(param_group, "min_lr", self.min_lr)
        if self.lr_warmup_steps > 0 and self.num_steps <= self.lr_warmup_steps:
            return self.init_lr + (max_lr - self.init_lr) * float(self.num_steps) / float(self.lr_warmup_steps)
        if self.lr_decay_style == "constant":
            return max_lr
        if self.num_steps > self.lr_decay_steps:
            return min_lr
        if self.lr_decay_style == "inverse-square-root":
            warmup_steps, num_steps = max(self.lr_warmup_steps, 1), max(self.num_steps, 1)
            return max(min_lr, max_lr * warmup_steps**0.5 / (num_steps**0.5))
        return min_lr + self._decay_coefficient() * (max_lr - min_lr)

    def _decay_coefficient(self):
        if self.lr_decay_style == "WSD":
            steps = self.num_steps - (self.lr_decay_steps - self.wsd_decay_steps)
            return 1.0 if steps <= 0 else _wsd_coefficient(self.lr_wsd_decay_style, steps / self.wsd_decay_steps)
        ratio = float(self.num_steps - self.lr_warmup_steps) / float(self.lr_decay_steps - self.lr_warmup_steps)
        return 1.0 - ratio if self.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)

    def step(self, increment):
        """Advance by `increment` samples and set the rates of all groups."""
        self.num_steps += increment
        weight_decay = self.get_wd()
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group) * group.get("lr_mult", 1.0)
            group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)

    def state_dict(self):
        """Settings and position (dict)."""
        return {name: getattr(self, name) for name in ("num_steps", *_SETTINGS)}

    def load_state_dict(self, state_dict):
        """Restore the position; the two switches of the constructor decide about settings.

        Raises:
            ValueError: neither switch is set and a setting differs from the checkpoint's.
        """
        for name in _SETTINGS:
            own, chosen = getattr(self, name), self._choose(name, getattr(self, name), state_dict[name])
            setattr(self, name, chosen)
            for group in self.optimizer.param_groups:
                # a group with a rate of its own keeps it
                if group.get(name) == own and not group.get("is_decoupled_lr"):
                    group[name] = chosen
        self.num_steps = 0
        self.step(state_dict["num_steps"])

    def _choose(self, name, own, saved):
        if self.override_opt_param_scheduler or own == saved:
            return own
        if self.use_checkpoint_opt_param_scheduler:
            logger.debug(
                "%s: the checkpoint's %s replaces this run's %s (override_opt_param_scheduler keeps this run's)",
                name,
                saved,
                own,
            )
            return saved
        raise ValueError(
            f"{name} is {own} but the checkpoint has {saved}: set use_checkpoint_opt_param_scheduler to "
            "take the checkpoint's, or override_opt_param_scheduler to keep this run's."
        )


def _expect(condition, message):
    if not condition:
        raise ValueError(message)


def _expect_one_of(name, value, known):
    _expect(value in known, f"{name} is {value!r}: expected one of {', '.join(known)}.")


def _in_samples(samples, iterations, batch):
    return samples or (iterations or 0) * batch


def _own(param_group, name, default):
    value = param_group.get(name)
    return default if value is None else value


def _wsd_coefficient(style, ratio):
    if style == "linear":
        return 1.0 - ratio
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)
    if style == "exponential":
        return 2.0 * math.pow(0.5, ratio) - 1.0
    return 1.0 - math.sqrt(ratio)
