"""What can be asked of a load: precision, padding of the vocabulary, parts of the state, strictness; what a rank reads."""

import os

import numpy as np
import pytest

from mindspeed_ms.testing import checkpoint_runs as runs

TP2 = {"tensor_model_parallel_size": 2}
WORD_EMBEDDINGS = "language_model.embedding.word_embeddings.weight"


@pytest.fixture(scope="module")
def saved(world, tmp_path_factory):
    """Folder of a run of one rank that was saved after step 2 of 4."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, world(1)(runs.train, folder, training={"exit_interval": 2})[0]


def resume(folder, load, training=None, **settings):
    training = {
        "load_checkpoint": str(load),
        "resume_training": True,
        "save_interval": None,
        "save_enabled": False,
        **(training or {}),
    }
    return runs.train(folder, training=training, **settings)


def fails(folder, load, training=None, **settings):
    """Text of the error of `resume`."""
    from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError

    with pytest.raises((CheckpointError, ValueError)) as caught:
        resume(folder, load, training, **settings)
    return str(caught.value)


# ---- precision -------------------------------------------------------------------------------------------------------


def change_precision(folder, before, after):
    """(losses of step 3 and 4, log) of a run saved in one precision and continued in another."""
    first = runs.train(folder / "first", training={"exit_interval": 2, **before})
    return first, resume(folder / "second", folder / "first", after)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            {},
            {"bf16": True},
            ["bfloat16 weights from the checkpoint's float32 weights", "float32 masters from the checkpoint's float32 weights"],
        ),
        ({"bf16": True}, {}, ["float32 weights from the checkpoint's float32 masters"]),
        ({"bf16": True}, {"bf16": True, **runs.DIST}, []),
    ],
    ids=["to half", "to full", "equal"],
)
def test_precision_changes_are_stated(world, tmp_path, before, after, words):
    (whole,) = world(1)(runs.train, tmp_path / "whole", training=before)
    for _, result in world(2)(change_precision, tmp_path, before, after):
        notes = [text for text in result["log"] if "in another precision" in text]
        assert len(notes) == len(words) and all(word in note for word, note in zip(words, notes)), notes
        tolerance = 1e-2 if words else 1e-3
        np.testing.assert_allclose(result["losses"][4], whole["losses"][4], rtol=tolerance)


def masters_survive(folder):
    """Masters of a half-precision run are the weights of a full-precision one, bit for bit; halves are stored as halves."""
    from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader

    runs.train(folder / "first", training={"exit_interval": 2, "bf16": True})
    weights = resume(folder / "second", folder / "first", {"training_iters": 2})["weights"]
    with CheckpointReader(folder / "first" / "iter_0000002") as reader:
        assert reader.manifest.tensors[WORD_EMBEDDINGS].dtype == "bfloat16"
        return [
            np.array_equal(reader.read_whole(f"optimizer.state.fp32_param.{key}"), values)
            for key, (_, values) in weights.items()
        ]


def test_masters_become_weights(world, tmp_path):
    (equal,) = world(1)(masters_survive, tmp_path)
    assert len(equal) > 10 and all(equal)


def weights_alone(folder, parts, **settings):
    """Names of weights that a step without learning changes after half-precision weights were loaded without their masters."""
    settings["training"] = {"bf16": True, "save_interval": None, **settings.get("training", {})}
    before = runs.train(folder / "first", **{**settings, "training": {**settings["training"], "exit_interval": 2}})
    still = {"learning_rate": 1e-30, "lr_decay_style": "constant", "weight_decay": 0.0}
    training = {**settings["training"], "training_iters": 3 if parts.get("resume_training") else 1, **parts}
    after = resume(folder / "second", folder / "first", **{**settings, "training": training, "optimizer": still})
    return [name for name, (_, values) in before["weights"].items() if not np.array_equal(values, after["weights"][name][1])]


@pytest.mark.parametrize(
    "parts", [{"resume_training": False}, {"no_load_optim": True, "resume_training": True}], ids=["new", "resumed"]
)
@pytest.mark.parametrize(
    "settings", [{}, {"training": runs.DIST}, {"parallel": {"zero_level": "z3"}}], ids=["dp", "dist", "z3"]
)
def test_masters_are_made_of_weights_that_are_loaded_alone(world, tmp_path, parts, settings):
    assert world(2)(weights_alone, tmp_path, parts, **settings) == [[], []]


def without_the_optimizer(folder, load):
    """(whether each weight stays as it was saved in two steps with a rate near zero, rates by iteration)."""
    saved_weights = runs.train(load, training={"exit_interval": 2, "bf16": True})["weights"]
    optimizer = {"learning_rate": 1e-12, "weight_decay": 0.0, "lr_warmup_iters": 4}
    afresh = {"bf16": True, "no_load_optim": True, "training_iters": 8, "exit_interval": 4}
    result = resume(folder, load, afresh, optimizer=optimizer)
    equal = [np.array_equal(saved_weights[key][1], values) for key, (_, values) in result["weights"].items()]
    return equal, result["lr"]


def test_no_load_optim_takes_masters_from_the_weights_and_starts_the_schedule_anew(world, tmp_path):
    ((equal, rates),) = world(1)(without_the_optimizer, tmp_path / "second", tmp_path / "first")
    assert len(equal) > 10 and all(equal)
    assert rates == {3: 0.0, 4: pytest.approx(0.25e-12)}  # Megatron's too: its scheduler is not loaded


# ---- vocabulary ------------------------------------------------------------------------------------------------------


def padded(folder, load, rows, **settings):
    result = resume(folder, load, sizes={"vocab_size": rows}, dataset={"vocab_size": 64}, **settings)
    return result["weights"], result["losses"]


@pytest.mark.parametrize(("before", "after"), [(64, 80), (80, 66), (66, 64)])
def test_padding_of_the_vocabulary_may_change(world, tmp_path, before, after):
    """Without learning, the first 64 rows, which are no padding, are those that were saved."""
    still = {"optimizer": {"learning_rate": 1e-12, "weight_decay": 0.0}, "model": "untied"}
    (first,) = world(1)(
        runs.train,
        tmp_path / "first",
        training={"exit_interval": 2},
        sizes={"vocab_size": before},
        dataset={"vocab_size": 64},
        **still,
    )
    results = world(2)(padded, tmp_path / "second", tmp_path / "first", after, parallel=TP2, **still)
    from mindspeed_ms.layout.parameters import join

    for name in (WORD_EMBEDDINGS, "language_model.output_layer.weight"):
        rows = join([weights[name] for weights, _ in results])
        assert rows.shape[0] == after and np.abs(rows[:64] - first["weights"][name][1][:64]).max() < 1e-9


def test_another_size_is_no_padding(world, tmp_path, saved):
    (text,) = world(1)(fails, tmp_path, saved[0], sizes={"vocab_size": 62})
    assert "has 64 rows of vocabulary, the model here 62" in text and "--padded-vocab-size 64" in text


def padded_rows(folder):
    """Rows of a longer vocabulary that were 7 before a load in another precision."""
    from unittest import mock

    from mindspore import Tensor

    from mindspeed_ms.core import storage
    from mindspeed_ms.core.dist_checkpointing.load import load_tensors, open_checkpoint
    from mindspeed_ms.core.dist_checkpointing.manifest import Manifest, whole_slice
    from mindspeed_ms.core.dist_checkpointing.save import CheckpointSaver
    from mindspeed_ms.core.dist_checkpointing.state import ShardedTensor
    from mindspeed_ms.layout.sharding import ParameterSharding

    def tensor(rows, value, dtype):
        made = storage.FlatBuffer(rows * 2, dtype).slice(0, rows * 2, (rows, 2))
        storage.write(made, Tensor(np.full((rows, 2), value, np.float32)))
        return ShardedTensor("rows", whole_slice(ParameterSharding.replicated((rows, 2))), made, "vocab")

    CheckpointSaver(folder).save(Manifest(1, vocab_size=4), [tensor(4, 3.0, "float32")], {})
    wanted = tensor(6, 7.0, "float16")
    # new memory may be what held the values of `wanted` a moment before
    with open_checkpoint(folder / "iter_0000001") as reader, mock.patch.object(np, "empty", np.zeros):
        load_tensors(reader, [wanted], vocab_size=4)
    return wanted.tensor.asnumpy()[:, 0].tolist()


def test_other_padding_in_another_precision_keeps_the_new_rows(world, tmp_path):
    assert world(1)(padded_rows, tmp_path) == [[3.0] * 4 + [7.0] * 2]


# ---- parts -----------------------------------------------------------------------------------------------------------


def parts_of_the_state(folder, load):
    def first(name, training=None, **settings):
        result = resume(folder / name, load, {"training_iters": 3, **(training or {})}, **settings)
        return result["losses"], result["norms"], result["log"], result["rows"]

    return {
        "all": first("all"),
        "new_dataset": first("data", {"new_dataset": True}),
        "no_load_optim": first("optim", {"no_load_optim": True, "no_load_rng": True}),
        "finetune": first("finetune", {"finetune": True, "resume_training": False, "training_iters": 1}),
        "weights": first("weights", {"resume_training": False, "training_iters": 1}),
        "iteration": first("iteration", {"load_checkpoint": os.path.join(load, "iter_0000002")}),
    }


def test_parts_of_the_state(world, tmp_path, saved):
    folder, before = saved
    (found,) = world(1)(parts_of_the_state, tmp_path, str(folder))
    assert found["iteration"][0] == found["all"][0] and list(found["all"][0]) == [3]
    assert found["all"][3][:12] == list(range(24, 36)) and found["new_dataset"][3][:12] == list(range(12))
    assert found["no_load_optim"][0] == found["all"][0]  # the loss of step 3 does not depend on the moments
    for name in ("finetune", "weights"):
        assert list(found[name][0]) == [1] and found[name][3][:12] == list(range(12))
        assert found[name][0][1] != before["losses"][1] and any("loaded the weights" in text for text in found[name][2])


def released(folder, load):
    """A weights-only checkpoint under `release`."""
    os.makedirs(folder / "run")
    os.symlink(os.path.join(load, "iter_0000002"), folder / "run" / "release")
    (folder / "run" / "latest_checkpointed_iteration.txt").write_text("release\n")
    return resume(folder / "out", folder / "run", {"training_iters": 1, "resume_training": False})["log"]


def test_release_is_found(world, tmp_path, saved):
    (log,) = world(1)(released, tmp_path, str(saved[0]))
    assert any("release" in text and "loaded the weights" in text for text in log)


def from_exported_weights(folder, load):
    from mindspeed_ms.tools.checkpoint.__main__ import main

    weights = folder / "weights"
    assert main(["merge", str(load), str(weights), "--weights-only", "--max-file-size", "1e-5"]) == 0
    still = {"optimizer": {"learning_rate": 1e-12, "weight_decay": 0.0}}
    new = {"resume_training": False, "training_iters": 1}
    first, second = resume(folder / "a", load, new, **still), resume(folder / "b", weights, {**new, "crc_check": True}, **still)
    third = resume(folder / "c", weights, {"training_iters": 1}, **still)
    return first["losses"] == second["losses"] == third["losses"], third["log"]


def test_exported_weights_start_a_training(world, tmp_path, saved):
    ((is_equal, log),) = world(1)(from_exported_weights, tmp_path, saved[0])
    assert is_equal and any("holds weights only: the training starts from them at its beginning" in text for text in log)


def schedules(folder, load):
    def with_options(name, run, checkpoint, function):
        return function(
            folder / name,
            load,
            optimizer={
                "learning_rate": 0.02,
                "override_opt_param_scheduler": run,
                "use_checkpoint_opt_param_scheduler": checkpoint,
            },
        )

    return (
        with_options("a", False, False, fails),
        with_options("b", True, False, resume)["lr"],
        with_options("c", False, True, resume)["lr"],
    )


def test_schedule_of_the_checkpoint_or_of_the_run(world, tmp_path, saved, whole_lr):
    ((text, kept, taken),) = world(1)(schedules, tmp_path, str(saved[0]))
    assert "iter_0000002 was trained with another schedule: optimizer_config.learning_rate is 0.02 here and 0.01 there" in text
    assert "--override-opt-param-scheduler" in text and "--use-checkpoint-opt-param-scheduler" in text
    assert taken == {step: whole_lr[step] for step in (3, 4)}
    assert kept == {step: 2 * whole_lr[step] for step in (3, 4)}


@pytest.fixture
def whole_lr(world, tmp_path):
    return world(1)(runs.train, tmp_path / "whole")[0]["lr"]


# ---- strictness ------------------------------------------------------------------------------------------------------


def strictness(folder, load):
    """A model with one tensor more (an untied head) and one with fewer (no positions)."""
    more = {"untie_embeddings_and_output_weights": True}
    fewer = {"position_embedding_type": "rope"}
    loose = resume(folder / "c", load, {"load_strict": False}, sizes=more)
    return (
        fails(folder / "a", load, sizes=more),
        fails(folder / "b", load, sizes=fewer),
        loose["log"],
        fails(folder / "d", folder / "e"),
        fails(folder / "d", load, {"ckpt_step": 3}),
    )


def test_differences_are_listed(world, tmp_path, saved):
    ((more, fewer, log, nothing, step),) = world(1)(strictness, tmp_path, str(saved[0]))
    assert "iter_0000002 holds another model: model_config.untie_embeddings_and_output_weights is True here" in more
    assert "model_config.position_embedding_type is 'rope' here and" in fewer
    assert any("loaded in part (load_strict is off): missing" in text for text in log)
    assert "it does not exist" in nothing and "no checkpoint of iteration 3: there are [2]" in step


def without_optimizer(folder):
    runs.train(folder / "first", training={"exit_interval": 2, "no_save_optim": True, "no_save_rng": True})
    text = fails(folder / "second", folder / "first")
    return text, resume(folder / "second", folder / "first", {"no_load_optim": True})["log"]


def test_a_checkpoint_of_weights_alone(world, tmp_path):
    ((text, log),) = world(1)(without_optimizer, tmp_path)
    assert "has no optimizer state: set no_load_optim" in text
    assert any("random states start anew: the checkpoint has none" in line for line in log)


def spare(folder):
    """Spare checkpoints at 1 and 3, lasting ones at 2 and 4; the crash before step 4 is made by hand."""
    runs.train(folder, training={"non_persistent_save_interval": 1})
    kept = sorted(os.listdir(folder)), sorted(os.listdir(folder / "non_persistent"))
    (folder / "iter_0000004").rename(folder / "aside")
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    return kept, runs.train(folder, training={"resume_training": True})["log"]


def test_spare_checkpoints_replace_each_other(world, tmp_path):
    (((own, other), log),) = world(1)(spare, tmp_path)
    assert [name for name in own if name.startswith("iter")] == ["iter_0000002", "iter_0000004"]
    assert other == ["iter_0000003", "latest_checkpointed_iteration.txt"]
    assert any("non_persistent/iter_0000003 at iteration 3" in text for text in log)


def missing(folder):
    training = {"resume_training": True, "exit_on_missing_checkpoint": True}
    from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError

    with pytest.raises(CheckpointError, match="holds no checkpoint to resume from"):
        runs.train(folder, training={**training, "load_checkpoint": str(folder)})
    assert not folder.exists()
    result = runs.train(folder, training={"load_checkpoint": str(folder), "resume_training": True, "training_iters": 1})
    return result["losses"]


def test_loading_and_saving_in_one_folder_starts_at_the_beginning(world, tmp_path):
    (losses,) = world(1)(missing, tmp_path / "run")
    assert list(losses) == [1]


# ---- bytes and memory ------------------------------------------------------------------------------------------------
