"""Trainer: the training loop, whose parts are passed in; and the training's counters (`TrainState`)."""

import time
from dataclasses import dataclass, field, fields
from typing import Any

from mindspeed_ms.core import comm
from mindspeed_ms.core import num_microbatches_calculator as calculator
from mindspeed_ms.core.distributed import Optimizer
from mindspeed_ms.core.logging import logger
from mindspeed_ms.core.profiler import make_profiler
from mindspeed_ms.training.data_streams import DataExhausted
from mindspeed_ms.training.housekeeping import GarbageCollection, SignalHandler, check_weights_across_data_parallel_ranks
from mindspeed_ms.training.parts import CheckpointsPart, DataPart, EvaluationPart, MetricsPart, TrainStepPart
from mindspeed_ms.training.timers import get_timers
from mindspeed_ms.training.train_step import NonFiniteGradientError, NonFiniteLossError
from mindspeed_ms.training.wasted_steps import WastedSteps


@dataclass
class TrainState:
    """Counters of a training, saved with a checkpoint.

    Attributes:
        iteration (int): steps that are done.
        consumed_train_samples (int): training samples used, over all data-parallel ranks.
        consumed_valid_samples (int): the same for evaluations.
        skipped_iterations (int): steps whose gradients were not finite, so that nothing was updated.
        epoch (int): epoch of the last step, from 0.
        step_in_epoch (int): steps done in that epoch.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    epoch: int = 0
    step_in_epoch: int = 0

    def load(self, values):
        """Take the counters (dict) of a checkpoint; unknown ones of other versions are left out."""
        for counter in fields(self):
            setattr(self, counter.name, values.get(counter.name, counter.default))


@dataclass(kw_only=True)
class Trainer:
    """Training loop: steps with evaluations, checkpoints and reports, to its end.

    Every part may be replaced by another one with the methods that `training.parts` declares.

    Attributes:
        all_config (AllConfig): the configuration.
        training_iters (int): steps of the whole training.
        train_state (TrainState): counters.
        model (list[ShardedModel]): this rank's chunks.
        optimizer (Optimizer), opt_param_scheduler (OptimizerParamScheduler): of the model.
        train_step, data, checkpoints, evaluation, metrics: see `training.parts`.
        start_time (float): `time.monotonic()` when the run started, for `exit_duration_in_mins`.
        steps_done (int): steps of this process.
        wasted_steps (WastedSteps): those of them that changed nothing.
    """

    all_config: Any
    training_iters: int
    train_state: TrainState
    model: list
    optimizer: Optimizer
    opt_param_scheduler: Any
    train_step: TrainStepPart
    data: DataPart
    checkpoints: CheckpointsPart
    evaluation: EvaluationPart
    metrics: MetricsPart
    start_time: float = field(default_factory=time.monotonic)
    steps_done: int = 0

    def __post_init__(self):
        self.wasted_steps = WastedSteps.of(self.all_config)
        self._ended_early = False

    @property
    def settings(self):
        """Section training_config."""
        return self.all_config.training_config

    def run(self):
        """Load the starting checkpoint, then train, or only evaluate with `skip_train`.

        Raises:
            NothingLearntError: after the last step, which is saved: none changed a weight or had a token.
        """
        self.checkpoints.load()
        state = self.train_state
        if self.settings.skip_train:
            with self.metrics.opened(state.iteration):
                self.evaluation.evaluate_all(state)
        elif state.iteration >= self.training_iters:
            logger.info(
                "the training is complete: iteration %d of %d was reached before, nothing is left to do. Raise "
                "--train-iters (training_config.training_iters) to go on.",
                state.iteration,
                self.training_iters,
            )
        else:
            with self.metrics.opened(state.iteration):
                ending = self.train()
            self.train_step.finish()
            get_timers().report(1, state.iteration)  # of what came after the last log line
            if not self._ended_early:
                self.wasted_steps.check()
            logger.info("%s%s", ending, self.wasted_steps.summary())

    def train(self):
        """Run the remaining steps with evaluations and checkpoints; after a signal, save and stop.

        Returns:
            str: how it ended, for the last line of the log.
        """
        settings, state = self.settings, self.train_state
        with (
            SignalHandler(settings.exit_signal_handler) as signals,
            GarbageCollection(settings.manual_gc, settings.manual_gc_interval) as garbage,
            make_profiler(settings, comm.get_rank()) as profiler,
        ):
            while state.iteration < self.training_iters:
                calculator.update_num_microbatches(state.consumed_train_samples)
                profiler.before_step(state.iteration + 1)
                try:
                    data = self.data.of_step()
                except DataExhausted as error:
                    self._end_without_data(error)
                    break
                report, stop = self._step(data, signals.received is not None or self._time_is_over())
                self._count(report)
                profiler.after_step(state.iteration)
                self.metrics.log_step(report, state)
                self.checkpoints.poll()
                self._check_weights_if_due()
                garbage.after_step(state.iteration, self.evaluation.after_step(state))
                self.checkpoints.after_step()
                due = settings.exit_interval and state.iteration % settings.exit_interval == 0
                if (stop or due) and state.iteration < self.training_iters:
                    return self._end_early(signals, stop)
            self.checkpoints.save()
            self.evaluation.after_training(state)
            self.checkpoints.complete()
        return f"Training success! {state.iteration} iterations, {state.consumed_train_samples} samples"

    def _step(self, data, stop):
        """Run the next step: (StepReport, whether any rank asks to stop)."""
        iteration = self.train_state.iteration + 1
        try:
            return self.train_step(data, iteration, stop)
        except (NonFiniteLossError, NonFiniteGradientError):
            self.checkpoints.complete()
            raise
        except StopIteration as error:
            raise RuntimeError(
                f"the training data ran out within iteration {iteration} of {self.training_iters}: {error}"
            ) from error

    def _count(self, report):
        state, epoch = self.train_state, self.data.epoch
        self.steps_done += 1
        state.iteration += 1
        state.consumed_train_samples += calculator.get_current_global_batch_size()
        state.skipped_iterations += not report.finite_grads
        self.wasted_steps.add(report, state.iteration)
        state.step_in_epoch = state.step_in_epoch + 1 if epoch == state.epoch else 1
        state.epoch = epoch

    def _check_weights_if_due(self):
        interval = self.settings.check_weight_hash_across_dp_replicas_interval
        if interval and self.train_state.iteration % interval == 0:
            check_weights_across_data_parallel_ranks(self.model, self.train_state.iteration)

    def _time_is_over(self):
        minutes = self.settings.exit_duration_in_mins
        return minutes is not None and time.monotonic() - self.start_time > 60.0 * minutes

    def _end_without_data(self, reason):
        """End the training when data runs out: normally after the requested epochs, else save and raise an error."""
        iteration = self.train_state.iteration
        if self.settings.epochs is not None:
            logger.info("%s after iteration %d", reason, iteration)
            return
        self.checkpoints.save()
        self.checkpoints.complete()
        raise RuntimeError(
            f"the training data ran out after iteration {iteration} of {self.training_iters}: {reason}. The state was "
            f"saved; give more data or set training_iters (--train-iters) to {iteration}."
        ) from reason

    def _end_early(self, signals, stop):
        """Save, and return the text of the cause that stops the training early, equal on all ranks."""
        self._ended_early = True
        settings, cause = self.settings, f"exit_interval {self.settings.exit_interval} (--exit-interval)"
        if stop:  # a signal may have come to one rank
            received = [text for text in comm.world_group().all_gather_object(signals.received) if text]
            minutes = settings.exit_duration_in_mins
            cause = received[0] if received else f"exit_duration_in_mins {minutes:g} (--exit-duration-in-mins)"
        self.checkpoints.save()
        self.checkpoints.complete()
        saved = "resume_training continues from here"
        if not settings.save_enabled:
            saved = "nothing was saved (save_enabled is off)"
        return f"ended at iteration {self.train_state.iteration} of {self.training_iters} by {cause}, exit code 0; {saved}"
