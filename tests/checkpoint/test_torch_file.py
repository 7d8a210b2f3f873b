"""Files of torch.save without torch: recorded Megatron files, what is written is read again, small views of large storages."""

import argparse
import collections
import io
import os
import pathlib
import zipfile

import numpy as np
import pytest

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.torch_file import (
    Global,
    Opaque,
    Size,
    TensorReference,
    TensorToWrite,
    is_torch_file,
    read_torch_file,
    write_torch_file,
    writer,
)
from mindspeed_ms.core.dist_checkpointing.torch_file.objects import Storage
from tests.checkpoint.torch_trees import assert_same

GOLDEN = pathlib.Path(os.environ.get("MINDSPEED_MS_GOLDEN", "")) / "ckpt"


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="needs the recorded checkpoints")
def test_megatrons_files_are_read_and_written_equal(tmp_path):
    files = sorted(GOLDEN.rglob("*.pt"))
    assert len(files) > 15
    for file in files:
        tree = read_torch_file(file)
        write_torch_file(tmp_path / "again.pt", tree)
        assert_same(read_torch_file(tmp_path / "again.pt"), tree)
    saved = read_torch_file(GOLDEN / "llama_tp1pp1/iter_0000010/mp_rank_00/model_optim_rng.pt")
    merged = np.load(GOLDEN / "full_llama.npz")
    names = [name for name in merged.files if name.startswith("w/")]
    assert len(names) == 27
    for name in names:
        assert saved["model"][name[2:]].read().tobytes() == merged[name].tobytes()
    assert saved["args"].num_layers == 4 and saved["args"].params_dtype == Global("torch", "float32")
    assert (saved["args"].model_type.name, saved["args"].model_type.arguments) == ("ModelType", (1,))


def test_every_kind_of_object_is_written_and_read(tmp_path):
    state = collections.OrderedDict(weight=1)
    state._metadata = collections.OrderedDict({"": {"version": 1}})
    default = collections.defaultdict(list, a=[1])
    shared = {"x": 1}
    tree = {
        "numbers": [None, True, False, 0, 255, 256, -1, 1 << 31, -(1 << 63), 1 << 3000, 0.5, 2 - 1j, slice(None, 3)],
        "texts": ["", "é", b"", b"\0\xff", bytearray(b"ab")],
        "containers": [
            (),
            (1,),
            (1, 2, 3, 4),
            {1, 2},
            frozenset([3]),
            state,
            default,
            collections.Counter("aab"),
            Size((2, 3)),
        ],
        "args": argparse.Namespace(dtype=Global("torch", "bfloat16"), path=pathlib.PurePosixPath("/a/b")),
        "numpy": [np.arange(6.0).reshape(2, 3).T, np.zeros((0, 2), np.int8), np.float32(0.1), np.dtype(">i2"), np.bool_(True)],
        "enum": [
            Opaque("megatron.core.enums", "ModelType", (1,)),
            Opaque("megatron.core.enums", "ModelType", ("a",), None, "getattr"),
        ],
        "object": Opaque("torch.distributed.checkpoint.metadata", "Metadata", (), {"a": 1}, "new"),
        "stream": io.BytesIO(b"abc"),
        "shared": [shared, shared],
        ("a", Global("torch", "float32")): 1,
    }
    write_torch_file(tmp_path / "a.pt", tree)
    found = read_torch_file(tmp_path / "a.pt")
    assert_same(found, tree)
    assert found["shared"][0] is found["shared"][1]
    assert vars(found["containers"][5]) == {"_metadata": {"": {"version": 1}}}


def test_dtypes_attributes_and_shared_tensors(tmp_path):
    tree = {}
    for dtype, itemsize in (("float64", 8), ("bfloat16", 2), ("uint16", 2), ("uint64", 8), ("bool", 1), ("int8", 1)):
        data = np.arange(6 * itemsize, dtype=np.uint8) % (2 if dtype == "bool" else 255)
        tree[dtype] = TensorToWrite(dtype, (2, 3), data)
    tree["again"] = tree["float64"]
    tree["parameter"] = TensorToWrite("float32", (), lambda: np.float32(3), parameter=True, requires_grad=True)
    tree["marked"] = TensorToWrite("float32", (0, 2), b"", attributes={"tensor_model_parallel": True})
    write_torch_file(tmp_path / "a.pt", tree)
    found = read_torch_file(tmp_path / "a.pt")
    for name, tensor in tree.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        if isinstance(tensor.data, np.ndarray):
            assert found[name].read().tobytes() == tensor.data.tobytes()
            assert found[name].start % 64 == 0
    assert found["again"] is found["float64"] and found["parameter"].parameter and found["parameter"].read() == 3
    assert found["marked"].attributes == {"tensor_model_parallel": True} and found["marked"].read().shape == (0, 2)
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None and len(archive.namelist()) == 3 + len(tree) - 1


