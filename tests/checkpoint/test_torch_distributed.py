"""Folders of torch.distributed.checkpoint: Megatron's recorded one, and forged or damaged ones, refused by name."""

import json
import os
import pathlib
import re

import numpy as np
import pytest

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.torch_file import (
    Global,
    Opaque,
    Size,
    TensorToWrite,
    read_distributed,
    write_torch_file,
)
from mindspeed_ms.core.dist_checkpointing.torch_file.pickler import Pickler

GOLDEN = pathlib.Path(os.environ.get("MINDSPEED_MS_GOLDEN", "")) / "ckpt"
METADATA, FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="needs the recorded checkpoints")
def test_megatrons_folder_is_the_merged_checkpoint():
    found = read_distributed(GOLDEN / "llama_torchdist_tp2pp2/iter_0000010")
    merged, count = np.load(GOLDEN / "full_llama.npz"), 0
    for name, tensor in found.tensors.items():
        whole = np.zeros(tensor.shape, np.float32)
        for part in tensor.parts.values():
            box = tuple(slice(start, start + size) for start, size in zip(part.offsets, part.sizes))
            whole[box] = part.tensor.read().reshape(part.sizes)
        if name.startswith("decoder.layers.mlp") and name.endswith("weight") and "layer_norm" not in name:
            for layer, values in enumerate(whole):
                expected = merged[f"w/decoder.layers.{layer}.{name.removeprefix('decoder.layers.')}"]
                np.testing.assert_allclose(values, expected, atol=1e-6)  # another run: in another layout
                count += 1
    assert count == 8 and len(found.tensors) == 27
    states = [saved.read() for name, saved in found.objects.items() if name.startswith("rng_state")]
    assert len(states) == 4 and sorted(states[0][0][0])[0] == "cuda_rng_state"


def made(module, name, **state):
    return Opaque(module, name, (), state, "new")


class Folder:
    """Folder with one tensor of 4 x 3 elements in two parts, and an object."""

    def __init__(self, path):
        self.path = path
        properties = Opaque(METADATA, "TensorProperties", (), (Global("torch", "float32"), None, False, None, False), "new")
        chunk = [made(METADATA, "ChunkStorageMetadata", offsets=Size((row, 0)), sizes=Size((2, 3))) for row in (0, 2)]
        self.entry = made(METADATA, "TensorStorageMetadata", properties=properties, size=Size((4, 3)), chunks=chunk)
        self.places, data = [], b""
        for row in (0, 2):
            write_torch_file(path / "part", TensorToWrite("float32", (2, 3), np.full(6, row, np.float32)))
            data = self.place("w", Size((row, 0)), data)
        write_torch_file(path / "part", {"a": 1})
        data = self.place("rng", None, data)
        (path / "part").unlink()
        (path / "__0_0.distcp").write_bytes(data)
        (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
        rng = Opaque(METADATA, "BytesStorageMetadata", made_by="new")
        self.metadata = made(
            METADATA, "Metadata", state_dict_metadata={"w": self.entry, "rng": rng}, storage_data={}, mcore_data={}
        )
        self.write()

    def place(self, name, offset, data):
        new = (self.path / "part").read_bytes()
        info = {"relative_path": "__0_0.distcp", "offset": len(data), "length": len(new)}
        self.places.append((made(METADATA, "MetadataIndex", fqn=name, offset=offset), made(FILESYSTEM, "_StorageInfo", **info)))
        return data + new

    def write(self):
        self.metadata.state["storage_data"] = dict(self.places)
        (self.path / ".metadata").write_bytes(Pickler().dump(self.metadata).data)


@pytest.fixture
def folder(tmp_path):
    """A good folder, to be damaged."""
    return Folder(tmp_path)


def test_a_good_folder_is_read(folder):
    found = read_distributed(folder.path)
    assert {key: part.tensor.read().tolist() for key, part in found.tensors["w"].parts.items()} == {
        (0, 0): [[0.0] * 3] * 2, (2, 0): [[2.0] * 3] * 2,
    }  # fmt: skip
    assert found.objects["rng"].read() == {"a": 1} and list(found.files) == ["__0_0.distcp"]
    second = found.tensors["w"].parts[2, 0].tensor
    data = (folder.path / "__0_0.distcp").read_bytes()
    assert np.frombuffer(data[second.start : second.stop], np.float32).tolist() == [2.0] * 6


def entry(**changes):
    return lambda folder: folder.entry.state.update(changes)


def chunk(number=1, **changes):
    return lambda folder: folder.entry.state["chunks"][number].state.update(changes)


def place(number=1, **changes):
    return lambda folder: folder.places[number][1].state.update(changes)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (entry(size=Size((1 << 60, 3))), "w has sizes"),
        (entry(size=Size((1 << 40, 3))), "w [1099511627776, 3] has 3298534883328 elements, its parts have 12"),
        (entry(size=Size((3, 3))), "w [3, 3] has a part of [2, 3] at [2, 0], outside of it"),
        (entry(size=Size((12,))), "outside of it"),
        (entry(size=None), "w has sizes None"),
        (entry(chunks={}), "its chunks is a dict"),
        (entry(chunks=[1]), "it has a int where a ChunkStorageMetadata is expected"),
        (entry(properties=None), "w has dtype None"),
        (entry(properties=Opaque(METADATA, "TensorProperties", (), (Global("torch", "int32"),), "new")),
         "w at [0, 0] is float32 [2, 3]: expected int32 [2, 3]"),
        (chunk(sizes=Size((1, 3))), "w at [2, 0] is float32 [2, 3]: expected float32 [1, 3]"),
        (chunk(offsets=Size((1, 0))), "it has no place of w at [1, 0]"),
        (chunk(offsets=Size((-1, 0))), "w has sizes (-1, 0)"),
        (lambda folder: folder.entry.state["chunks"].pop(), "w [4, 3] has 12 elements, its parts have 6"),
        (lambda folder: folder.places.pop(1), "it has no place of w at [2, 0]"),
        (lambda folder: folder.places.pop(2), "it has no place of rng"),
        (lambda folder: folder.places.append((made(METADATA, "Metadata"), 1)), "it has a Metadata where a MetadataIndex"),
        (place(relative_path="../x"), "names the file '../x', which is outside of it"),
        (place(relative_path="/etc/passwd"), "which is outside of it"),
        (place(relative_path="__1_0.distcp"), "is incomplete: __1_0.distcp is missing"),
        (place(relative_path=3), "its relative_path is a int"),
        (place(offset=1 << 50), "__0_0.distcp is truncated"),
        (place(offset=-5), "(tensor w)"),
        (place(length=5), "(tensor w)"),
        (place(length=True), "its length is a bool"),
        (place(transform_descriptors=["zstd"]), "w is stored compressed"),
        (place(offset=0, length=1), "__0_0.distcp"),
        (lambda folder: folder.metadata.state.pop("storage_data") and folder.places.clear(), "it has no place of w at [0, 0]"),
        (lambda folder: folder.metadata.state.update(state_dict_metadata=[]), "its state_dict_metadata is a list"),
        (lambda folder: folder.metadata.state.update(state_dict_metadata={3: folder.entry}), "it has a tensor named 3"),
        (lambda folder: folder.metadata.state.update(mcore_data={"w": {"nd_reformulated_orig_global_shape": Size((5, 3))}}),
         "w [4, 3] has the original shape [5, 3]"),
    ],
)  # fmt: skip
def test_metadata_that_does_not_fit_is_refused(folder, change, text):
    change(folder)
    folder.write()
    with pytest.raises(CheckpointError, match=re.escape(text)) as error:
        read_distributed(folder.path)
    assert "\n" not in str(error.value)


