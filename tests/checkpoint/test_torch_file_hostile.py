"""Hostile, damaged and truncated files of torch.save: refused by name, nothing runs, nothing large is allocated."""

import argparse
import io
import os
import pickle
import random
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.shard_file import read_safetensors
from mindspeed_ms.core.dist_checkpointing.torch_file import TensorToWrite, read_pickle_file, read_torch_file, write_torch_file
from mindspeed_ms.core.dist_checkpointing.torch_file.pickler import Pickler

MOST_ALLOCATED = 2 << 20


def save(path, data, records=None, folder="archive", order="little"):
    """Write a zip file as torch.save does, around a pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{folder}/data.pkl", data)
        archive.writestr(f"{folder}/byteorder", order)
        for name, content in {"version": b"3\n", "data/0": bytes(16), **(records or {})}.items():
            archive.writestr(f"{folder}/{name}", content)
    return path


def refused(path, text, read=read_torch_file):
    """Read a file that must be refused; returns what must match the one line of its error."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=text) as error:
            read(path)
        assert tracemalloc.get_traced_memory()[1] < MOST_ALLOCATED
    finally:
        tracemalloc.stop()
    message = str(error.value)
    assert "\n" not in message and len(message) < 700 and str(path) in message


class Calls:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class Stranger:
    """A class that no checkpoint has."""


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda mark: Calls(os.system, f"touch {mark}"), "posix.system"),
        (lambda mark: Calls(eval, f"open({str(mark)!r}, 'w')"), "builtins.eval"),
        (lambda mark: Calls(exec, f"open({str(mark)!r}, 'w')"), "builtins.exec"),
        (lambda mark: Calls(open, str(mark), "w"), "io.open"),
        (lambda mark: Calls(getattr, Calls(__import__, "os"), "system"), "builtins.__import__"),
        (lambda mark: Stranger(), "tests.checkpoint.test_torch_file_hostile.Stranger"),
    ],
)
def test_code_is_refused_by_name(tmp_path, protocol, made, name):
    data = pickle.dumps({"model": [1, made(tmp_path / "mark")]}, protocol)
    text = rf"is refused: its pickle names {name}, and it is not one of the classes that checkpoints consist of"
    refused(save(tmp_path / "a.pt", data), text)
    (tmp_path / "b.pt").write_bytes(data)
    refused(tmp_path / "b.pt", text)
    refused(tmp_path / "b.pt", text, read_pickle_file)
    assert not (tmp_path / "mark").exists()


def name(module, name):
    return f"c{module}\n{name}\n".encode()


ENUM = name("megatron.core.enums", "ModelType")
NAMESPACE = name("argparse", "Namespace")
STORAGE = b"(U\x07storage" + name("torch", "FloatStorage") + b"U\x010U\x03cpuK\x04tQ"


