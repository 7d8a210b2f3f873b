"""Evaluation: loss over all tokens in forward passes without dropout, during and after a training."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from mindspeed_ms.core import num_microbatches_calculator as calculator
from mindspeed_ms.core.pipeline_parallel import get_forward_backward_func
from mindspeed_ms.training.losses import LossReducer
from mindspeed_ms.training.tensorboard import get_tensorboard_writer
from mindspeed_ms.training.utils import is_last_rank


def evaluate(forward_step_func, data_iterator, model, eval_iters, process_non_loss_data_func=None):
    """Mean losses of `eval_iters` global batches, of the full size also during a batch-size ramp-up.

    Args:
        forward_step_func (Callable): as in training.
        data_iterator: micro-batches.
        model (list[ShardedModel]): the chunks; in evaluation mode inside, afterwards in the mode that they had.
        eval_iters (int): how many global batches.
        process_non_loss_data_func (Optional[Callable]): if given, one more global batch is run for its data.

    Returns:
        (losses, non_loss_data): dict[str, float], equal on all ranks; list of what the loss function returned for
            non-loss data, one entry per micro-batch, or None. The main loss is NaN without a token.
    """
    losses, non_loss_data = step_losses(forward_step_func, data_iterator, model, eval_iters, process_non_loss_data_func)
    return losses.values, non_loss_data


def step_losses(forward_step_func, data_iterator, model, eval_iters, process_non_loss_data_func=None):
    """`evaluate` with the StepLosses, which know of samples without a token."""
    forward = partial(
        get_forward_backward_func(),
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        forward_only=True,
    )
    modes = [chunk.training for chunk in model]
    for chunk in model:
        chunk.set_train(False)
    reported, non_loss_data = [], None
    try:
        with calculator.full_batch_size():
            count = calculator.get_num_microbatches()
            for _ in range(eval_iters):
                reported += forward(num_microbatches=count)
            if process_non_loss_data_func is not None:
                non_loss_data = forward(num_microbatches=count, collect_non_loss_data=True)
    finally:
        for chunk, mode in zip(model, modes):
            chunk.set_train(mode)
    return LossReducer().reduce(reported), non_loss_data


@dataclass
class Evaluation:
    """Evaluations of a training: validation every `eval_interval` steps and at the end, test at the end.

    Attributes:
        settings (TrainingConfig): read: eval_interval, eval_iters.
        forward_step_func (Callable): as in training.
        model (list[ShardedModel]): the chunks.
        data (TrainingData): read: valid, test.
        metrics (MetricsLogger): takes the results.
        process_non_loss_data_func (Optional[Callable]): see `pretrain`.
    """

    settings: Any
    forward_step_func: Callable
    model: list
    data: Any
    metrics: Any
    process_non_loss_data_func: Callable | None = None

    def after_step(self, state):
        """Validate if the step is due; returns whether it was (bool). `state` (TrainState) counts the samples."""
        interval = self.settings.eval_interval
        if not interval or self.data.valid is None or state.iteration % interval:
            return False
        self.evaluate("valid", self.data.valid, state)
        with calculator.full_batch_size():
            state.consumed_valid_samples += self.settings.eval_iters * calculator.get_current_global_batch_size()
        return True

    def after_training(self, state):
        """Validate unless the last step did, and evaluate the test data; does nothing without `eval_interval`."""
        if self.settings.eval_interval:
            self.evaluate_all(state, with_valid=state.iteration % self.settings.eval_interval)

    def evaluate_all(self, state, with_valid=True):
        """Evaluate the validation and the test data."""
        if self.data.valid is not None and with_valid:
            self.evaluate("valid", self.data.valid, state)
        if self.data.test is not None:
            self.evaluate("test", self.data.test, state)

    def evaluate(self, name, data, state):
        """Evaluate and report the micro-batches `data` under a name.

        Raises:
            RuntimeError: the data ran out.
        """
        iterations = self.settings.eval_iters
        if not iterations:
            return
        try:
            losses, non_loss_data = step_losses(
                self.forward_step_func, data, self.model, iterations, self.process_non_loss_data_func
            )
        except StopIteration as error:
            raise RuntimeError(
                f"the {name} data ran out before {iterations} global batches were evaluated ({error}): give "
                "data that can be read again, or lower eval_iters (--eval-iters)."
            ) from error
        if non_loss_data is not None and is_last_rank():
            self.process_non_loss_data_func(non_loss_data, state.iteration, get_tensorboard_writer())
        with calculator.full_batch_size():
            samples = iterations * calculator.get_current_global_batch_size()
        self.metrics.log_evaluation(name, losses, samples, state)
