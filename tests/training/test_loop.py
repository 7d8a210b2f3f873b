"""Errors, reports, evaluation and small tools of the training loop."""

from unittest import mock

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


def evaluated_without_tokens(folder):
    from mindspeed_ms.training import metrics

    none, some = tiny.samples(4, 50), tiny.samples(4, 50)
    none["loss_mask"][:], some["loss_mask"][1:] = 0.0, 0.0
    config = {"training": {"training_iters": 1, "eval_interval": 1, "eval_iters": 1}}
    with mock.patch.object(metrics.logger, "warning") as warn:
        run_pretrain(folder, BATCHES, config, valid_data_loader=[none], test_data_loader=[some])
    lines = [call.args[0] % call.args[1:] for call in warn.call_args_list]
    return read_metrics(folder)[1:], [line for line in lines if "have no token" in line]


def test_an_evaluation_without_a_token_says_so(world, tmp_path):
    (((valid, test), warned),) = world(1)(evaluated_without_tokens, tmp_path)
    assert valid == {"iteration": 1, "valid_samples_without_tokens": 4}
    assert test["test_samples_without_tokens"] == 3 and test["test_loss"] > 0
    assert "valid at iteration 1: 4 of 4 samples have no token (all labels are masked): there is no loss" in warned[0]
    assert "test at iteration 1: 3 of 4 samples have no token" in warned[1] and "left out of the mean loss" in warned[1]


def epochs(folder):
    dataset = tiny.Samples(13)
    config = {"training": {"training_iters": 0, "epochs": 2}}
    losses, _, _ = run_pretrain(folder, dataset, config)
    return len(losses), [(line["epoch"], line["step"]) for line in read_metrics(folder)]


def test_epochs_end_the_training(world, tmp_path):
    ((count, steps),) = world(1)(epochs, tmp_path)
    assert count == 6 and steps == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]


def test_epochs_below_a_global_batch_are_an_error(world, tmp_path):
    with pytest.raises(
        Exception, match=r"has less than a global batch of 4: lower .*global_batch_size.*, or set training_iters"
    ):
        world(1)(short_epochs, tmp_path)


def short_epochs(folder):
    run_pretrain(folder, tiny.Samples(3), {"training": {"training_iters": 0, "epochs": 2}})


@pytest.mark.parametrize("lengths, expected", [([5, 3], 6), ([None, 4], 8), ([3, 0], None)])
def test_epochs_are_those_of_the_shortest_data(tmp_path, lengths, expected):
    """Of the ranks that have some."""
    from mindspeed_ms.training import data

    config = tiny.make_config(tmp_path, training={"training_iters": 0, "epochs": 2})
    group = mock.Mock(all_gather_object=lambda _own: lengths)
    with mock.patch.object(data.comm, "world_group", lambda: group), mock.patch.object(data, "calculator"):
        if expected is None:
            with pytest.raises(ValueError, match="less than a global batch"):
                data.resolve_training_iters(config, None)
        else:
            assert data.resolve_training_iters(config, None) == expected


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

    with mock.patch.object(tensorboard, "find_spec", lambda _name: None):
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