def test_views_and_row_ranges(tmp_path):
    (tmp_path / "x").write_bytes(np.arange(24, dtype="<i4").tobytes())
    storage = Storage("0", "int32", 24, start=0, stop=96)
    whole = np.arange(24).reshape(4, 6)
    columns = TensorReference(str(tmp_path / "x"), "int32", (4, 2), (6, 3), 1, storage)
    rows = TensorReference(str(tmp_path / "x"), "int32", (2, 6), (6, 1), 12, storage, name="w")
    assert np.array_equal(columns.read(), whole[:, 1::3]) and not columns.is_contiguous
    assert np.array_equal(rows.read(), whole[2:]) and (rows.start, rows.stop, rows.rows(1, 2)) == (48, 96, (72, 96))
    with pytest.raises(CheckpointError, match=r"rows 1 to 3 of tensor w are no byte range: it has shape \[2, 6\]"):
        rows.rows(1, 3)
    for shape, stride in (((1, 6), (99, 1)), ((0, 6), (3, 5)), ((), ())):
        assert TensorReference(str(tmp_path / "x"), "int32", shape, stride, 0, storage).is_contiguous
    with pytest.raises(CheckpointError, match="are no byte range"):
        columns.rows(0, 1)
    write_torch_file(tmp_path / "a.pt", [columns, rows])
    found = read_torch_file(tmp_path / "a.pt")
    assert found[0].storage is found[1].storage
    assert_same(found, [columns, rows])
    os.truncate(tmp_path / "x", 90)
    with pytest.raises(CheckpointError, match="x is damaged: it ends within tensor w"):
        rows.read()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Opaque("posix", "system", ("touch mark",)), "a is made by posix.system, which is not one of the classes"),
        (Opaque("builtins", "getattr", (Global("torch", "Tensor"), "data")), "a is made by builtins.getattr"),
        (
            Opaque("megatron.core.enums", "ModelType", ("__class__",), None, "getattr"),
            "a is made by megatron.core.enums.ModelType",
        ),
        (Opaque("megatron.core.enums", "ModelType\nos", (1,)), "a is made by megatron.core.enums.ModelType"),
        (Global("posix", "system"), "a names posix.system"),
        (Global("torch", "float32\n."), "a names torch.float32"),
    ],
)
def test_only_allowed_classes_are_written(tmp_path, value, text):
    """Not even from a forged file in another format, whose text became such an object."""
    with pytest.raises(CheckpointError, match=text):
        write_torch_file(tmp_path / "a.pt", {"a": value})


def test_nothing_half_is_left(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"before")

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_torch_file(tmp_path / "a.pt", {"w": TensorToWrite("int8", (3,), interrupted)})
    with pytest.raises(CheckpointError, match=r"int8 \[3\], has 4 bytes: expected 3"):
        write_torch_file(tmp_path / "a.pt", {"w": TensorToWrite("int8", (3,), b"1234")})
    with pytest.raises(CheckpointError, match=r"int8 \[3\], has blocks of another size together"):
        write_torch_file(tmp_path / "a.pt", {"w": TensorToWrite("int8", (3,), lambda: iter([b"1", b"2"]))})
    write_torch_file(tmp_path / "b.pt", {"w": TensorToWrite("int8", (3,), b"123")})
    tree = read_torch_file(tmp_path / "b.pt")
    os.truncate(tmp_path / "b.pt", tree["w"].stop - 1)
    with pytest.raises(CheckpointError, match=r"b\.pt is damaged: it ends within tensor w"):
        write_torch_file(tmp_path / "a.pt", tree)
    os.remove(tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match=r"model\.0 is of type object, which cannot be written"):
        write_torch_file(tmp_path / "a.pt", {"model": [object()]})
    with pytest.raises(CheckpointError, match="x has dtype complex64"):
        write_torch_file(tmp_path / "a.pt", {"x": TensorToWrite("complex64", (1,), b"")})
    assert os.listdir(tmp_path) == ["a.pt"] and (tmp_path / "a.pt").read_bytes() == b"before"


def test_a_file_of_more_than_4_gb(tmp_path, monkeypatch):
    """With the limits lowered, the zip64 fields are written; Python's own reader reads them too."""
    monkeypatch.setattr(writer, "_MOST_BYTES", 4)
    monkeypatch.setattr(writer, "_MOST_RECORDS", 4)
    tree = [TensorToWrite("uint8", (5,), np.full(5, number, np.uint8)) for number in range(4)]
    write_torch_file(tmp_path / "a.pt", tree)
    assert [tensor.read().tolist() for tensor in read_torch_file(tmp_path / "a.pt")] == [[n] * 5 for n in range(4)]
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None


def test_kinds_of_files_are_told_apart(tmp_path):
    write_torch_file(tmp_path / "a.pt", {})
    (tmp_path / "text").write_text("{}")
    assert is_torch_file(tmp_path / "a.pt") and not is_torch_file(tmp_path / "text") and not is_torch_file(tmp_path / "none")
