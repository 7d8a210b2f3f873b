"""Streams of batches: positions of data that cannot be started again, arrays that must not be written."""

import numpy as np

from tests.training import tiny


def test_an_iterator_continues_within_its_only_epoch():
    """Where the checkpoint was saved with data of several epochs."""
    from mindspeed_ms.training.data_streams import BatchStream

    stream = BatchStream(iter([{"number": number} for number in range(3)]))
    stream.go_to({"epoch": 2, "batches": 1}, 0)
    assert [batch["number"] for batch in stream.loader] == [1, 2] and stream.position() == {"epoch": 0, "batches": 1}


def tensors_of_arrays():
    """Whether Tensors share the memory of arrays: one that may be written, one that may not; values of cut batches."""
    from mindspeed_ms.training.data_streams import split_batch, to_tensor

    arrays = [np.arange(4, dtype=np.float32) for _ in range(2)]
    arrays[1].flags.writeable = False
    parts = split_batch({**tiny.samples(4), "shared": np.ones((1, 3), np.float32), "scale": 2.0}, 2, 2)
    return (
        [np.shares_memory(to_tensor(array).asnumpy(), array) for array in arrays],
        [(part["tokens"].asnumpy().tolist(), part["shared"].shape, part["scale"]) for part in parts],
    )


def test_arrays_that_must_not_be_written_are_copied(world):
    ((shared, parts),) = world(1)(tensors_of_arrays)
    assert shared == [True, False]
    tokens = tiny.samples(4)["tokens"].tolist()
    assert parts == [(tokens[:2], (1, 3), 2.0), (tokens[2:], (1, 3), 2.0)]
