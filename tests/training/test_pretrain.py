"""pretrain on a small model: losses against float64, every kind of data, every way of splitting it."""

import json
import os

import numpy as np
import pytest

from tests.training import tiny


def read_metrics(folder):
    with open(os.path.join(folder, "metrics.jsonl"), encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def run_pretrain(folder, loader=None, config=None, **arguments):
    """(reported losses, norms, weights) of a run."""
    from mindspeed_ms.core import comm
    from mindspeed_ms.training.training import pretrain
    from mindspeed_ms.training.utils import set_parallel_context, set_seed

    all_config = tiny.make_config(folder, **(config or {}))
    set_parallel_context(all_config.parallel_config)
    set_seed(all_config.training_config.seed)
    run = pretrain(
        arguments.pop("provider", None), tiny.model_provider, None, all_config=all_config, train_data_loader=loader, **arguments
    )
    comm.world_group().barrier()
    lines = [line for line in read_metrics(folder) if "loss" in line]
    return [line["loss"] for line in lines], [line["grad_norm"] for line in lines], tiny.weights_of(run)


STEPS = 6
BATCHES = [tiny.samples(4, seed) for seed in range(STEPS)]


def reference(micro_batches_of_step, per_token=False):
    model = tiny.Reference()
    history = [model.step(micro_batches, per_token) for micro_batches in micro_batches_of_step]
    return [row[0] for row in history], [row[1] for row in history], model.weights


def assert_equals(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=2e-5)
    for name, value in expected[2].items():
        np.testing.assert_allclose(found[2][name], value, atol=2e-5, err_msg=name)


MICRO_BATCHES = [[tiny.rows_of(batch, slice(0, 2)), tiny.rows_of(batch, slice(2, 4))] for batch in BATCHES]


def list_of_full_batches(folder):
    return run_pretrain(folder, BATCHES)


def list_of_micro_batches(folder):
    return run_pretrain(folder, [micro for step in MICRO_BATCHES for micro in step])


def batches_of_a_blend(folder):
    """Its samples say which part they are from, which the model does not take."""
    return run_pretrain(folder, [{"dataset_id": np.zeros(4, np.int16), **batch} for batch in BATCHES])


def generator_of_batches(folder):
    return run_pretrain(folder, (batch for batch in BATCHES))


def samples_by_index(folder):
    dataset = tiny.Samples(4 * STEPS)
    dataset.batch = {name: np.concatenate([batch[name] for batch in BATCHES]) for name in BATCHES[0]}
    return run_pretrain(folder, dataset)


def dataset_of_mindspore(folder):
    import mindspore.dataset as ds

    columns = {name: np.concatenate([batch[name] for batch in BATCHES]) for name in BATCHES[0]}
    return run_pretrain(folder, ds.NumpySlicesDataset(columns, shuffle=False).batch(4))


def function_that_makes_batches(folder):
    """The guide's form: the loader gives rows, get_batch_func names them."""
    rows = [[batch[name] for name in ("tokens", "labels", "loss_mask")] for batch in BATCHES]

    def get_batch(data_iterator):
        tokens, labels, loss_mask = next(data_iterator)
        return {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "scale": None}

    return run_pretrain(folder, rows, get_batch_func=get_batch)


def datasets_provider(folder):
    def provide(numbers):
        assert numbers == (24, 100 * 4, 100 * 4)
        dataset = tiny.Samples(4 * STEPS)
        dataset.batch = {name: np.concatenate([batch[name] for batch in BATCHES]) for name in BATCHES[0]}
        return dataset, None, None

    return run_pretrain(folder, provider=provide)


def megatron_forward_step(folder):
    from functools import partial

    from mindspore import mint, ops

    def loss_func(loss_mask, labels, logits):
        losses = ops.logsumexp(logits, 2) - ops.gather_elements(logits, 2, labels.expand_dims(2)).squeeze(2)
        total, tokens = mint.sum(losses * loss_mask), mint.sum(loss_mask)
        return total, tokens, {"lm loss": (total, tokens)}

    def forward_step(data_iterator, model):
        batch = next(data_iterator)
        logits = model(batch["tokens"], None, batch["loss_mask"])
        return logits, partial(loss_func, batch["loss_mask"], batch["labels"])

    return run_pretrain(folder, BATCHES, forward_step_func=forward_step)


@pytest.mark.parametrize(
    "form",
    [
        list_of_full_batches,
        list_of_micro_batches,
        batches_of_a_blend,
        generator_of_batches,
        samples_by_index,
        dataset_of_mindspore,
        function_that_makes_batches,
        datasets_provider,
        megatron_forward_step,
    ],
    ids=lambda form: form.__name__,
)
def test_every_form_of_data_trains_like_float64(world, tmp_path, form):
    (found,) = world(1)(form, tmp_path)
    assert_equals(found, reference(MICRO_BATCHES))


def epochs_and_iterations(folder):
    from unittest import mock

    from mindspeed_ms.training import data

    def provide(numbers):
        return tiny.Samples(numbers[0]), None, None

    with mock.patch.object(data.logger, "warning") as warning:
        run_pretrain(folder, config={"training": {"epochs": 2}}, provider=provide)
    return [call.args[0] % call.args[1:] for call in warning.call_args_list]


def test_epochs_that_iterations_replace_are_named(world, tmp_path):
    """A provider is asked for the samples of all iterations: no pass of its data ends before."""
    ((said,),) = world(1)(epochs_and_iterations, tmp_path)
    assert said.startswith("training_config.epochs is not used: training_config.training_iters says how long")


def data_parallel(folder, micro_batches):
    """Two ranks with `micro_batches` of one or two rows each, from samples by index: Megatron's order."""
    dataset = tiny.Samples(4 * STEPS)
    dataset.batch = {name: np.concatenate([batch[name] for batch in BATCHES]) for name in BATCHES[0]}
    rows = 2 // micro_batches
    return run_pretrain(
        folder,
        dataset,
        {
            "dataset": {"batch_size": rows, "micro_batch_num": micro_batches},
            "training": {"overlap_grad_reduce": micro_batches == 2, "bucket_size": 20},
        },
    )


def test_two_ranks_train_like_one(world, tmp_path):
    for found in world(2)(data_parallel, tmp_path / "one", 1):
        assert_equals(found, reference(MICRO_BATCHES))
    # rows 0, 1 | 2, 3 of a step go to (rank 0, rank 1) for the first and the second micro-batch
    single = [[tiny.rows_of(batch, slice(row, row + 1)) for row in range(4)] for batch in BATCHES]
    for found in world(2)(data_parallel, tmp_path / "two", 2):
        assert_equals(found, reference(single))


def per_token(folder):
    return run_pretrain(folder, BATCHES, {"training": {"calculate_per_token_loss": True}})


def data_parallel_per_token(folder):
    dataset = tiny.Samples(4 * STEPS)
    dataset.batch = {name: np.concatenate([batch[name] for batch in BATCHES]) for name in BATCHES[0]}
    return run_pretrain(
        folder, dataset, {"training": {"calculate_per_token_loss": True}, "dataset": {"batch_size": 1, "micro_batch_num": 2}}
    )


def test_loss_per_token_does_not_depend_on_the_split(world, tmp_path):
    expected = reference(MICRO_BATCHES, per_token=True)
    assert_equals(world(1)(per_token, tmp_path / "a")[0], expected)
    for found in world(2)(data_parallel_per_token, tmp_path / "b"):
        assert_equals(found, expected)


def data_on_first_tensor_rank(folder, with_function):
    from mindspeed_ms.core import comm

    function = (lambda stream: {**next(stream), "scale": None}) if with_function else None
    loader = BATCHES if comm.get_rank() == 0 else None
    return run_pretrain(folder, loader, {"parallel": {"tensor_model_parallel_size": 2}}, get_batch_func=function)


@pytest.mark.parametrize("with_function", [False, True])
def test_other_tensor_ranks_get_the_batches_of_the_first(world, tmp_path, with_function):
    # the tiny model is not cut: both ranks compute the same, and the norm counts it once
    for found in world(2)(data_on_first_tensor_rank, tmp_path, with_function):
        assert_equals(found, reference(MICRO_BATCHES))