def rebuilt(offset, shape, stride, storage=STORAGE):
    """Pickle of {"model": {"w": tensor}}."""
    tensor = Pickler()
    tensor._save({"shape": shape, "stride": stride}, "")
    numbers = [Pickler() for _ in range(3)]
    for pickler, value in zip(numbers, (offset, shape, stride)):
        pickler._memo = {1: 1, 2: 2}  # so that the memo is not used
        pickler._remember = lambda value: None
        pickler._save(value, "")
    parts = b"".join(bytes(pickler.data[2:]) for pickler in numbers)
    call = name("torch._utils", "_rebuild_tensor_v2") + b"(" + storage + parts + b"\x89" + name("collections", "OrderedDict")
    return b"\x80\x02}U\x05model}U\x01w" + call + b")RtRss."


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"(S'x'\nios\nsystem\n.", "names os.system"),
        (b"(cos\nsystem\nS'x'\no.", "names os.system"),
        (b"\x8c\x05posix\x8c\x06system\x93)R.", "names posix.system"),
        (name("megatron.core.enums", "os.system") + b")R.", "names megatron.core.enums.os.system"),
        (name("megatron.core.enums", "ModelType.__class__") + b")R.", "names megatron.core.enums.ModelType.__class__"),
        (name("torch._utils", "os\nnames") + b".", "names torch._utils.os"),
        (name("torch.hub", "load") + b")R.", "names torch.hub.load"),
        (name("torch.storage", "_load_from_bytes") + b"(C\x01atR.", "names torch.storage._load_from_bytes"),
        (
            name("builtins", "getattr") + b"(" + NAMESPACE + b"X\x09\0\0\0__class__tR.",
            "calls builtins.getattr wrongly: '?__class__ of",
        ),
        (
            name("builtins", "getattr") + b"(" + ENUM + b"X\x09\0\0\0__class__tR.",
            "calls builtins.getattr wrongly: '?__class__ of",
        ),
        (ENUM + b"K\x01\x85RK\x02\x85R.", "calls Opaque, which is no class"),
        (NAMESPACE + b"}b.", "sets a wrong state of argparse.Namespace"),
        (NAMESPACE + b")\x81}K\x01K\x02sb.", "sets a wrong state of Namespace: int instead of str"),
        (name("collections", "OrderedDict") + b")R}X\x05\0\0\0itemsK\x02sb.", "wrong state of OrderedDict: attribute items"),
        (name("torch", "float32") + b")R.", "calls torch.float32 wrongly"),
        (
            name("builtins", "bytearray") + b"\x8a\x05\0\0\0\0\x10\x85R.",
            "calls builtins.bytearray wrongly: int instead of bytes",
        ),
        (name("collections", "defaultdict") + name("torch", "Tensor") + b"\x85R.", "calls collections.defaultdict wrongly"),
        (name("numpy", "dtype") + b"X\x01\0\0\0O\x89\x88\x87R.", "calls numpy.dtype wrongly: numpy dtype O"),
        (
            name("torch.nn.modules.linear", "Linear") + b")\x81.",
            "names torch.nn.modules.linear.Linear, and it holds a whole module",
        ),
        (b"K\x01Q.", "refers to something that is no storage"),
        (b"(U\x07storageK\x01U\x010U\x03cpuK\x04tQ.", "has a storage of unknown kind 1"),
        (b"K\x01}b.", "sets a wrong state of int"),
        (STORAGE.replace(b"K\x04tQ", NAMESPACE + b"tQ."), "storage 0 has argparse.Namespace elements"),
        (STORAGE.replace(b"K\x04tQ", b"J\xff\xff\xff\xfftQ."), "storage 0 has -1 elements"),
        (ENUM + b")R}b}b.", "sets a wrong state of Opaque: it has one"),
        (NAMESPACE + b")}K\1K\2s\x92.", "makes argparse.Namespace with keywords"),
        (b"]" + STORAGE + b"a" + STORAGE.replace(b"Float", b"Double") + b"a.", "its storage 0 has two dtypes or sizes"),
        (b"\x82\x01.", "unknown opcode 0x82"),
    ],
)
def test_forged_pickles_are_refused_by_name(tmp_path, data, text):
    refused(save(tmp_path / "a.pt", data), text)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x8e" + struct.pack("<Q", 1 << 60) + b"x.", "says 1152921504606846976 bytes at byte 9, where 2 are left"),
        (b"\x8d" + struct.pack("<Q", 1 << 63) + b"x.", "where 2 are left"),
        (b"\x96" + struct.pack("<Q", 1 << 40) + b"x.", "says 1099511627776 bytes"),
        (b"B" + struct.pack("<I", (1 << 32) - 1) + b"x.", "where 2 are left"),
        (b"\x8b" + struct.pack("<i", (1 << 31) - 1) + b"x.", "integer of 2147483647 bytes"),
        (b"\x8b" + struct.pack("<i", -1) + b"x.", "integer of 4294967295 bytes"),
        (b"\x95" + struct.pack("<Q", 1 << 62) + b"N.", "a frame longer than the file"),
        (b"Nr\xff\xff\xff\xff0j\xff\xff\xff\x7f.", "KeyError"),
        (b"L" + b"9" * 5000 + b"\n.", "integer of 5000 digits"),
        (b"]" * 20_000 + b"a" * 19_999 + b".", "nested deeper than 100"),
        (b"(" * 20_000 + b".", "marks instead of one object"),
        (b"]q\0" + b"h\0a.", "0 contains itself"),
        (b"(]q\0" + b"h\0h\0\x86q\0" * 40 + b"t.", "expands to much more than its own size"),
        (b")q\0" + b"h\0h\0\x86q\0" * 40 + b"K\x01}h\0K\x01s.", "a key of nested tuples"),
        (b"X\0\x40\0\0" + b"x" * (1 << 14) + b"q\0" + b"0c_codecs\nencode\n(h\0U\x05asciitR" * 4000 + b".", "much more"),
        (b"\x96" + bytes(8) + b"K\1a.", "appends to a bytearray"),
        (b"}}a.", "appends to a dict"),
        (b"]K\1K\2s.", "puts items into a list"),
        (b"}]K\2s.", "a key of type list"),
        (b"N", "it ends early"),
        (b"", "it ends at byte 46, where a pickle is expected"),
        (b".", "marks instead of one object"),
        (b"tttt.", "damaged"),
        (b"\x80\x63N.", "unknown protocol"),
    ],
)  # fmt: skip
def test_memory_bombs_are_refused(tmp_path, data, text):
    refused(save(tmp_path / "a.pt", data), text)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            rebuilt(0, (2, 3), (3, 1)),
            r"tensor model\.w has shape \[2, 3\], strides \[3, 1\], offset 0: 6 elements, more than its",
        ),
        (rebuilt(3, (2,), (1,)), "more than its storage of 4"),
        (rebuilt(0, (1 << 40, 1 << 20), (1 << 20, 1)), r"tensor model\.w has shape \[1099511627776, 1048576\]"),
        (rebuilt(0, (1 << 40,), (0,)), r"tensor model\.w .*repeats the 4 elements of its storage too often"),
        (rebuilt(0, (0, 1 << 62), (1, 1)), r"tensor model\.w"),
        (rebuilt(1 << 50, (0,), (1,)), r"tensor model\.w"),
        (rebuilt(0, (2,), (-1,)), "calls torch._utils._rebuild_tensor_v2 wrongly: -1 is no size"),
        (rebuilt(-1, (2,), (1,)), "-1 is no size"),
        (rebuilt(0, (True,), (1,)), "True is no size"),
        (rebuilt(0, (1,) * 40, (1,) * 40), "tuple of 40 is no shape"),
        (rebuilt(0, (2,), (1, 1)), r"shape \[2\] with strides \[1, 1\]"),
        (rebuilt(0, (2,), (1,), STORAGE.replace(b"K\x04", b"K\x05")), "needs a storage of 20 bytes, but 16 are in the file"),
        (rebuilt(0, (2,), (1,), STORAGE.replace(b"K\x04", b"\x8a\x07" + b"\xff" * 6 + b"\0")), "but 16 are in the file"),
        (rebuilt(0, (2,), (1,), STORAGE.replace(b"\x010", b"\x017")), r"tensor model\.w is missing: the file has no storage 7"),
        (rebuilt(0, (2,), (1,), STORAGE.replace(b"\x010", b"\x0a../version")), "the file has no storage ../version"),
        (rebuilt(0, (2,), (1,)).replace(b")RtRss.", b")RU\x01xK\x01stRss."), "wrongly: a tensor with hooks"),
        (rebuilt(0, (2,), (1,)).replace(b")RtRss.", b")R}U\x03neg\x88stRss."), "wrongly: a tensor with neg"),
        (rebuilt(0, (2,), (1,), STORAGE.replace(b"Float", b"ComplexFloat")), r"tensor model\.w has dtype complex64"),
    ],
)
def test_tensors_outside_of_their_storage_are_refused(tmp_path, data, text):
    refused(save(tmp_path / "a.pt", data), text)


