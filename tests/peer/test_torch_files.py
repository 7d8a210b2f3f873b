"""Files of torch.save, against torch itself (needs the `[peer]` extra): read and written bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.torch_file import (
    TensorReference,
    TensorToWrite,
    read_distributed,
    read_torch_file,
    write_torch_file,
    writer,
)

GOLDEN = Path(os.environ.get("MINDSPEED_MS_GOLDEN", "")) / "ckpt"
pytestmark = pytest.mark.peer


def run_torch(what, folder):
    script = Path(__file__).with_name("torch_files.py")
    result = subprocess.run([sys.executable, str(script), what, str(folder)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder with files that torch saved, and expected.json."""
    folder = tmp_path_factory.mktemp("torch")
    run_torch("write", folder)
    return folder


def tensors(value, place, found):
    if isinstance(value, TensorReference):
        found[place] = [value.dtype, list(value.shape), value.read().tobytes().hex()]
    elif isinstance(value, dict):
        for key, item in value.items():
            tensors(item, f"{place}.{key}" if place else str(key), found)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            tensors(item, f"{place}.{number}", found)
    return found


def test_all_kinds_of_files_and_tensors_are_read_bit_for_bit(saved):
    expected = json.loads((saved / "expected.json").read_text())
    assert len(expected["plain.pt"]) > 30
    del expected["distributed"]
    for name, wanted in expected.items():
        tree = read_torch_file(saved / name)
        assert tensors(tree, "", {}) == wanted
    tree = read_torch_file(saved / "old.pt")
    assert tree["args"].lr == 0.1 and tree["args"].params_dtype.name == "float32"
    assert tree["master"].attributes == {"tensor_model_parallel": True, "partition_dim": 1}
    assert np.array_equal(tree["array"], np.arange(6).reshape(2, 3).T)


def test_a_folder_of_torch_distributed_checkpoint_is_read(saved):
    found = read_distributed(saved / "distributed")
    whole = {name: part.tensor for name, tensor in found.tensors.items() for part in tensor.parts.values()}
    assert tensors(whole, "", {}) == json.loads((saved / "expected.json").read_text())["distributed"]
    assert [saved_object.read() for saved_object in found.objects.values()] == [1, 2] or found.objects["numbers"].read() == [
        1,
        2,
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("float8", r"tensor a\.w has dtype float8_e4m3fn, which is not supported"),
        ("complex", r"tensor a\.w has dtype complex64, which is not supported"),
        ("sparse", r"names torch\._utils\._rebuild_sparse_tensor"),
        ("module", r"names torch\.nn\.modules\.linear\.Linear, and it holds a whole module"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(saved, name, text):
    with pytest.raises(CheckpointError, match=text):
        read_torch_file(saved / f"refused_{name}.pt")


def test_torch_loads_what_is_written(saved, monkeypatch):
    (saved / "ours").mkdir()
    expected = json.loads((saved / "expected.json").read_text())
    del expected["distributed"]
    for name in expected:
        write_torch_file(saved / "ours" / name, read_torch_file(saved / name))
    tensor = TensorToWrite("float32", (2, 3), lambda: np.arange(6, dtype=np.float32))
    write_torch_file(saved / "ours" / "written.pt", {"weight": tensor, "tied": tensor})
    monkeypatch.setattr(writer, "_MOST_BYTES", 4)  # as if it had more than 4 GB
    write_torch_file(saved / "ours" / "large.pt", {"weight": tensor, "tied": tensor})
    assert int(run_torch("check", saved)) == sum(map(len, expected.values()))


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="needs the recordings")
def test_megatrons_files_that_we_write_load_as_the_originals(tmp_path):
    files = sorted(GOLDEN.rglob("*.pt"))
    for number, file in enumerate(files):
        write_torch_file(tmp_path / f"{number}.pt", read_torch_file(file))
    pairs = "\n".join(f"{file}\t{tmp_path / f'{number}.pt'}" for number, file in enumerate(files))
    (tmp_path / "pairs").write_text(pairs)
    assert int(run_torch("compare", tmp_path)) == len(files) > 15
