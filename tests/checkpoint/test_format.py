"""The format alone, without MindSpore: any layout to any other, check sums, the newest good checkpoint."""

import collections
import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_ms.core.dist_checkpointing import durable, folders
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import MANIFEST_FILE, Manifest, StoredTensor
from mindspeed_ms.core.dist_checkpointing.multilinear import to_text
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader, numpy_dtype
from mindspeed_ms.core.dist_checkpointing.shard_file import Entry, write_shard
from mindspeed_ms.core.dist_checkpointing.slices import remainder
from mindspeed_ms.layout.sharding import FlatSlice, ParameterSharding

DTYPES = ("float32", "bfloat16", "float16", "float64", "int8")


@st.composite
def layouts(draw, shape):
    """The slices of all ranks: cut along an axis (in order, gate and up, or not), then each again by flat ranges."""
    axis = draw(st.none() | st.integers(0, len(shape) - 1))
    shardings = [ParameterSharding.replicated(shape)]
    if axis is not None:
        counts = [count for count in (1, 2, 3, 4) if shape[axis] % count == 0]
        count = draw(st.sampled_from(counts))
        is_gated = shape[axis] % (2 * count) == 0 and draw(st.booleans())
        cut = ParameterSharding.gated if is_gated else ParameterSharding.contiguous
        shardings = [cut(shape, axis, index, count) for index in range(count)]
    slices = []
    for sharding in shardings:
        inner = draw(st.lists(st.integers(0, sharding.numel), max_size=3))
        bounds = [0, *sorted(inner), sharding.numel]
        slices += [FlatSlice(sharding, start, stop) for start, stop in itertools.pairwise(bounds) if start < stop]
    return draw(st.permutations(slices))


@st.composite
def cases(draw):
    """(values by key, where saved, where loaded)."""
    shapes = st.lists(st.sampled_from((1, 2, 4, 6, 12)), min_size=1, max_size=3).map(tuple)
    tensors = {}
    for number in range(draw(st.integers(1, 3))):
        shape, dtype = draw(shapes), draw(st.sampled_from(DTYPES))
        bits = np.random.RandomState(draw(st.integers(0, 99))).bytes(int(np.prod(shape)) * numpy_dtype(dtype).itemsize)
        values = np.frombuffer(bits, numpy_dtype(dtype)).reshape(shape)
        tensors[f"layers.{number}.weight"] = (dtype, values, draw(layouts(shape)), draw(layouts(shape)))
    return tensors


def write_checkpoint(folder, tensors, files=2, iteration=5, saved_at=1.0):
    """Checkpoint of {key: (dtype, global array, slices)}, spread over files; published without a tracker of a run."""
    manifest, shards = Manifest(iteration, saved_at=saved_at, layout={"world": files}), [[] for _ in range(files)]
    for key, (dtype, values, slices) in tensors.items():
        manifest.tensors[key] = StoredTensor(values.shape, dtype)
        for number, part in enumerate(slices):
            data = np.ascontiguousarray(part.split(values)).view(np.uint8)
            shards[number % files].append((key, part, Entry(f"{key}#{number}", dtype, part.local_shape, data.nbytes, data)))
    for number, entries in enumerate(shards):
        name = f"state_{number:05d}.safetensors"
        manifest.files[name] = write_shard(os.path.join(folder, name), [entry for _, _, entry in entries], verify=True)
        for key, part, entry in entries:
            manifest.tensors[key].pieces.append(entry.piece(part, name))
    durable.write_file(os.path.join(folder, MANIFEST_FILE), manifest.to_bytes())


@settings(max_examples=60, deadline=None)
@given(tensors=cases())
def test_saved_in_any_layout_read_in_any_other(tmp_path_factory, tensors):
    folder = str(tmp_path_factory.mktemp("any"))
    write_checkpoint(folder, {key: (dtype, values, saved) for key, (dtype, values, saved, _) in tensors.items()})
    with CheckpointReader(folder) as reader:
        for key, (dtype, values, _, wanted) in tensors.items():
            assert reader.read_whole(key).tobytes() == values.tobytes()
            parts = [[] for _ in wanted]
            for part, told in zip(wanted, parts):
                out = np.empty(part.local_shape, numpy_dtype(dtype))
                assert reader.read(key, part, out, lambda *told_of, told=told: told.append(told_of)) == []
                assert out.tobytes() == part.split(values).tobytes()
            sums = collections.Counter()
            for number, _, total in itertools.chain(*parts[1:]):
                sums[number] += total
            for number, total in sums.items():  # what is read in parts, and the rest of it, add up to the check sum
                piece = reader.tensor(key).pieces[number]
                total += reader.sum_of_runs(key, number, remainder(piece.slice, wanted[1:]))
                assert to_text(total) == piece.multilinear
        assert reader.incomplete() == reader.verify() == []