def test_arrays_of_absurd_shape_are_refused(tmp_path):
    array = pickle.dumps(np.zeros((3, 4), np.float32), 2)
    for new in (b"K\xff", b"K\x00"):
        refused(
            save(tmp_path / "a.pt", array.replace(b"K\x04", new)), r"wrong state of ndarray: a numpy array of shape \[3, \d+\]"
        )
    refused(save(tmp_path / "a.pt", pickle.dumps(np.array([1, "a"], object), 2)), "numpy dtype O8")
    refused(save(tmp_path / "a.pt", pickle.dumps(np.zeros(2, [("a", "i4")]), 2)), "numpy dtype V4")


DATA = b"\x80\x02}."


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ({"../../evil": b"x"}, r"its record archive/\.\./\.\./evil has a name outside"),
        ({"a\\b": b"x"}, "has a name outside"),
        ({"constants.pkl": b"x"}, "a TorchScript program"),
    ],
)
def test_records_with_names_outside_are_refused(tmp_path, records, text):
    refused(save(tmp_path / "a.pt", DATA, records), text)


def test_other_zip_files_are_refused(tmp_path):
    path = tmp_path / "a.pt"
    refused(save(path, DATA, order="big"), "byte order is .*big.*, expected little")
    with zipfile.ZipFile(save(path, DATA), "a") as archive:
        archive.writestr("/etc/passwd", b"x")
    refused(path, "its record /etc/passwd has a name outside")
    with zipfile.ZipFile(save(path, DATA), "a") as archive:
        archive.writestr("other/x", b"x")
    refused(path, "its record other/x is outside of archive/")
    with zipfile.ZipFile(save(path, DATA), "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/1", bytes(50 << 20))
    refused(path, "its record archive/data/1 is compressed")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/x", b"x")
    refused(path, "it has no record data.pkl")
    with zipfile.ZipFile(save(path, DATA), "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("archive/version", b"x")
    refused(path, "two records archive/version")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("PK\5\6", 10, "<H", 60_000), "says 60000 records in"),
        (("PK\5\6", 12, "<L", 0xFFFFFFF0), "says 4 records in 4294967280 bytes"),
        (("PK\5\6", 16, "<L", 0xFFFFFFF0), "points outside"),
        (("PK\5\6", 16, "<L", 0xFFFFFFFF), "cannot be read as a file of torch.save"),
        (("PK\5\6", 20, "<H", 5), "bytes follow|truncated"),
        (("PK\1\2", 10, "<H", 8), "its record archive/data.pkl is compressed"),
        (("PK\1\2", 8, "<H", 1), "its record archive/data.pkl is encrypted"),
        (("PK\3\4", 26, "<H", 3), "the header of its record archive/data.pkl is damaged"),
        (("PK\1\2", 24, "<L", 1 << 31), "compressed|outside"),
        (("PK\1\2", 42, "<L", 1 << 31), "its record archive/data.pkl is outside"),
        (("PK\1\2", 28, "<H", 0xFFFF), "damaged"),
        (("PK\3\4", 28, "<H", 0xFFFF), "outside"),
        (("PK\3\4", 30, "<H", 0x4141), "the header of its record archive/data.pkl is damaged"),
    ],
)
def test_damaged_tables_are_refused(tmp_path, change, text):
    signature, offset, form, value = change
    data = bytearray(save(tmp_path / "a.pt", DATA).read_bytes())
    struct.pack_into(form, data, data.index(signature.encode()) + offset, value)
    (tmp_path / "a.pt").write_bytes(data)
    refused(tmp_path / "a.pt", text)


