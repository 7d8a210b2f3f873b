"""Errors, reports, evaluation and small tools of the training loop."""

import logging
import math
import os
import re
from types import SimpleNamespace

import numpy as np
import pytest

from tests.training import tiny
from tests.training.test_pretrain import BATCHES, MICRO_BATCHES, read_metrics, reference, run_pretrain


def caught_message(kind, *arguments, **keywords):
    with pytest.raises(kind) as caught:
        run_pretrain(*arguments, **keywords)
    return str(caught.value)


def bad_batches(folder):
    batch = BATCHES[0]
    return [
        caught_message(ValueError, folder, [{"tokens": batch["tokens"], "label": batch["labels"]}]),
        caught_message(ValueError, folder, [tiny.samples(3)]),
        caught_message(ValueError, folder, [{**batch, "labels": batch["labels"][:2]}]),
        caught_message(ValueError, folder, [[batch["tokens"]]]),
        caught_message(ValueError, folder, [{**batch, "tokens": [[1, 2], [3]]}]),
        caught_message(ValueError, folder, []),
        caught_message(ValueError, folder, None),
        caught_message(ValueError, folder, 7),
        caught_message(ValueError, folder, tiny.Samples(1)),
        caught_message(RuntimeError, folder, iter(BATCHES[:2])),
        caught_message(ValueError, folder, BATCHES, {"training": {"training_iters": 0}}),
    ]


def test_bad_data_is_named(world, tmp_path):
    (messages,) = world(1)(bad_batches, tmp_path)
    for message, words in zip(
        messages,
        [
            "lacks labels, loss_mask and has unknown label",
            "a batch has 3 rows: expected 4",
            "entry 'labels' of a batch has 2",
            "a batch is a list",
            "entry 'tokens' of a batch is a list that makes no array",
            "training data is empty",
            "train_data_loader is None on tensor-parallel rank 0",
            "train_data_loader is a int",
            "the training data has 1 samples",
            "ran out after iteration 2 of 6",
            "nothing to train: training_iters is 0",
        ],
    ):
        assert words in message, message


def run_whose_data_ends_on_one_rank(folder):
    from mindspeed_ms.core import comm
    from mindspeed_ms.core.dist_checkpointing import folders

    loader = iter(BATCHES[:2]) if comm.get_rank() == 1 else BATCHES
    message = caught_message(RuntimeError, folder, loader)
    return message, folders.latest_iteration(folder)


def test_a_run_whose_data_ends_on_one_rank_ends_on_all(world, tmp_path):
    """The others' data has no end; the state of the last whole step is saved."""
    for message, saved in world(2)(run_whose_data_ends_on_one_rank, tmp_path):
        assert "ran out after iteration 2 of 6: the data loader is an iterator" in message and saved == 2


def bad_arguments(folder):
    messages = []
    for arguments in ({"model_type": "retro_encoder"}, {"model_provider_func": None}):
        from mindspeed_ms.training.training import pretrain

        with pytest.raises(ValueError) as caught:
            pretrain(
                None,
                **{"model_provider_func": tiny.model_provider, "model_type": None, **arguments},
                all_config=tiny.make_config(folder),
                train_data_loader=BATCHES,
            )
        messages.append(str(caught.value))
    return messages


def test_bad_arguments_are_named(world, tmp_path):
    (messages,) = world(1)(bad_arguments, tmp_path)
    assert "'retro_encoder'" in messages[0] and "model_provider_func" in messages[1]


def nan_loss(folder, go_on, value=np.nan):
    from mindspeed_ms.core import comm
    from mindspeed_ms.training.train_step import NonFiniteLossError

    batches = [{**batch, "scale": np.ones((4, tiny.LENGTH), np.float32)} for batch in BATCHES]
    if comm.get_rank() == 1:
        batches[2]["scale"][:, 0] = value  # where the mask is 1
    if go_on:
        decay = {"lr_decay_style": "linear", "lr_decay_iters": 10}
        config = {"training": {"check_for_nan_in_loss": False}, "optimizer": decay}
        losses, _, weights = run_pretrain(folder, batches, config)
        lines = [(line["skipped_iterations"], line["learning_rate"]) for line in read_metrics(folder)]
        return losses, lines, all(np.isfinite(value).all() for value in weights.values())
    # the check of the gradients must not come first: it knows neither the iteration nor the other ranks
    return caught_message(NonFiniteLossError, folder, batches, {"training": {"check_for_nan_in_grad": True}})


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_loss_stops_all_ranks_and_names_iteration_and_rank(world, tmp_path, value):
    for message in world(2)(nan_loss, tmp_path, False, value):
        assert "iteration 3" in message and "rank 1 (micro-batch 0)" in message and "rank 0" not in message


