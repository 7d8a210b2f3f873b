"""Reported losses: the log line, means of an interval, samples without tokens, skipped steps, metrics of all ranks."""

import logging
import math
import os
import re

import numpy as np
import pytest

from tests.training import tiny
from tests.training.test_pretrain import BATCHES, read_metrics, run_pretrain


def logged(folder):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("mindspeed_ms").addHandler(handler)
    try:
        run_pretrain(folder, BATCHES, {"training": {"log_interval": 2}})
    finally:
        logging.getLogger("mindspeed_ms").removeHandler(handler)
    return lines, read_metrics(folder), os.path.getsize(folder / "loss_curve.png")


def test_log_line_has_upstreams_form(world, tmp_path):
    ((lines, metrics, picture),) = world(1)(logged, tmp_path)
    pattern = re.compile(
        r"Epoch: 0, Step: (\d), Loss: \d+\.\d{16}, Finite_grads: True, Loss_scale: 1\.0, Learning_rate: "
        r"0\.0500000000000000, "
        r"Grad_norm: \d+\.\d+, Time: \d+\.\d\d ms, Iteration: \1/6, Consumed_samples: \d+, Tokens_per_second: \d+\.\d$"
    )
    found = [line for line in lines if line.startswith("Epoch")]
    assert len(found) == 3 and all(pattern.match(line) for line in found)
    # the file has each step, the log the mean of two
    assert [line["iteration"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert f"{(metrics[2]['loss'] + metrics[3]['loss']) / 2:.16f}" in found[1] and str(metrics[3]["grad_norm"]) in found[1]
    assert metrics[2]["loss"] != metrics[3]["loss"]
    assert lines[-2].startswith("loss curve") and lines[-1] == "Training success! 6 iterations, 24 samples"
    assert picture > 1000


def step_report(loss, finite=True, **losses):
    from mindspeed_ms.training.metrics import StepReport

    return StepReport({"lm loss": loss, **losses}, 1.0, finite, 1.0, 0.1, 1.0)


@pytest.mark.parametrize(
    "reports, means",
    [
        ([step_report(1.0, aux=4.0), step_report(2.0)], {"lm loss": 1.5, "aux": 4.0}),
        ([step_report(9.0, finite=False), step_report(2.0), step_report(4.0)], {"lm loss": 3.0}),
        ([step_report(2.0), step_report(math.nan)], {"lm loss": 2.0}),
        ([step_report(2.0), step_report(math.nan, finite=False)], {"lm loss": 2.0}),
        ([step_report(5.0, finite=False), step_report(7.0, finite=False)], {"lm loss": 7.0}),
    ],
    ids=["mean", "skipped", "masked", "nan", "all skipped"],
)
def test_mean_losses_of_an_interval(reports, means):
    from mindspeed_ms.training.metrics import IntervalLosses

    interval = IntervalLosses()
    interval.add(step_report(100.0))
    interval.start()
    for report in reports:
        interval.add(report)
    assert interval.means() == means


def caught_lines(folder, batches, config):
    """(lines of the log, message of the error or None, metrics) of a run."""
    from mindspeed_ms.core.dist_checkpointing import folders
    from mindspeed_ms.training.train_step import NothingLearntError

    lines, message = [], None
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("mindspeed_ms").addHandler(handler)
    try:
        run_pretrain(folder, batches, config)
    except NothingLearntError as error:
        message = str(error)
        assert folders.latest_iteration(folder) == 6  # nothing is lost
    finally:
        logging.getLogger("mindspeed_ms").removeHandler(handler)
    return lines, message, read_metrics(folder)


def masked(folder, rows_of_steps):
    """A training whose `rows_of_steps[step]` first rows of each micro-batch (two of two rows in a step) are masked."""
    batches = []
    for batch, rows in zip(BATCHES, rows_of_steps):
        mask = batch["loss_mask"].copy()
        mask[[row for row in range(4) if row % 2 < rows]] = 0.0
        batches.append({**batch, "loss_mask": mask})
    return caught_lines(folder, batches, {"training": {"log_interval": 3}})


def test_masked_samples_are_named_and_left_out(world, tmp_path):
    ((lines, message, metrics),) = world(1)(masked, tmp_path, [0, 1, 2, 0, 0, 0])
    losses = [line["loss"] for line in metrics]
    warnings = [line for line in lines if "no token to learn from" in line]
    assert message is None and losses[2] == "nan" and "nan" not in losses[:2] + losses[3:]
    assert [line.split(" samples")[0] for line in warnings] == ["iteration 2: 2", "iteration 3: 6"]
    (found,) = (line for line in lines if "Iteration: 3/6" in line)
    assert f"Loss: {(losses[0] + losses[1]) / 2:.16f}" in found
    assert lines[-1].endswith("24 samples, 1 of 6 steps without a token, 6 samples without a token (all labels masked)")


def test_a_training_without_any_token_is_an_error(world, tmp_path):
    ((lines, message, metrics),) = world(1)(masked, tmp_path, [2] * 6)
    assert "of 6 steps 6 had no token" in message and {line["loss"] for line in metrics} == {"nan"}
    assert not any("success" in line for line in lines)


def overflowing(folder, finite_steps):
    scales = [1.0 if step in finite_steps else np.inf for step in range(6)]
    batches = [{**batch, "scale": np.full((4, tiny.LENGTH), scale, np.float32)} for batch, scale in zip(BATCHES, scales)]
    half = {"loss_scale_value": 4.0, "loss_scale_factor": 2.0, "loss_scale_window": 10, "hysteresis": 1}
    with_nan = {"check_for_nan_in_loss": False, "check_for_nan_in_grad": False}
    return caught_lines(folder, batches, {"training": {"fp16": True, "min_loss_scale": 2.0, **half, **with_nan}})


def test_all_steps_skipped_is_an_error(world, tmp_path):
    for lines, message, _ in world(2)(overflowing, tmp_path, []):
        assert "no weight changed" in message and "all 6 steps" in message and "5 of them at the minimum" in message
        assert not any("success" in line for line in lines)


def test_overflows_at_the_lowest_loss_scale_are_said_once_and_at_the_end(world, tmp_path):
    ((lines, message, _),) = world(1)(overflowing, tmp_path, [0, 5])
    assert message is None and sum("is at its minimum of 2" in line for line in lines) == 1
    assert lines[-1].endswith("samples, 4 of 6 steps skipped (gradients not finite), 3 of them at the minimum loss scale of 2")


def changing_metrics(folder):
    from mindspeed_ms.core import comm
    from mindspeed_ms.training.losses import LossReducer
    from mindspeed_ms.training.utils import set_parallel_context

    set_parallel_context(tiny.make_config(folder).parallel_config)
    reducer, on_second = LossReducer(), comm.get_rank() == 1
    steps = [
        {"lm loss": 2.0},
        {"lm loss": 4.0, **({"auxiliary": 3.0} if on_second else {})},
        {"lm loss": 1.0},
        {"auxiliary": 5.0},
    ]
    return [reducer.reduce([step]).values for step in steps]


def test_metrics_may_come_and_go(world, tmp_path):
    for first, second, third, fourth in world(2)(changing_metrics, tmp_path):
        assert (first, second, third) == ({"lm loss": 2.0}, {"lm loss": 4.0, "auxiliary": 3.0}, {"lm loss": 1.0})
        assert fourth["auxiliary"] == 5.0 and np.isnan(fourth["lm loss"])


def tokens_of_tensor_ranks(folder):
    from mindspeed_ms.training.losses import LossReducer
    from mindspeed_ms.training.utils import set_parallel_context

    set_parallel_context(tiny.make_config(folder, parallel={"tensor_model_parallel_size": 2}).parallel_config)
    return LossReducer().reduce([{"lm loss": (6.0, 3.0)}, {"lm loss": (2.0, 1.0)}])


def test_tensor_ranks_count_tokens_once(world, tmp_path):
    for losses in world(2)(tokens_of_tensor_ranks, tmp_path):
        assert (losses.values, losses.tokens) == ({"lm loss": 2.0}, 4.0)


def samples_over_context_ranks(folder):
    """(samples without tokens, whether there are tokens): two samples, the first one's tokens all on the second rank."""
    from mindspore import Tensor

    from mindspeed_ms.core import comm, parallel_state
    from mindspeed_ms.core import num_microbatches_calculator as calculator
    from mindspeed_ms.training.losses import LossReducer, TokenMean

    parallel_state.initialize_model_parallel(context_parallel_size=2)
    calculator.init_num_microbatches_calculator(0, None, 2, 2, 1, False)
    mask = np.array([[comm.get_rank()] * 3, [0] * 3], np.float32)
    mean = TokenMean(Tensor(np.float32(2.0)), float(mask.sum()), Tensor(mask))
    losses = LossReducer().reduce([{"lm loss": mean, "metric": (0.0, 0.0)}])
    return losses.samples_without_tokens, losses.has_tokens, losses.values


def test_a_sample_has_tokens_where_any_context_parallel_rank_does(world, tmp_path):
    assert world(2)(samples_over_context_ranks, tmp_path) == [(1, True, {"lm loss": 2.0})] * 2