def test_records_that_overlap_are_refused(tmp_path):
    data = bytearray(save(tmp_path / "a.pt", DATA, {"data/1": b"x" * 16}).read_bytes())
    entries = [place for place in range(len(data)) if data[place : place + 4] == b"PK\1\2"]
    for shift, value in ((20, 70), (24, 70)):  # both sizes of data/0, which then reaches into data/1
        struct.pack_into("<L", data, entries[3] + shift, value)
    (tmp_path / "a.pt").write_bytes(data)
    refused(tmp_path / "a.pt", "its records archive/data/0 and archive/data/1 overlap")


def old_file(numel=4, keys=("0",), system=None, protocol=1001):
    """Stream of torch before 1.6 with one tensor."""
    system = {"protocol_version": 1001, "little_endian": True} if system is None else system
    parts = [pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, protocol, system)]
    storage = STORAGE.replace(b"K\x04tQ", b"K\x04NtQ")
    parts += [rebuilt(0, (4,), (1,), storage), pickle.dumps(list(keys), 2), struct.pack("<q", numel), bytes(16)]
    return b"".join(parts)


def test_old_files(tmp_path):
    path = tmp_path / "a.pt"
    path.write_bytes(old_file())
    assert read_torch_file(path)["model"]["w"].read().tolist() == [0.0] * 4
    for content, text in (
        (old_file(numel=1 << 60), "ends within storage 0"),
        (old_file(numel=-1), "ends within storage 0"),
        (old_file(numel=3), "needs a storage of 16 bytes, but 12"),
        (old_file(keys=("0", "1")), "its storages are not those"),
        (old_file(keys=()), "its storages are not those"),
        (old_file(system={"little_endian": False}), "is refused: it has protocol 1001 of system"),
        (old_file().replace(b"K\x04NtQ", b"K\x04K\x01tQ"), "storage 0 is a view of another one"),
        (old_file(protocol=7), "is refused: it has protocol 7"),
        (pickle.dumps({"a": 1}, 2), "is no file of torch.save"),
        (b"", "ends at byte 0, where a pickle is expected"),
        (old_file(keys=(0,)), "its storages are not those"),
        (b"\x80\x02", "ends early"),
    ):
        path.write_bytes(content)
        refused(path, text)


