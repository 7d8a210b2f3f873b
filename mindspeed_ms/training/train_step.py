"""Training step (`TrainOneStep`): forward and backward of all micro-batches, reduction, check of the loss, update."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindspeed_ms.core import num_microbatches_calculator as calculator
from mindspeed_ms.core.distributed import finalize_model_grads
from mindspeed_ms.core.pipeline_parallel import get_forward_backward_func
from mindspeed_ms.core.pipeline_parallel.micro_batch_loss import BackwardScale
from mindspeed_ms.training.losses import LossReducer
from mindspeed_ms.training.metrics import StepReport
from mindspeed_ms.training.timers import get_timers


class NonFiniteLossError(RuntimeError):
    """Error: a loss was NaN or infinite; the weights are those before the step."""


class NothingLearntError(RuntimeError):
    """Error: a training ended, and none of its steps changed a weight or had a token to learn from."""


class NonFiniteGradientError(RuntimeError):
    """Error: a gradient was NaN or infinite before the reduction; the weights are those before the step."""


@dataclass
class TrainOneStep:
    """Training step: puts the model in training mode, runs all micro-batches, and updates.

    Gradients are those of the mean over micro-batches and data-parallel ranks of each micro-batch's mean loss, or if the
    model has `calculate_per_token_loss` of the mean over all tokens. The *reported* loss is always the mean over all tokens.

    Args:
        model (list[ShardedModel]): the chunks.
        optimizer (Optimizer): of the model.
        opt_param_scheduler (OptimizerParamScheduler): of the optimizer.
        forward_step_func (Callable): `(data_iterator, model) -> (output, loss_func)`.
        check_for_nan_in_loss (bool): raise when a loss is not finite.
        log_params_norm (bool): report the norm of the weights.
        sequence_length (Optional[int]): tokens of a sample, for the throughput; None: the tokens that the loss is over.
        finalize (Callable): called with (model, number of tokens or None) after the last backward.
    """

    model: list
    optimizer: Any
    opt_param_scheduler: Any
    forward_step_func: Callable
    check_for_nan_in_loss: bool = True
    log_params_norm: bool = False
    sequence_length: int | None = None
    finalize: Callable = finalize_model_grads

    def __post_init__(self):
        self.reducer = LossReducer()
        self.timers = get_timers()

    @classmethod
    def of(cls, all_config, *parts):
        """TrainOneStep of an AllConfig, with model, optimizer, opt_param_scheduler and forward_step_func."""
        settings, data = all_config.training_config, all_config.dataset_config
        tokens = all_config.model_config.seq_length * data.sequences_of_micro_batch // data.batch_size
        return cls(*parts, settings.check_for_nan_in_loss, settings.log_params_norm, tokens)

    def __call__(self, data_iterator, iteration, stop_requested=False):
        """Run one training step.

        Args:
            data_iterator: micro-batches.
            iteration (int): number of the step, for messages.
            stop_requested (bool): this rank asks to end after it.

        Returns:
            (StepReport, bool): the numbers, and whether any rank asks to end.

        Raises:
            NonFiniteLossError, NonFiniteGradientError: on all ranks, before anything is updated.
        """
        start = time.perf_counter()
        for chunk in self.model:
            if not chunk.training:  # without dropout and recomputation it would train another model
                chunk.set_train(True)
        self.optimizer.zero_grad()
        count = calculator.get_num_microbatches()
        timers = self.timers
        timers("forward-backward", log_level=1).start()
        reported = get_forward_backward_func()(
            forward_step_func=self.forward_step_func,
            data_iterator=data_iterator,
            model=self.model,
            num_microbatches=count,
            backward_scale=BackwardScale(self.optimizer.get_loss_scale(), count, self.model[0].calculate_per_token_loss),
            finalize_model_grads_func=self._finalize,
        )
        timers("forward-backward").stop()
        bad_gradients = [name for chunk in self.model for name in chunk.non_finite_gradients()]
        losses = self.reducer.reduce(reported, stop_requested, bool(bad_gradients))
        if losses.not_finite and self.check_for_nan_in_loss:
            raise NonFiniteLossError(_describe(losses, iteration))
        if losses.bad_gradients:
            raise NonFiniteGradientError(_describe_gradients(losses, bad_gradients, iteration))
        loss_scale, learning_rate = self.optimizer.get_loss_scale(), _learning_rate(self.optimizer)
        timers("optimizer", log_level=1).start()
        success, grad_norm, num_zeros = self.optimizer.step()
        timers("optimizer").stop()
        if success:
            self.opt_param_scheduler.step(calculator.get_current_global_batch_size())
        params_norm = self.optimizer.get_params_norm() if self.log_params_norm else None
        report = StepReport(
            losses.values,
            self._tokens(losses),
            success,
            loss_scale,
            learning_rate,
            grad_norm,
            num_zeros,
            params_norm,
            time.perf_counter() - start,
            losses.samples_without_tokens,
            losses.has_tokens,
        )
        return report, bool(losses.stop_requested)

    def _finalize(self, model, num_tokens=None):
        self.timers("all-grads-sync", log_level=1).start()
        self.finalize(model, num_tokens)
        self.timers("all-grads-sync").stop()

    def finish(self):
        """Complete the gathering of updated parameters that the last step left under way."""
        for chunk in self.model:
            chunk.finish_param_sync()

    def _tokens(self, losses):
        """Number of tokens that this step read; it does not depend on what the loss function reports."""
        if self.sequence_length is None:
            return losses.tokens
        return calculator.get_current_global_batch_size() * self.sequence_length


def _learning_rate(optimizer):
    rates = [group["lr"] for group in optimizer.param_groups if not group["is_decoupled_lr"]]
    return max(rates or [group["lr"] for group in optimizer.param_groups], default=math.nan)


def _describe(losses, iteration):
    places = ", ".join(f"rank {rank} (micro-batch {number})" for rank, number in losses.not_finite[:8])
    return (
        f"the loss of iteration {iteration} is NaN or infinite on {places}; nothing was updated. Look at that "
        "batch, lower the learning rate, or set check_for_nan_in_loss False (--no-check-for-nan-in-loss-and-grad) "
        "to leave such steps out and go on."
    )


def _describe_gradients(losses, names, iteration):
    ranks = ", ".join(map(str, losses.bad_gradients[:8]))
    here = f" (here: {', '.join(names[:5])}{' and others' if len(names) > 5 else ''})" if names else ""
    return (
        f"the gradients of iteration {iteration} hold NaN or infinity on rank {ranks}{here} though the loss is finite; "
        "nothing was updated. Look at that batch, lower the learning rate, or switch the check off "
        "(check_for_nan_in_grad False) to leave such steps out and go on."
    )
