"""Headers of safetensors files: what says more, less or other bytes than there are is refused, naming the tensor."""

import json
import re
import struct

import pytest

from mindspeed_ms.core.dist_checkpointing.ckpt_file import read_tensors
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.shard_file import inside, read_safetensors


def tensor(dtype="F32", shape=(2, 2), offsets=(0, 16)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write(path, header, values=bytes(16), length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + values)
    return path


def test_good_headers_are_read(tmp_path):
    two = {
        "__metadata__": {"format": "pt"},
        "b": tensor("I8", [16], [16, 32]),
        "a": tensor(),
        "empty": tensor("F32", [0], [16, 16]),
    }
    read = read_safetensors(write(tmp_path / "a", two, bytes(32)))
    assert {name: (found.dtype, found.shape) for name, found in read.items()} == {
        "b": ("int8", (16,)), "a": ("float32", (2, 2)), "empty": ("float32", (0,)),
    }  # fmt: skip
    assert read["b"].ranges[0][1] == (tmp_path / "a").stat().st_size
    assert read_safetensors(write(tmp_path / "a", {}, b"")) == {}


@pytest.mark.parametrize(
    ("header", "options", "text"),
    [
        ({"w": tensor()}, {"length": 1 << 60}, "says that 1152921504606846976 of them are its header"),
        ({"w": tensor()}, {"length": 3}, "cannot be read as a safetensors file"),
        ({"w": tensor()}, {"values": bytes(15)}, "it ends within tensor 'w'"),
        ({"w": tensor()}, {"values": bytes(17)}, "its tensors end at byte"),
        ({"w": tensor(offsets=[8, 24])}, {"values": bytes(24)}, "tensor 'w' begins at byte"),
        ({"v": tensor(), "w": tensor(offsets=[8, 24])}, {"values": bytes(24)}, "tensor 'w' begins at byte"),
        ({"w": tensor(offsets=[16, 0])}, {}, "tensor 'w' has data_offsets"),
        ({"w": tensor(offsets=[-16, 0])}, {}, "tensor 'w' has shape"),
        ({"w": tensor(offsets=[0.0, 16])}, {}, "tensor 'w' has shape"),
        ({"w": tensor(shape=[2, 3])}, {}, "tensor 'w', F32 [2, 3], has 16 bytes"),
        ({"w": tensor(shape=[1 << 40, 1 << 40])}, {}, "has 16 bytes"),
        ({"w": tensor(shape=[2, -2])}, {}, "tensor 'w' has shape [2, -2]"),
        ({"w": tensor(shape=[True, 4])}, {}, "tensor 'w' has shape"),
        ({"w": tensor("F8_E5M2", [16])}, {}, "tensor 'w' has dtype F8_E5M2, which is not supported"),
        ({"w": tensor([], [16])}, {}, "tensor 'w' has dtype []"),
        ({"w": {"dtype": "F32"}}, {}, "tensor 'w' has no dtype, shape and data_offsets"),
        ({"w": 1}, {}, "tensor 'w' has no dtype"),
        ([1], {}, "its header is no JSON object"),
        (b'{"w": {}, "w": {}}', {}, "it has 'w' twice"),
        (b"[" * 100_000, {}, "cannot be read as a safetensors file"),
        (b"\xff", {}, "cannot be read as a safetensors file"),
    ],
)
def test_bad_headers_are_refused(tmp_path, header, options, text):
    with pytest.raises(CheckpointError, match=re.escape(text)):
        read_safetensors(write(tmp_path / "a", header, **options))


def test_short_files_are_refused(tmp_path):
    for length in (0, 7, 8, 20):
        path = write(tmp_path / "a", {"w": tensor()})
        path.write_bytes(path.read_bytes()[:length])
        with pytest.raises(CheckpointError, match="its header"):
            read_safetensors(path)


@pytest.mark.parametrize("name", ["/etc/passwd", "../a", "x/../../a", "..\\a", "", None, 3, "a\0b"])
def test_names_outside_of_a_folder_are_refused(name):
    with pytest.raises(CheckpointError, match=r"^/m is refused: it names the file .*, which is outside of it\.$"):
        inside("/m", name)


def test_names_inside_of_a_folder():
    assert inside("/m", "model-00001-of-00002.safetensors") == "/m/model-00001-of-00002.safetensors"
    assert inside("/m", "sub/a..b") == "/m/sub/a..b"


TENSOR = b"\x08\x02\x12\x07Float32\x1a\x00"  # dims [2], Float32, no values


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\x0a\x02\x08\x05", "a number at byte 2 where text is expected"),
        (b"\x0a\x04\x12\x02\x0a\x00", "a field of another type"),
        (b"\x0a\x12\x0a\x01w\x12\x0d" + TENSOR, r"tensor 'w', float32 \[2\], has 0 bytes"),
    ],
)
def test_damaged_ckpt_files_are_refused(tmp_path, content, text):
    (tmp_path / "a.ckpt").write_bytes(content)
    with pytest.raises(CheckpointError, match=text):
        read_tensors(tmp_path / "a.ckpt")
