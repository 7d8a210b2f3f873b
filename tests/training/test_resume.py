"""Checkpoints: a training that was ended by a signal, a crash or its length continues bit-equal."""

import os
import signal

import numpy as np
import pytest

from tests.training import tiny
from tests.training.test_pretrain import read_metrics, run_pretrain

BATCHES = [tiny.samples(4, seed) for seed in range(8)]


class Interrupting:
    """Batches by index that send this process a signal while batch number `at` is read."""

    def __init__(self, at, number=signal.SIGTERM):
        self.at, self.number = at, number

    def __iter__(self):
        for index, batch in enumerate(BATCHES):
            if index == self.at:
                os.kill(os.getpid(), self.number)
            yield batch


def config(**training):
    return {"training": {"training_iters": 8, "resume_training": True, **training}}


def whole(folder):
    return run_pretrain(folder, BATCHES, config())


def interrupted(folder, number):
    """A signal in step 4; the second call continues."""
    from mindspeed_ms.core import comm
    from mindspeed_ms.core.dist_checkpointing import folders

    before = signal.getsignal(signal.SIGTERM)
    # only rank 0 gets the signal, all end
    loader = Interrupting(3, number) if comm.get_rank() == 0 else BATCHES
    losses, _, _ = run_pretrain(folder, loader, config())
    assert len(losses) == 4 and signal.getsignal(signal.SIGTERM) == before
    assert folders.latest_iteration(folder) == 4
    return run_pretrain(folder, BATCHES, config())


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_resuming_is_bit_equal(world, tmp_path, size, number):
    expected = world(size)(whole, tmp_path / "whole")
    for found, wanted in zip(world(size)(interrupted, tmp_path / "parts", number), expected):
        assert found[0] == wanted[0] and found[1] == wanted[1]
        assert all(np.array_equal(found[2][name], value) for name, value in wanted[2].items())


def in_pieces(folder, kind):
    """Eight steps as 3 + 3 + 2 by exit_interval, with data that has to be found again."""
    dataset = tiny.Samples(20, 4)
    for _ in range(3):
        loader = {"samples": dataset, "list": BATCHES[:5]}[kind]
        extra = {"dataset": {"shuffle": True}} if kind == "samples" else {}
        result = run_pretrain(folder, loader, {**config(exit_interval=3), **extra})
    return result, [(line["epoch"], line["step"]) for line in read_metrics(folder)]


def in_one_piece(folder, kind):
    dataset = tiny.Samples(20, 4)
    extra = {"dataset": {"shuffle": True}} if kind == "samples" else {}
    return run_pretrain(folder, {"samples": dataset, "list": BATCHES[:5]}[kind], {**config(), **extra})


@pytest.mark.parametrize("kind", ["samples", "list"])
def test_position_in_the_data_is_restored_over_epochs(world, tmp_path, kind):
    (wanted,) = world(1)(in_one_piece, tmp_path / "whole", kind)
    ((found, steps),) = world(1)(in_pieces, tmp_path / "parts", kind)
    assert found[0] == wanted[0]
    assert steps == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 1), (1, 2), (1, 3)]


def complete(folder):
    import logging

    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("mindspeed_ms").addHandler(handler)
    try:
        first = run_pretrain(folder, BATCHES, config())
        second = run_pretrain(folder, BATCHES, config())
        third = run_pretrain(folder, BATCHES, config(training_iters=9))
    finally:
        logging.getLogger("mindspeed_ms").removeHandler(handler)
    return first, second, third, messages


def test_a_finished_training_says_how_to_go_on(world, tmp_path):
    ((first, second, third, messages),) = world(1)(complete, tmp_path)
    assert first[0] == second[0] and third[0][:8] == first[0] and len(third[0]) == 9
    assert any("training is complete" in message and "--train-iters" in message for message in messages)


def without_a_step(folder):
    """Iterations that were saved: by a run whose data ends, by one that continues it, and by one elsewhere."""
    from mindspeed_ms.testing.checkpoint_runs import Messages

    saved = []
    for name, extra in (("run", {}), ("run", {}), ("other", {"load_checkpoint": str(folder / "run")})):
        with Messages() as texts:
            run_pretrain(folder / name, BATCHES[:2], config(epochs=1, **extra))
        saved.append([text.split(":")[0] for text in texts if text.startswith("saved checkpoint")])
    return saved


def test_a_run_without_a_step_saves_only_where_its_state_is_missing(world, tmp_path):
    (saved,) = world(1)(without_a_step, tmp_path)
    names = [("run", "iteration 2"), None, ("other", "iteration 2")]
    for texts, name in zip(saved, names):
        assert len(texts) == (name is not None), texts
        assert name is None or (name[0] in texts[0] and name[1] in texts[0])


