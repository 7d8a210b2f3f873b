"""Order of the Trainer's calls with stand-ins for its parts; the learning rate that a step reports."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from tests.training import tiny

STEP = ["of_step", "step", "log_step", "poll", "evaluate", "after_step"]


class Parts:
    """Every part of a Trainer; notes the calls."""

    epoch = 0

    def __init__(self, error=None):
        self.calls, self.error = [], error

    def __getattr__(self, name):
        return lambda *_: self.calls.append(name)

    @contextmanager
    def opened(self, _iteration):
        self.calls.append("open")
        yield
        self.calls.append("close")

    def __call__(self, _data, _iteration, stop):
        self.calls.append("step")
        if self.error is not None:
            raise self.error("bad step")
        return SimpleNamespace(finite_grads=True, has_tokens=True, samples_without_tokens=0), stop


def calls_of(folder, error=None, **training):
    """Calls of a run of two steps, or until `error`, the name of an error in a step."""
    from mindspeed_ms.training import train_step
    from mindspeed_ms.training.data import init_batch_sizes
    from mindspeed_ms.training.trainer import Trainer, TrainState
    from mindspeed_ms.training.utils import set_parallel_context

    all_config = tiny.make_config(folder, training={"training_iters": 2, **training})
    set_parallel_context(all_config.parallel_config)
    init_batch_sizes(all_config)
    error = error and getattr(train_step, error, RuntimeError)
    parts = Parts(error)
    evaluation = SimpleNamespace(
        after_step=lambda _state: parts.calls.append("evaluate"),
        after_training=parts.after_training,
        evaluate_all=parts.evaluate_all,
    )
    shared = dict.fromkeys(("optimizer", "opt_param_scheduler", "train_step", "data", "checkpoints", "metrics"), parts)
    trainer = Trainer(
        all_config=all_config, training_iters=2, train_state=TrainState(), model=[], evaluation=evaluation, **shared
    )
    if error is None:
        trainer.run()
    else:
        with pytest.raises(error):
            trainer.run()
    return parts.calls


@pytest.mark.parametrize("training", [{}, {"exit_interval": 2}], ids=["length", "exit_interval"])
def test_a_training(world, tmp_path, training):
    """The checkpoint is written beside the last evaluation, and the last step is finished after all."""
    ends = ["save", "after_training", "complete", "close", "finish"]
    assert world(1)(calls_of, tmp_path, **training) == [["load", "open", *STEP, *STEP, *ends]]


def test_only_evaluation(world, tmp_path):
    assert world(1)(calls_of, tmp_path, skip_train=True) == [["load", "open", "evaluate_all", "close"]]


@pytest.mark.parametrize("error", ["NonFiniteLossError", "NonFiniteGradientError"])
def test_a_step_that_fails_waits_for_the_checkpoint_before(world, tmp_path, error):
    assert world(1)(calls_of, tmp_path, error) == [["load", "open", "of_step", "step", "complete"]]


def without_data(folder):
    """Calls of a run whose data ends before its first step."""
    from unittest import mock

    from mindspeed_ms.training.data_streams import DataExhausted

    with mock.patch.object(Parts, "of_step", mock.Mock(side_effect=DataExhausted("over")), create=True):
        return calls_of(folder, "RuntimeError")


def test_data_that_ends_leaves_a_complete_checkpoint(world, tmp_path):
    assert world(1)(without_data, tmp_path) == [["load", "open", "save", "complete"]]


def test_the_reported_rate_is_none_of_decoupled_groups():
    from mindspeed_ms.training.train_step import _learning_rate

    groups = [
        {"lr": 0.1, "is_decoupled_lr": False},
        {"lr": 0.2, "is_decoupled_lr": False},
        {"lr": 0.5, "is_decoupled_lr": True},
    ]
    assert _learning_rate(SimpleNamespace(param_groups=groups)) == 0.2
    assert _learning_rate(SimpleNamespace(param_groups=groups[2:])) == 0.5


def samples_of_an_evaluation():
    from mindspeed_ms.core import num_microbatches_calculator as calculator
    from mindspeed_ms.training.evaluation import Evaluation
    from mindspeed_ms.training.trainer import TrainState

    calculator.init_num_microbatches_calculator(0, [2, 2, 8], 8, 2, 1, False)
    state = TrainState(iteration=1)
    settings = SimpleNamespace(eval_interval=1, eval_iters=3)
    evaluation = Evaluation(settings, None, [], SimpleNamespace(valid=[]), None)
    evaluation.evaluate = lambda *_: None
    assert evaluation.after_step(state)
    return calculator.get_current_global_batch_size(), state.consumed_valid_samples


def test_an_evaluation_takes_full_batches_during_a_ramp_up(world):
    assert world(1)(samples_of_an_evaluation) == [(2, 24)]
