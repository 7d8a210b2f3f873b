"""Interfaces of the parts of a `Trainer`: train step, data, checkpoints, evaluation, metrics.

Model and optimizer: `core.distributed.interface`. A part needs the methods alone, no base class.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol


class TrainStepPart(Protocol):
    """Training step; `TrainOneStep`."""

    def __call__(self, data_iterator: Iterator, iteration: int, stop_requested: bool = False) -> tuple[Any, bool]:
        """Run a step: (StepReport, whether any rank asks to end). NonFiniteLossError, NonFiniteGradientError on all ranks."""

    def finish(self):
        """After the last step: complete what it left under way."""


class DataPart(Protocol):
    """Training data; `TrainingData`."""

    epoch: int  # of the last step, from 0

    def of_step(self) -> Iterator:
        """Micro-batches of the next step. DataExhausted: there are none."""


class CheckpointsPart(Protocol):
    """Checkpoints; `CheckpointManager`."""

    def load(self):
        """Fill model, optimizer and counters before the first step."""

    def after_step(self):
        """Save if the step is due."""

    def save(self):
        """Save now."""

    def poll(self):
        """Between steps: go on with a checkpoint that is written beside the training."""

    def complete(self):
        """Before the training ends: wait for it."""


class EvaluationPart(Protocol):
    """Evaluations; `Evaluation`. `state` is the `TrainState`."""

    def after_step(self, state) -> bool:
        """Evaluate if the step is due; whether it was."""

    def after_training(self, state):
        """Evaluate after the last step."""

    def evaluate_all(self, state):
        """Evaluate without training (`skip_train`)."""


class MetricsPart(Protocol):
    """Metrics; `MetricsLogger`."""

    def opened(self, start_iteration: int) -> AbstractContextManager:
        """Inside, steps are reported."""

    def log_step(self, report, train_state):
        """Report a step (StepReport, TrainState)."""