def keep_two(folder):
    from mindspeed_ms.core.dist_checkpointing import folders

    run_pretrain(folder, BATCHES, config(save_interval=2, keep_checkpoint_max=2))
    return sorted(folders.iterations_in(folder)), sorted(os.listdir(folder))


def test_old_checkpoints_go_when_the_new_one_is_complete(world, tmp_path):
    for iterations, names in world(2)(keep_two, tmp_path):
        assert iterations == [6, 8]
        assert names == ["iter_0000006", "iter_0000008", "latest_checkpointed_iteration.txt", "loss_curve.png", "metrics.jsonl"]
        assert sorted(os.listdir(tmp_path / "iter_0000008")) == [
            "manifest.json",
            "rank_00000.json",
            "rank_00001.json",
            "state_00000.safetensors",
            "state_00001.safetensors",
        ]


def weights_only(folder):
    first = run_pretrain(folder / "first", BATCHES, config())
    loaded = {
        "training": {"training_iters": 1, "load_checkpoint": str(folder / "first")},
        "optimizer": {"learning_rate": 1e-12, "weight_decay": 0.0},
    }
    second = run_pretrain(folder / "second", BATCHES, loaded)
    loaded["training"] = {"training_iters": 1, "pretrained_checkpoint": str(folder / "first"), "resume_training": True}
    third = run_pretrain(folder / "third", BATCHES, loaded)
    assert len(third[0]) == 1 and all(np.array_equal(value, third[2][name]) for name, value in second[2].items())
    return first, second


def test_weights_alone_start_a_new_training(world, tmp_path):
    ((first, second),) = world(1)(weights_only, tmp_path)
    for name, value in first[2].items():
        np.testing.assert_allclose(second[2][name], value, atol=1e-9)


def failing_save(folder, **training):
    """Rank 1 cannot write: every rank is told, and the checkpoint before stays the newest."""
    from mindspeed_ms.core import comm
    from mindspeed_ms.core.dist_checkpointing import save
    from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
    from mindspeed_ms.core.dist_checkpointing.load import find_checkpoint

    run_pretrain(folder, BATCHES[:2] * 4, config(training_iters=2))
    write = save.write_shard

    def broken(*arguments):
        raise OSError(28, "No space left on device")

    if comm.get_rank() == 1:
        save.write_shard = broken
    try:
        with pytest.raises(CheckpointError) as caught:
            run_pretrain(folder, BATCHES[:2] * 4, config(training_iters=4, **training))
    finally:
        save.write_shard = write
    newest = find_checkpoint(folder, crc_check=True)
    return str(caught.value), newest, sorted(name for name in os.listdir(folder) if name.startswith("iter"))


@pytest.mark.parametrize("async_save", [False, True])
def test_failed_save_leaves_the_checkpoint_before(world, tmp_path, async_save):
    for message, newest, names in world(2)(failing_save, tmp_path, async_save=async_save):
        assert "rank 1" in message and "No space left" in message
        assert newest.endswith("iter_0000002") and names == ["iter_0000002"]


def bad_checkpoints(folder):
    from mindspeed_ms.core.dist_checkpointing import folders
    from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError

    run_pretrain(folder, BATCHES, config(training_iters=2))
    messages = []

    def expect(function, *arguments, **keywords):
        with pytest.raises(CheckpointError) as caught:
            function(*arguments, **keywords)
        messages.append(str(caught.value))

    expect(run_pretrain, folder / "b", BATCHES, {"training": {"load_checkpoint": str(folder / "nowhere")}})
    expect(run_pretrain, folder / "b", BATCHES, {"training": {"load_checkpoint": str(folder / "nowhere"), "ckpt_step": 7}})
    assert not (folder / "b").exists()  # found before anything is built
    expect(run_pretrain, folder, BATCHES, config(ckpt_step=7))
    own = folder / "iter_0000002" / "rank_00000.json"
    own.rename(folder / "aside")
    expect(run_pretrain, folder, BATCHES, config())
    (folder / "aside").rename(own)
    path = folder / "iter_0000002" / "state_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 0xFF
    path.write_bytes(content)
    expect(run_pretrain, folder, BATCHES, config())
    expect(run_pretrain, folder, BATCHES, config(crc_check=True))
    (folder / folders.TRACKER_FILE).write_text("release it")
    expect(run_pretrain, folder, BATCHES, config())
    return messages


def test_missing_and_damaged_checkpoints_are_named(world, tmp_path):
    (messages,) = world(1)(bad_checkpoints, tmp_path)
    expected = (
        "nowhere",
        "nowhere",
        "iteration 7",
        "rank_00000.json is missing",
        "the check sum of tensor",
        "holds no checkpoint that can be read",
        "'release it'",
    )
    for message, words in zip(messages, expected):
        assert words in message