def test_nan_loss_is_left_out_if_told_so(world, tmp_path):
    for losses, lines, finite in world(2)(nan_loss, tmp_path, True):
        skipped, rates = zip(*lines)
        assert losses[2] == "nan" and skipped == (0, 0, 1, 1, 1, 1) and finite
        # the schedule waits, too
        assert rates == pytest.approx([0.05 * (1 - steps / 10) for steps in (0, 1, 2, 2, 3, 4)])


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


def evaluated(folder):
    seen = []
    config = {"training": {"eval_interval": 3, "eval_iters": 2}}
    valid = [tiny.samples(4, 50), tiny.samples(4, 51)]
    run_pretrain(
        folder,
        BATCHES,
        config,
        valid_data_loader=valid,
        test_data_loader=valid[:1],
        process_non_loss_data_func=lambda data, iteration, writer: seen.append((len(data), iteration, writer)),
    )
    return [line for line in read_metrics(folder) if "loss" not in line], seen


def test_evaluation_reports_the_loss_over_all_tokens(world, tmp_path):
    ((lines, seen),) = world(1)(evaluated, tmp_path)
    model = tiny.Reference()
    for micro_batches in MICRO_BATCHES[:3]:
        model.step(micro_batches)
    parts = [model.loss_and_gradients(tiny.samples(4, seed)) for seed in (50, 51)]
    expected = sum(part[0] for part in parts) / sum(part[1] for part in parts)
    assert [line["iteration"] for line in lines] == [3, 6, 6]
    assert lines[0]["valid_loss"] == pytest.approx(expected, rel=2e-6)
    assert lines[0]["valid_perplexity"] == pytest.approx(np.exp(expected), rel=1e-5)
    assert "test_loss" in lines[2]
    assert seen == [(2, 3, None), (2, 6, None), (2, 6, None)]


def epochs(folder):
    dataset = tiny.Samples(13)
    config = {"training": {"training_iters": 0, "epochs": 2}}
    losses, _, _ = run_pretrain(folder, dataset, config)
    return len(losses), [(line["epoch"], line["step"]) for line in read_metrics(folder)]


def test_epochs_end_the_training(world, tmp_path):
    ((count, steps),) = world(1)(epochs, tmp_path)
    assert count == 6 and steps == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]


class EndingOnRankOne:
    """Micro-batches that end at once on rank 1."""

    stream = SimpleNamespace(is_finite=True)

    def take(self, count):
        from mindspeed_ms.core import comm
        from mindspeed_ms.training.data_streams import DataExhausted

        if comm.get_rank() == 1:
            raise DataExhausted("rank 1 has no more")
        return [None] * count


def data_that_ends_on_one_rank():
    from mindspeed_ms.core import num_microbatches_calculator as calculator
    from mindspeed_ms.training.data import TrainingData
    from mindspeed_ms.training.data_streams import DataExhausted

    calculator.init_num_microbatches_calculator(0, None, 2, 1, 2, False)
    data = TrainingData(EndingOnRankOne(), None, None, 1)
    with pytest.raises(DataExhausted) as caught:
        data.of_step()
    return str(caught.value)


def test_ranks_end_together_when_the_data_of_one_ends(world):
    assert world(2)(data_that_ends_on_one_rank) == ["rank 1 has no more"] * 2


def ramped(folder):
    config = {
        "dataset": {"rampup_batch_size": [2, 2, 8], "global_batch_size": 6, "batch_size": 1, "micro_batch_num": 6},
        "training": {"training_iters": 0},
    }
    config["dataset"]["train_samples"] = 30
    run_pretrain(folder, tiny.Samples(40), config)
    return [line["consumed_samples"] for line in read_metrics(folder)]


def test_batch_size_ramp_up(world, tmp_path):
    (consumed,) = world(1)(ramped, tmp_path)
    assert consumed == [2, 4, 8, 14, 20, 26]


def without_tensorboard(folder):
    from mindspeed_ms.training import tensorboard

    tensorboard.find_spec = lambda _name: None  # this process is a fork
    return caught_message(RuntimeError, folder, BATCHES, {"training": {"tensorboard_dir": str(folder / "events")}})


