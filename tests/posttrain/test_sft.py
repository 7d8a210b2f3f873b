"""Supervised fine-tuning: the loss of a numpy account, in every layout and split into micro-batches; masked samples."""

import numpy as np
import pytest

from mindspeed_ms.testing import small_trainings
from tests.posttrain import runs

MASKED = (3, 6)
LAYOUTS = {
    "tp": ({"tensor_model_parallel_size": 2}, {}),
    "sp": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
    "pp": ({"pipeline_model_parallel_size": 2}, {}),
    "vpp": ({"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}, {}),
    "cp": ({"context_parallel_size": 2}, {}),
    "ring": ({"context_parallel_size": 2, "context_parallel_algo": "megatron_cp_algo"}, {}),
    "dp": ({}, {}),
    "zero": ({"zero_level": "z3"}, {}),
    "recompute": (
        {"tensor_model_parallel_size": 2},
        {"model": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}},
    ),
    "lengths": ({"pipeline_model_parallel_size": 2, "variable_seq_lengths": True}, {"dataset": {"pad_to_multiple_of": 4}}),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return runs.write_conversations(str(tmp_path_factory.mktemp("sft") / "chat"), masked=MASKED)


@pytest.fixture(scope="module")
def one(world, tmp_path_factory, data):
    return world(1)(runs.train, "sft", str(tmp_path_factory.mktemp("one")), data)[0]


def account(world, folder, data, numbers, **settings):
    """(sum of the losses, tokens) of stored samples."""
    logits, batch = world(1)(runs.logits_of, str(folder), data, numbers, **settings)[0]
    mask = batch["loss_mask"]
    return -(runs.log_probabilities(logits, batch["labels"]) * mask).sum(), mask.sum()


def test_the_loss_is_that_of_the_account(world, tmp_path, data, one):
    total, tokens = account(world, tmp_path, data, one["order"][:4])
    assert runs.curve(one)[0] == pytest.approx(total / tokens, rel=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_give_one_curve(world, tmp_path, data, one, layout):
    parallel, sections = LAYOUTS[layout]
    results = world(2)(runs.train, "sft", str(tmp_path), data, parallel=parallel, **sections)
    small_trainings.assert_equal_trainings(
        [runs.with_curves(result) for result in results], [runs.with_curves(one)], False, tolerance=1e-5
    )


@pytest.mark.parametrize("rows", [1, 4])
def test_accumulation_does_not_change_the_gradient(world, tmp_path, data, one, rows):
    (split,) = world(1)(runs.train, "sft", str(tmp_path), data, dataset={"batch_size": rows})
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(runs.curve(split, name), runs.curve(one, name), rtol=1e-5)


def test_mean_of_micro_batches_is_upstreams(world, tmp_path, data, one):
    settings = {"training": {"calculate_per_token_loss": False}}
    (found,) = world(1)(runs.train, "sft", str(tmp_path), data, **settings)
    assert runs.curve(found)[0] == runs.curve(one)[0]  # what is reported is the mean over tokens
    assert abs(runs.curve(found, "grad_norm")[0] / runs.curve(one, "grad_norm")[0] - 1) > 1e-3


def test_masked_batch_changes_nothing(world, tmp_path):
    data = runs.write_conversations(str(tmp_path / "chat"), count=4, masked=range(4))
    settings = {"optimizer": {"weight_decay": 0.0}}
    with pytest.raises(Exception, match="nothing was learnt: of 3 steps 3 had no token"):
        world(1)(runs.train, "sft", str(tmp_path / "run"), data, **settings)
    (before,) = world(1)(runs.train, "sft", str(tmp_path / "other"), data, caught=True, **settings)
    assert set(runs.curve(before)) == {"nan"} and set(runs.curve(before, "grad_norm")) == {0.0}
    assert before["changed"] == []


class Doubled:
    """Module-level factory: a trainer as the document shows it, with one method of its own."""

    def __new__(cls):
        from mindspeed_ms import ops
        from mindspeed_ms.tasks.posttrain.sft_trainer import SFTTrainer

        class DoubledTrainer(SFTTrainer):
            @staticmethod
            def loss_func(input_tensor, output_tensor):
                loss = ops.total(output_tensor * input_tensor) / ops.total(input_tensor)
                return loss * 2.0, {"lm loss": loss * 2.0}

        return DoubledTrainer


def test_own_loss_function_takes_the_place(world, tmp_path, data, one):
    clear = runs.write_conversations(str(tmp_path / "clear"))
    (plain,) = world(1)(runs.train, "sft", str(tmp_path / "a"), clear, dataset={"batch_size": 1})
    (found,) = world(1)(runs.train, "sft", str(tmp_path / "b"), clear, trainer=Doubled, dataset={"batch_size": 1})
    assert runs.curve(found, "grad_norm")[0] == pytest.approx(2 * runs.curve(plain, "grad_norm")[0], rel=1e-5)


def test_packed_conversations_equal_unpacked_ones(world, tmp_path):
    """Four conversations in two packed samples have the gradient of the four by themselves."""
    from tests.datasets.instruction_data import conversation, neat_pack, write_sft

    random = np.random.RandomState(3)
    chats = [conversation(random, 3, 4, runs.VOCABULARY) for _ in range(4)]
    alone = write_sft(tmp_path / "alone", [(ids, labels, [1] * len(ids)) for ids, labels in chats])
    packed = write_sft(tmp_path / "packed", [neat_pack(chats[:2], runs.LENGTH), neat_pack(chats[2:], runs.LENGTH)])
    common = {"training": {"training_iters": 1}}
    (one,) = world(1)(runs.train, "sft", str(tmp_path / "a"), alone, **common)
    neat = {"batch_size": 1, "global_batch_size": 2, "neat_pack": True}
    (two,) = world(1)(runs.train, "sft", str(tmp_path / "b"), packed, dataset=neat, **common)
    for name in ("loss", "grad_norm"):
        assert runs.curve(two, name)[0] == pytest.approx(runs.curve(one, name)[0], rel=1e-5)


EPOCHS = {"sft": runs.write_conversations, "simpo": runs.write_pairs, "prm": runs.write_steps}


@pytest.mark.parametrize("stage", EPOCHS)
def test_epochs_give_the_run_of_as_many_iterations(world, tmp_path, stage):
    """Ten samples have two global batches of four in a pass; the next pass has another order."""
    data = EPOCHS[stage](str(tmp_path / "data"), count=10)
    runs_of = [{"training_iters": 0, "epochs": 2}, {"training_iters": 4}]
    by_epochs, by_steps = (
        world(1)(runs.train, stage, str(tmp_path / f"{number}"), data, training=length)[0]
        for number, length in enumerate(runs_of)
    )
    assert [(line["epoch"], line["step"]) for line in by_epochs["lines"]] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert runs.curve(by_epochs) == runs.curve(by_steps) and by_epochs["order"] == by_steps["order"]


def test_epoch_below_a_global_batch(world, tmp_path):
    data = runs.write_conversations(str(tmp_path / "data"), count=3)
    with pytest.raises(Exception) as error:
        world(1)(runs.train_without_model, "sft", str(tmp_path / "run"), data, training={"training_iters": 0, "epochs": 3})
    assert str(error.value) == (
        "training_config.epochs is 3, but a pass over the training data has 3 samples and no global batch of 4: lower "
        "dataset_config.global_batch_size, or set training_iters (--train-iters) to 2."
    )