def test_flat_ranges_of_boxes(folder):
    """[2, 1, 6]: boxes of 2 x 3 elements, two along the first axis."""
    folder.entry.state["size"] = Size((2, 1, 6))
    for number, part in enumerate(folder.entry.state["chunks"]):
        part.state.update(offsets=Size((number, 0, 0)), sizes=Size((1, 1, 6)))
        folder.places[number][0].state["offset"] = Size((number, 0, 0))
    folder.metadata.state["mcore_data"] = {"w": {"nd_reformulated_orig_global_shape": (4, 3)}}
    folder.write()
    found = read_distributed(folder.path).tensors["w"]
    assert (found.shape, found.flat_of, list(found.parts)) == ((2, 1, 6), (4, 3), [(0, 0, 0), (1, 0, 0)])
    folder.metadata.state["mcore_data"] = {"w": {"nd_reformulated_orig_global_shape": (8, 3)}}
    folder.write()
    with pytest.raises(CheckpointError, match=r"w \[2, 1, 6\] has the original shape \[8, 3\]"):
        read_distributed(folder.path)


def test_damaged_files_are_refused(folder):
    path = folder.path
    data = (path / "__0_0.distcp").read_bytes()
    (path / "__0_0.distcp").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is truncated: .* \(tensor w\)\.$"):
        read_distributed(path)
    whole = (path / ".metadata").read_bytes()
    for length in range(0, len(whole), 50):
        (path / ".metadata").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"\.metadata"):
            read_distributed(path)
    (path / ".metadata").write_bytes(b"cposix\nsystem\n(S'touch mark'\ntR.")
    with pytest.raises(CheckpointError, match=r"\.metadata is refused: its pickle names posix\.system"):
        read_distributed(path)
    (path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: No such file"):
        read_distributed(path)
    for text, message in (
        ('{"sharded_backend": "zarr"}', "sharded_backend zarr: expected torch_dist"),
        ("[", "cannot be read"),
    ):
        (path / "metadata.json").write_text(text)
        with pytest.raises(CheckpointError, match=f"metadata.json.*{message}"):
            read_distributed(path)


def test_a_part_that_is_no_tensor_is_refused(folder):
    folder.places[1][1].state.update(folder.places[2][1].state)
    folder.write()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: w at byte \d+ is no tensor"):
        read_distributed(folder.path)
