"""Saves: asynchronous ones take the values of their moment, one at a time; replicas share the work; none is repeated."""

import threading
import time
from types import SimpleNamespace

import pytest


def saved_beside_a_change(folder):
    """Values that an asynchronous save has stored when the tensor changes before the writer begins."""
    from unittest import mock

    from mindspeed_ms.core import storage
    from mindspeed_ms.core.dist_checkpointing import save
    from mindspeed_ms.core.dist_checkpointing.manifest import Manifest, whole_slice
    from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
    from mindspeed_ms.core.dist_checkpointing.state import ShardedTensor
    from mindspeed_ms.layout.sharding import ParameterSharding

    tensor = storage.FlatBuffer(8, "float32").tensor
    begin, write = threading.Event(), save.write_shard
    saver = save.CheckpointSaver(folder, async_save=True)
    with mock.patch.object(save, "write_shard", lambda *arguments: (begin.wait(), write(*arguments))[1]):
        saver.save(Manifest(1), [ShardedTensor("weight", whole_slice(ParameterSharding.replicated((8,))), tensor)], {})
        storage.host_array(tensor)[:] = 5.0
        begin.set()
        saver.wait()
    with CheckpointReader(folder / "iter_0000001") as reader:
        return reader.read_whole("weight").tolist(), storage.host_array(tensor).tolist()


def test_an_asynchronous_save_stores_the_values_of_its_moment(world, tmp_path):
    assert world(1)(saved_beside_a_change, tmp_path) == [([0.0] * 8, [5.0] * 8)]


def writers_at_once(folder):
    """Numbers of writers at the start of each write of two asynchronous saves, where the first one is slow."""
    from unittest import mock

    from mindspeed_ms.core import storage
    from mindspeed_ms.core.dist_checkpointing import save
    from mindspeed_ms.core.dist_checkpointing.manifest import Manifest, whole_slice
    from mindspeed_ms.core.dist_checkpointing.state import ShardedTensor
    from mindspeed_ms.layout.sharding import ParameterSharding

    running, counts, write = [], [], save.write_shard

    def slowly(*arguments):
        running.append(None)
        counts.append(len(running))
        time.sleep(0.1)
        result = write(*arguments)
        running.pop()
        return result

    tensor = storage.FlatBuffer(8, "float32").tensor
    tensors = [ShardedTensor("weight", whole_slice(ParameterSharding.replicated((8,))), tensor)]
    saver = save.CheckpointSaver(folder, async_save=True)
    with mock.patch.object(save, "write_shard", slowly):
        for iteration in (1, 2):
            saver.save(Manifest(iteration), tensors, {})
        saver.wait()
    return counts


def test_one_checkpoint_is_written_at_a_time(world, tmp_path):
    """The copies of two would be in memory, and they would be published in any order; of spare ones see below."""
    assert world(1)(writers_at_once, tmp_path) == [[1, 1]]


def shares():
    """Keys of the tensors that each rank writes where both hold all."""
    from mindspeed_ms.core.dist_checkpointing.manifest import whole_slice
    from mindspeed_ms.core.dist_checkpointing.save import share_of_this_rank
    from mindspeed_ms.layout.sharding import ParameterSharding

    sizes = {"a": 1, "b": 4, "c": 3, "d": 2}
    tensors = [
        SimpleNamespace(key=key, slice=whole_slice(ParameterSharding.replicated((size,))), nbytes=size)
        for key, size in sizes.items()
    ]
    return [tensor.key for tensor in share_of_this_rank(tensors)]


def test_shares_of_replicas_are_equal(world):
    assert world(2)(shares) == [["a", "b"], ["c", "d"]]


def saves(folder, loaded_from, monkeypatch):
    """(manager at iteration 4 that resumed from `loaded_from`, list that takes its calls)."""
    from mindspeed_ms.training import checkpoint_manager, checkpointing
    from mindspeed_ms.training.trainer import TrainState

    settings = SimpleNamespace(
        save_enabled=True,
        output_dir=str(folder),
        keep_checkpoint_max=5,
        async_save=True,
        crc_check=False,
        ckpt_format=None,
        prefix="network",
        no_save_optim=False,
        no_save_rng=False,
        no_load_rng=True,
        new_dataset=True,
    )
    calls = []
    monkeypatch.setattr(checkpointing, "save_checkpoint", lambda *arguments: calls.append("save"))
    manager = checkpoint_manager.CheckpointManager(
        SimpleNamespace(training_config=settings, lora_config=SimpleNamespace(use_lora=False)),
        checkpoint_manager.StartingPoint(str(loaded_from / "iter_0000004"), True),
        TrainState(),
        [],
        None,
        None,
        SimpleNamespace(positions=dict, start_anew=lambda consumed: None),
    )
    manager._savers[False] = SimpleNamespace(wait=lambda: calls.append("wait"))
    manager._resume(SimpleNamespace(manifest=SimpleNamespace(states={"train_state": {"iteration": 4}})))
    return manager, calls


def test_a_save_waits_for_the_spare_one_before(tmp_path, monkeypatch):
    manager, calls = saves(tmp_path, tmp_path, monkeypatch)
    manager.state.iteration = 5
    manager.save()
    assert calls == ["wait", "save"]
    manager.save()  # exists now
    assert calls == ["wait", "save"]


@pytest.mark.parametrize("same", [True, False])
def test_what_was_loaded_is_saved_into_another_folder_alone(tmp_path, monkeypatch, same):
    manager, calls = saves(tmp_path, tmp_path if same else tmp_path / "other", monkeypatch)
    manager.save()
    assert calls == ([] if same else ["wait", "save"])


def test_a_file_that_cannot_be_replaced_is_named_and_stays(tmp_path):
    from mindspeed_ms.core.dist_checkpointing.durable import replace_file

    path = tmp_path / "about.json"
    replace_file(str(path), b"old")
    (tmp_path / "about.json.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*/about\.json'$"):
        replace_file(str(path), b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