def one_tensor(folder, **options):
    values = np.arange(48, dtype=np.float32).reshape(8, 6)
    slices = [FlatSlice(ParameterSharding.contiguous((8, 6), 0, index, 2), 0, 24) for index in range(2)]
    os.makedirs(folder, exist_ok=True)
    write_checkpoint(folder, {"weight": ("float32", values, slices)}, **options)
    return values


def test_other_tools_read_the_files(tmp_path):
    from safetensors.numpy import load_file

    values = one_tensor(tmp_path)
    parts = [load_file(tmp_path / f"state_0000{number}.safetensors") for number in range(2)]
    assert np.array_equal(np.concatenate([part[f"weight#{number}"] for number, part in enumerate(parts)]), values.reshape(-1))


def test_only_the_bytes_of_a_slice_are_read(tmp_path):
    shape = (256, 512)
    values = np.arange(256 * 512, dtype=np.float32).reshape(shape)
    write_checkpoint(
        tmp_path,
        {
            "weight": (
                "float32",
                values,
                [FlatSlice(ParameterSharding.contiguous(shape, 0, index, 2), 0, 128 * 512) for index in range(2)],
            )
        },
    )
    part = FlatSlice(ParameterSharding.contiguous(shape, 1, 1, 4), 0, 256 * 128)
    out = np.empty(part.local_shape, np.float32)
    with CheckpointReader(tmp_path) as reader:
        before = read_by_this_process()
        reader.read("weight", part, out)
        assert read_by_this_process() - before <= 1.1 * out.nbytes
    assert np.array_equal(out, part.split(values))


def read_by_this_process():
    """Bytes that this process has read (rchar), without this call's own."""
    with open("/proc/self/io") as file:
        return int(file.read().split("\n")[0].split()[1])


def test_rows_of_a_padded_vocabulary(tmp_path):
    values = one_tensor(tmp_path)
    out = np.full(72, -1, np.float32)
    with CheckpointReader(tmp_path) as reader:
        longer = ParameterSharding.replicated((12, 6))
        assert reader.read("weight", FlatSlice(longer, 0, 72), out) == [(48, 72)]
        assert np.array_equal(out[:48], values.reshape(-1)) and (out[48:] == -1).all()
        shorter = FlatSlice(ParameterSharding.contiguous((6, 6), 0, 1, 2), 0, 18)
        assert reader.read("weight", shorter, out[:18]) == [] and np.array_equal(out[:18], values[3:6].reshape(-1))


@pytest.mark.parametrize("name", ["state_00001.safetensors", MANIFEST_FILE])
@pytest.mark.parametrize("kind", ["flip", "truncate", "remove"])
def test_damage_is_named(tmp_path, name, kind):
    one_tensor(tmp_path)
    path = tmp_path / name
    damage(path, kind)
    found = folders.problem_of(str(tmp_path))
    if kind == "flip" and name != MANIFEST_FILE:  # found by reading
        assert found is None
        with CheckpointReader(tmp_path) as reader:
            assert reader.verify() == [f"{name}: the check sum of tensor weight is wrong"]
            with pytest.raises(CheckpointError, match=rf"{name} is damaged: the check sum of tensor weight"):
                reader.read_whole("weight")
    else:
        assert name in found


def damage(path, kind):
    """Flip a bit near the end of a file, cut it short, or remove it."""
    data = bytearray(path.read_bytes())
    if kind == "remove":
        path.unlink()
        return
    if kind == "truncate":
        data = data[:-7]
    else:
        data[-7] ^= 0x10
    path.write_bytes(data)


def test_another_format_is_named(tmp_path):
    from mindspeed_ms.core.dist_checkpointing import manifest

    data = json.dumps({"format": "other", "format_version": 1}).encode()
    (tmp_path / MANIFEST_FILE).write_bytes(data[:-1] + f', "xxhash": "{manifest.digest(data)}"}}'.encode())
    with pytest.raises(CheckpointError, match="has format 'other' version 1: expected 'mindspeed_ms' version 3"):
        CheckpointReader(tmp_path)


