"""WastedSteps: steps of a run that changed no weight, or had no token to learn from; a run of such steps alone is an error."""

from mindspeed_ms.core import comm
from mindspeed_ms.core.logging import logger
from mindspeed_ms.training.train_step import NothingLearntError

_LOSS_SCALE_HINT = (
    "look at the data, lower the learning rate, or train in bf16 (--bf16), which needs no loss scale; min_loss_scale "
    "(--min-loss-scale) may be lowered too"
)


class WastedSteps:
    """Counts of a run's steps, equal on all ranks; warnings come from rank 0.

    Args:
        min_loss_scale (Optional[float]): lowest dynamic loss scale; None without one.
    """

    def __init__(self, min_loss_scale=None):
        self.min_loss_scale = min_loss_scale
        self.steps = self.skipped = self.at_min_scale = self.without_tokens = self.samples = 0
        self._next_warning = 1

    @classmethod
    def of(cls, all_config):
        """WastedSteps of an AllConfig."""
        settings = all_config.training_config
        return cls(settings.min_loss_scale if settings.dynamic_loss_scale else None)

    def add(self, report, iteration):
        """Count the step of a StepReport; warn of the first overflow at the lowest loss scale, of samples without tokens."""
        self.steps += 1
        self.samples += report.samples_without_tokens
        if not report.finite_grads:
            self.skipped += 1
            self._add_overflow(report, iteration)
        elif not report.has_tokens:
            self.without_tokens += 1
        # not at every step: each time that their number has doubled
        if self.samples >= self._next_warning:
            _warn("iteration %d: %s", iteration, self._describe_samples())
            self._next_warning = 2 * self.samples

    def _add_overflow(self, report, iteration):
        if self.min_loss_scale is None or report.loss_scale > self.min_loss_scale:
            return
        self.at_min_scale += 1
        if self.at_min_scale == 1:
            _warn(
                "iteration %d: the gradients overflow though the loss scale is at its minimum of %g (min_loss_scale): such "
                "steps change nothing; %s",
                iteration,
                self.min_loss_scale,
                _LOSS_SCALE_HINT,
            )

    def _describe_samples(self):
        return (
            f"{self.samples} samples so far have no token to learn from (all labels are masked); they are left out of the "
            "mean loss. Look at the loss mask, and at samples that are cut before their answer (seq_length)"
        )

    def summary(self):
        """Text for the end of a training, with a comma before; empty if no step was wasted."""
        parts = []
        if self.skipped:
            parts.append(f"{self.skipped} of {self.steps} steps skipped (gradients not finite)")
        if self.at_min_scale:
            parts.append(f"{self.at_min_scale} of them at the minimum loss scale of {self.min_loss_scale:g}")
        if self.without_tokens:
            parts.append(f"{self.without_tokens} of {self.steps} steps without a token")
        if self.samples:
            parts.append(f"{self.samples} samples without a token (all labels masked)")
        return "".join(f", {part}" for part in parts)

    @property
    def nothing_learnt(self):
        """Whether every step was wasted."""
        return self.steps > 0 and self.steps == self.skipped + self.without_tokens

    def check(self):
        """Check, at the end of a training, that it learnt.

        Raises:
            NothingLearntError: every step was wasted.
        """
        if not self.nothing_learnt:
            return
        if self.skipped == self.steps:
            hint = _LOSS_SCALE_HINT if self.min_loss_scale is not None else "look at the data, or lower the learning rate"
            if self.min_loss_scale is not None and not self.at_min_scale:
                hint = (
                    "the loss scale has not come down yet: train more steps (--train-iters), or start with a lower one "
                    "(--initial-loss-scale)"
                )
            raise NothingLearntError(
                f"no weight changed: the gradients of all {self.steps} steps were not finite, so all were skipped"
                f"{self._at_minimum()}; {hint}."
            )
        raise NothingLearntError(
            f"nothing was learnt: of {self.steps} steps {self.without_tokens} had no token (all labels are masked)"
            f"{f' and {self.skipped} were skipped (gradients not finite)' if self.skipped else ''}; look at the loss mask of "
            "the data, and at samples that are cut before their answer (seq_length)."
        )

    def _at_minimum(self):
        return (
            f", {self.at_min_scale} of them at the minimum loss scale of {self.min_loss_scale:g}" if self.at_min_scale else ""
        )


def _warn(text, *values):
    if comm.get_rank() == 0:
        logger.warning(text, *values)
