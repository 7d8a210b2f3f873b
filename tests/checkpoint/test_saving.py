"""Saves: asynchronous ones take the values of their moment, one at a time; replicas share the work."""

import threading
import time

from mindspeed_ms.testing import checkpoint_runs as runs


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
    """Numbers of writers at the start of each write, where every save is slower than the steps between them."""
    from unittest import mock

    from mindspeed_ms.core.dist_checkpointing import save

    running, counts, write = [], [], save.write_shard

    def slowly(*arguments):
        running.append(None)
        counts.append(len(running))
        time.sleep(0.1)
        result = write(*arguments)
        running.pop()
        return result

    with mock.patch.object(save, "write_shard", slowly):
        runs.train(folder, training={"async_save": True, "non_persistent_save_interval": 1})
    return counts


def test_one_checkpoint_is_written_at_a_time(world, tmp_path):
    """Spare and lasting ones: the copies of two would be in memory, and they would be published in any order."""
    assert world(1)(writers_at_once, tmp_path) == [[1, 1, 1, 1]]


def shares():
    """Keys of the tensors that each rank writes where both hold all."""
    from types import SimpleNamespace

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
