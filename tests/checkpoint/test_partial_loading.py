"""Loading of parts: bytes that a rank reads, memory, random states of another layout."""

import pytest

from mindspeed_ms.testing import checkpoint_runs as runs
from mindspeed_ms.testing.memory import peak_of
from tests.checkpoint import test_options

saved = test_options.saved  # fixture
TP2 = {"tensor_model_parallel_size": 2}


def bytes_read(folder, load, parallel, training):
    """(bytes that a rank read to load everything, bytes of its slices, of the manifest and its own states)."""
    from mindspeed_ms.training import checkpointing
    from tests.checkpoint.test_format import read_by_this_process

    counts = []
    load_tensors = checkpointing.load_tensors

    def counting(reader, tensors, *arguments):
        tensors = list(tensors)
        load_tensors(reader, tensors, *arguments)  # a process reads compiled kernels in its first load
        before = read_by_this_process()
        load_tensors(reader, tensors, *arguments)
        counts.append((read_by_this_process() - before, sum(tensor.nbytes for tensor in tensors)))

    checkpointing.load_tensors = counting
    try:
        test_options.resume(folder, load, {"training_iters": 2, **training}, model="tied", parallel=parallel)
    finally:
        checkpointing.load_tensors = load_tensors
    return counts[0]


@pytest.mark.parametrize(
    ("parallel", "training"), [(TP2, {}), ({"zero_level": "z3"}, {}), ({}, runs.DIST)], ids=["tp2", "z3", "dp2dist"]
)
def test_a_rank_reads_its_own_bytes(world, tmp_path, saved, parallel, training):
    for read, needed in world(2)(bytes_read, tmp_path, str(saved[0]), parallel, training):
        assert needed <= read <= 1.1 * needed + 4096


def memory(folder, mebibytes):
    """Peak extra memory of save and load, in the size of the largest tensor."""
    from mindspeed_ms.core import storage
    from mindspeed_ms.core.dist_checkpointing.load import load_tensors, open_checkpoint
    from mindspeed_ms.core.dist_checkpointing.manifest import Manifest, whole_slice
    from mindspeed_ms.core.dist_checkpointing.save import CheckpointSaver
    from mindspeed_ms.core.dist_checkpointing.state import ShardedTensor
    from mindspeed_ms.layout.sharding import ParameterSharding

    shape = (mebibytes, 1 << 18)
    whole = whole_slice(ParameterSharding.replicated(shape))

    def tensors(dtype):
        return [
            ShardedTensor(f"tensor{number}", whole, storage.FlatBuffer(mebibytes << 18, dtype).tensor) for number in range(3)
        ]

    saver, loaded = CheckpointSaver(folder), tensors("bfloat16")
    for tensor in (held := tensors("float32")) + loaded:
        storage.host_array(tensor.tensor)[:] = 1  # let the memory exist
    save = peak_of(lambda: saver.save(Manifest(1), held, {}))
    same = peak_of(lambda: load_tensors(open_checkpoint(folder / "iter_0000001"), held))
    cast = peak_of(lambda: load_tensors(open_checkpoint(folder / "iter_0000001"), loaded))
    return [peak / (mebibytes << 20) for peak in (save, same, cast)]


def test_memory_is_bounded_by_the_largest_tensor(world, tmp_path):
    ((save, same, cast),) = world(1)(memory, tmp_path, 48)
    assert save < 0.3 and same < 0.3 and cast < 1.2, (save, same, cast)


def seeds_of_other_layouts():
    """Seeds of random states that start anew, by the iteration of a checkpoint of another layout."""
    from types import SimpleNamespace
    from unittest import mock

    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.training import checkpointing

    parallel_state.initialize_model_parallel()
    layout = {**checkpointing.layout_sizes(), "tensor": 2}
    with mock.patch.object(checkpointing, "model_parallel_manual_seed") as seeded:
        for iteration in (1, 2):
            manifest = SimpleNamespace(layout=layout, ranks=[None], iteration=iteration)
            checkpointing.restore_random_states(SimpleNamespace(manifest=manifest), 7)
    return [call.args[0] for call in seeded.call_args_list]


def test_random_states_of_another_layout_do_not_repeat_those_of_the_start(world):
    (seeds,) = world(1)(seeds_of_other_layouts)
    assert len({7, *seeds}) == 3
