"""Rewriting tensor by tensor: every source byte read once and check-summed as it passes, threads, errors of one of them."""

import io
import os
import re
import threading

import numpy as np
import pytest

from mindspeed_ms.core.dist_checkpointing import reader as reader_module
from mindspeed_ms.core.dist_checkpointing.by_tensor import Workers
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError, DamagedCheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import whole_slice
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.layout.sharding import ParameterSharding
from mindspeed_ms.tools.checkpoint import rewrite
from tests.checkpoint.test_format import damage, write_checkpoint

SHAPE = (512, 768)


def columns(count):
    return [whole_slice(ParameterSharding.contiguous(SHAPE, 1, index, count)) for index in range(count)]


@pytest.fixture
def saved(tmp_path):
    os.makedirs(tmp_path / "saved")
    values = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    write_checkpoint(tmp_path / "saved", {f"weight{number}": ("float32", values + number, columns(2)) for number in range(3)})
    return tmp_path / "saved"


def cut_anew(saved, folder, workers):
    cut = [[(f"weight{number}", part) for number in range(3)] for part in columns(4)]
    with CheckpointReader(saved) as reader, rewrite.CheckedSource(reader) as check:
        return rewrite.write_checkpoint(reader, str(folder), cut, workers, check)


def test_each_byte_is_read_once_in_few_calls(saved, tmp_path, monkeypatch):
    counts, read = [], os.preadv

    def counting(*arguments):
        counts.append(read(*arguments))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counting)
    monkeypatch.setattr(reader_module, "hash_of_range", lambda *arguments: pytest.fail("a second time"))
    cut_anew(saved, tmp_path / "new", 1)
    assert sum(counts) == 3 * 4 * np.prod(SHAPE) and len(counts) == 6  # one for each piece, not for each row


def test_threads_write_the_same_files(saved, tmp_path):
    one, three = (cut_anew(saved, tmp_path / str(workers), workers) for workers in (1, 3))
    for number in range(4):
        name = f"state_{number:05d}.safetensors"
        with open(os.path.join(one, name), "rb") as first, open(os.path.join(three, name), "rb") as second:
            assert first.read() == second.read()
    with CheckpointReader(three) as reader, CheckpointReader(one) as other:
        assert reader.verify() == [] and reader.manifest.tensors == other.manifest.tensors
        values = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
        assert all(np.array_equal(reader.read_whole(f"weight{number}"), values + number) for number in range(3))


def test_damage_is_found_while_it_passes(saved, tmp_path):
    damage(saved / "state_00001.safetensors", "flip")
    text = r"saved is damaged: state_00001\.safetensors: the check sum of tensor weight2 is wrong\.$"
    with pytest.raises(DamagedCheckpointError, match=text):
        cut_anew(saved, tmp_path / "new", 2)
    assert not (tmp_path / "new").exists()


def test_an_error_that_damage_causes_names_the_damage(saved):
    damage(saved / "state_00000.safetensors", "flip")
    with (
        CheckpointReader(saved) as reader,
        pytest.raises(DamagedCheckpointError, match="check sum"),
        rewrite.CheckedSource(reader),
    ):
        raise CheckpointError("values that float16 cannot hold")


def test_an_error_ends_the_other_threads():
    threads, begun, told = Workers(2), threading.Event(), []

    def work(item):
        if item == "endless":
            begun.set()
            while True:
                threads.advance(0)
        assert begun.wait(5)
        if item == "fails":
            raise ValueError(item)
        told.append(item)

    with pytest.raises(ValueError, match="fails"):
        threads.run(work, ["endless", "fails", *range(100)])
    assert len(told) < 100


def test_progress_is_called_by_one_thread_at_a_time():
    total, inside = [], threading.Lock()

    def progress(nbytes):
        assert inside.acquire(blocking=False)
        total.append(nbytes)
        inside.release()

    threads = Workers(4, progress)
    threads.run(lambda item: [threads.advance(1) for _ in range(500)], range(8))
    assert sum(total) == 4000


def test_a_terminal_shows_the_speed(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    texts = []
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stderr", stream)
        with rewrite.progress_bar(4 * 10**9) as bar:
            bar.update(10**9)
            bar.refresh()
        texts.append(stream.getvalue())
    assert re.search(r"writing: *25%.*1\.00G/4\.00G.*[GT]B/s", texts[0]) and texts[1] == ""