def test_tensorboard_without_a_library_is_an_error(world, tmp_path):
    (message,) = world(1)(without_tensorboard, tmp_path)
    assert "tensorboardX" in message


def test_reference_learns():
    losses, _, _ = reference(MICRO_BATCHES)
    assert losses[-1] < losses[0]


class Recorder:
    """Stands in for a SummaryWriter."""

    def __init__(self):
        self.names = {}

    def add_scalar(self, name, value, step):
        self.names.setdefault(name, []).append(step)

    def flush(self):
        pass


def events(folder):
    from mindspeed_ms.training.tensorboard import set_tensorboard_writer

    recorder = Recorder()
    set_tensorboard_writer(recorder)
    try:
        config = {"training": {"tensorboard_log_interval": 2, "eval_interval": 3, "eval_iters": 1}}
        run_pretrain(folder, BATCHES, config, valid_data_loader=BATCHES[:1])
    finally:
        set_tensorboard_writer(None)
    return recorder.names


def test_tensorboard_gets_the_same_numbers(world, tmp_path):
    (names,) = world(1)(events, tmp_path)
    assert names == {
        "loss": [2, 4, 6],
        "learning-rate": [2, 4, 6],
        "grad-norm": [2, 4, 6],
        "loss-scale": [2, 4, 6],
        "valid-loss": [3, 6],
    }


def unequal_weights():
    from mindspeed_ms.core import comm, storage
    from mindspeed_ms.training.housekeeping import check_weights_across_data_parallel_ranks
    from tests.optimizer.test_optimizer import make

    chunk, _ = make()
    check_weights_across_data_parallel_ranks([chunk], 3)
    if comm.get_rank() == 1:
        storage.as_array(chunk.buffers[0].param_buffer.tensor)[5] += 1.0
    with pytest.raises(RuntimeError) as caught:
        check_weights_across_data_parallel_ranks([chunk], 4)
    return str(caught.value)


def test_unequal_weights_name_iteration_and_ranks(world):
    for message in world(2)(unequal_weights):
        assert "after iteration 4" in message and "ranks [1] differ" in message


def collected(folder):
    import gc

    counts = []
    gc.callbacks.append(lambda phase, details: counts.append(phase))
    try:
        run_pretrain(folder, BATCHES, {"training": {"manual_gc": True, "manual_gc_interval": 3}})
    finally:
        gc.callbacks.pop()
    return gc.isenabled()


def test_manual_garbage_collection_ends_with_the_run(world, tmp_path):
    assert world(1)(collected, tmp_path) == [True]


def ramp_up(folder):
    """4, 4, 8 and 8 samples of 28; evaluations of 8."""
    numbers = []

    def provide(samples):
        numbers.extend(samples)
        return tiny.Samples(28), None, None

    config = {
        "dataset": {"global_batch_size": 8, "micro_batch_num": 4, "rampup_batch_size": [4, 4, 8], "train_samples": 28},
        "training": {"training_iters": 0, "eval_interval": 1, "eval_iters": 1},
        "optimizer": {"lr_decay_style": "linear", "weight_decay_incr_style": "cosine"},
    }
    run_pretrain(folder, None, config, provider=provide, valid_data_loader=[tiny.samples(8, 50)])
    return numbers, read_metrics(folder)


def test_ramp_up_with_samples_follows_megatron(world, tmp_path):
    ((numbers, lines),) = world(1)(ramp_up, tmp_path)
    steps = [line for line in lines if "loss" in line]
    assert [line["consumed_samples"] for line in steps] == [4, 8, 16, 24]
    # the decay ends at train_samples, not at 4 steps of the full batch
    assert [line["learning_rate"] for line in steps] == pytest.approx([0.05 * (1 - used / 28) for used in (0, 4, 8, 16)])
    assert numbers == [28, (4 + 1) * 8, 8]
    model = tiny.Reference(weight_decay=0.0)
    batch = tiny.samples(28)
    model.step([tiny.rows_of(batch, slice(0, 2)), tiny.rows_of(batch, slice(2, 4))])
    total, tokens, _ = model.loss_and_gradients(tiny.samples(8, 50))
    assert next(line for line in lines if "valid_loss" in line)["valid_loss"] == pytest.approx(total / tokens, rel=2e-6)


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