def run_with(folder, iterations, tracker=None):
    """Complete checkpoints of iterations, saved in this order long ago."""
    for number, iteration in enumerate(iterations):
        one_tensor(folders.checkpoint_folder(folder, iteration), iteration=iteration, saved_at=float(number + 1))
    if tracker is not None:
        durable.replace_file(os.path.join(folder, folders.TRACKER_FILE), str(tracker).encode())


def iterations_to_try(folder):
    return [int(path.rpartition("_")[2]) for path in folders.candidates(folder)]


def test_order_of_the_search(tmp_path):
    folder = str(tmp_path)
    run_with(folder, (10, 20, 30, 5, 8), tracker=8)  # 10 to 30 are an earlier run's
    assert iterations_to_try(folder) == [8, 5, 30, 20, 10]
    # a crash came between the new folder's name and the tracker
    one_tensor(folders.checkpoint_folder(folder, 12), iteration=12, saved_at=4e9)
    assert iterations_to_try(folder)[:2] == [12, 8]
    durable.replace_file(str(tmp_path / folders.TRACKER_FILE), b"77")
    assert iterations_to_try(folder)[:3] == [12, 77, 8]
    assert "iter_0000077, which latest_checkpointed_iteration.txt names, does not exist" in folders.problem_of(
        folders.checkpoint_folder(folder, 77)
    )
    os.remove(tmp_path / folders.TRACKER_FILE)
    assert iterations_to_try(folder) == [12, 8, 5, 30, 20, 10]
    durable.replace_file(str(tmp_path / folders.TRACKER_FILE), b"release")
    assert folders.candidates(folder) == [os.path.join(folder, "release")]


@pytest.mark.parametrize("stopped", ["rename", "replace_file", "rmtree"])
def test_a_crash_while_publishing_keeps_a_complete_checkpoint(tmp_path, monkeypatch, stopped):
    """The same iteration is saved again; the process ends at one of the steps, before or after it."""
    folder = str(tmp_path)
    run_with(folder, (4, 6), tracker=6)
    temporary = folders.prepare(folder, 6)
    one_tensor(temporary, iteration=6)

    class Crash(BaseException):
        pass

    def crash(*arguments, **options):
        raise Crash

    for after in range(3):
        with monkeypatch.context() as patch:
            owner = {"rename": os, "rmtree": folders.shutil, "replace_file": durable}[stopped]
            original, calls = getattr(owner, stopped), []

            def step(*arguments, original=original, calls=calls, after=after, **options):
                calls.append(arguments)
                return crash() if len(calls) > after else original(*arguments, **options)

            patch.setattr(owner, stopped, step)
            try:
                folders.publish(folder, temporary, Manifest(6, saved_at=9.0), keep_checkpoint_max=1)
            except Crash:
                pass
        folders.restore_replaced(folder)
        good = [path for path in folders.candidates(folder) if folders.problem_of(path) is None]
        assert good and good[0].endswith("iter_0000006")
        temporary = folders.prepare(folder, 6)
        assert sorted(os.listdir(folder)) == sorted(
            {*map(os.path.basename, good), os.path.basename(temporary), folders.TRACKER_FILE, "saving_job.json"}
        )


def test_old_checkpoints_are_deleted_first_saved_first(tmp_path):
    folder = str(tmp_path)
    run_with(folder, (1, 2, 3, 9))
    for number in (1, 2, 3, 9):
        os.utime(folders.checkpoint_folder(folder, number), (number, number))
    folders.delete_old(folder, 3, 2)
    assert sorted(folders.iterations_in(folder)) == [2, 3, 9]


def test_no_mindspore_is_imported():
    code = "import sys, mindspeed_ms.core.dist_checkpointing.folders as f; sys.exit('mindspore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("saved_at, first", [(1.0, "lasting"), (3.0, "spare")])
def test_a_spare_checkpoint_goes_first_if_it_is_newer(tmp_path, saved_at, first):
    paths = {"lasting": tmp_path / "iter_0000005", "spare": tmp_path / "non_persistent" / "iter_0000004"}
    one_tensor(paths["lasting"], iteration=5, saved_at=2.0)
    one_tensor(paths["spare"], iteration=4, saved_at=saved_at)
    order = [str(paths[name]) for name in (["spare", "lasting"] if first == "spare" else ["lasting", "spare"])]
    assert folders.candidates(str(tmp_path)) == order