def test_truncated_files_are_refused(tmp_path):
    write_torch_file(tmp_path / "whole.pt", {"w": TensorToWrite("int8", (300,), bytes(300)), "args": argparse.Namespace(a=[1])})
    path = tmp_path / "a.pt"
    for whole in ((tmp_path / "whole.pt").read_bytes(), old_file()):
        for length in range(1, len(whole), 7):
            path.write_bytes(whole[:length])
            refused(path, str(path))


def test_no_change_of_bytes_does_more_than_refuse(tmp_path):
    """Random changes of a file with everything in it: it reads, or is refused in one line."""
    tree = {"w": TensorToWrite("int8", (4,), bytes(4), attributes={"a": 1}), "args": argparse.Namespace(a=[1], b=(0.5, "x"))}
    tree["array"], tree["stream"], tree["set"] = np.arange(3), io.BytesIO(b"abc"), {1}
    rng, count = random.Random(1), 0
    base = bytes(Pickler().dump(tree).data)
    for _ in range(400):
        data = bytearray(base)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            read_torch_file(save(tmp_path / "a.pt", bytes(data)))
        except CheckpointError as error:
            assert "\n" not in str(error)
            count += 1
    assert count > 100


def test_a_sparse_file_of_a_terabyte_allocates_nothing(tmp_path):
    path = tmp_path / "a.pt"
    for start in (
        b"\x80\x02}",
        b"\x80\x02" + b"\x8e" + struct.pack("<Q", 1 << 38),
        b"\x80\x02\x8d" + struct.pack("<Q", 1 << 29),
    ):
        path.write_bytes(start)
        os.truncate(path, 1 << 40)
        refused(path, "damaged")
        refused(path, "damaged", read_pickle_file)
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", 1 << 38) + b"{")
    os.truncate(tmp_path / "a.safetensors", 1 << 40)
    refused(tmp_path / "a.safetensors", "says that 274877906944 of them are its header", read_safetensors)


def test_arrays_of_columns(tmp_path):
    """numpy pickles an array of columns in its own order, in every protocol."""
    array = np.arange(6).reshape(2, 3, order="F")
    for protocol in (2, 5):
        save(tmp_path / "a.pt", pickle.dumps({"a": array}, protocol))
        assert read_torch_file(tmp_path / "a.pt")["a"].tolist() == array.tolist()


def test_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"none\.pt cannot be read: No such file"):
        read_torch_file(tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        read_torch_file(tmp_path)
