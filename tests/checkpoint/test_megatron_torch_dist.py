"""Megatron's format torch_dist: stacked layers and experts in boxes, and flat ranges of boxes of a distributed optimizer."""

import argparse
import itertools
import os

import numpy as np
import pytest

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import optimizer_key
from mindspeed_ms.core.dist_checkpointing.megatron import names
from mindspeed_ms.core.dist_checkpointing.megatron.manifest import read_megatron_manifest
from mindspeed_ms.core.dist_checkpointing.megatron.writer import MegatronTarget
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.core.dist_checkpointing.torch_file import Global, Opaque, Size, TensorToWrite, write_torch_file
from mindspeed_ms.core.dist_checkpointing.torch_file.pickler import Pickler
from mindspeed_ms.testing.megatron_checkpoints import SCHEDULE, MadeUpReader
from tests.checkpoint.test_megatron import EXPERTS, GPT, LLAMA, TP2, assert_equal, configured

_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
FILE = "__0_0.distcp"
PROPERTIES = Opaque(_METADATA, "TensorProperties", (), (Global("torch", "float32"),), "new")


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def made(module, name, **state):
    return Opaque(module, name, (), state, "new")


class Folder:
    """A checkpoint under construction."""

    def __init__(self, path):
        self.path, self.tensors, self.places, self.data = str(path), {}, {}, {}

    def add(self, key, shape, parts, original=None):
        """Add a tensor; parts: (offsets, array)."""
        chunks = []
        for offsets, array in parts:
            temporary = os.path.join(self.path, "part.pt")
            write_torch_file(temporary, TensorToWrite("float32", array.shape, np.ascontiguousarray(array)))
            with open(temporary, "rb") as file, open(os.path.join(self.path, FILE), "ab") as target:
                start, content = target.tell(), file.read()
                target.write(content)
            os.remove(temporary)
            index = made(_METADATA, "MetadataIndex", fqn=key, index=None, offset=Size(offsets))
            info = made(_FILES, "_StorageInfo", relative_path=FILE, offset=start, length=len(content))
            self.places[index] = info
            chunks.append(made(_METADATA, "ChunkStorageMetadata", offsets=Size(offsets), sizes=Size(array.shape)))
        self.tensors[key] = made(_METADATA, "TensorStorageMetadata", properties=PROPERTIES, size=Size(shape), chunks=chunks)
        self.data[key] = {"nd_reformulated_orig_global_shape": Size(original)} if original else {}

    def finish(self, common):
        state = {"state_dict_metadata": self.tensors, "storage_data": self.places, "mcore_data": self.data}
        with open(os.path.join(self.path, ".metadata"), "wb") as file:
            file.write(Pickler().dump(Opaque(_METADATA, "Metadata", (), state, "new")).data)
        write_torch_file(os.path.join(self.path, "common.pt"), common)


def boxes(shape, counts):
    """(indices of a box, its slices) of a grid."""
    sizes = [whole // count for whole, count in zip(shape, counts)]
    for index in itertools.product(*map(range, counts)):
        yield index, tuple(slice(place * size, (place + 1) * size) for place, size in zip(index, sizes))


def save(path, config, is_flat):
    """Write what Megatron writes for two tensor-parallel ranks, and two data-parallel ones that share the optimizer."""
    path.mkdir()
    reader = MadeUpReader(config)
    target = MegatronTarget(reader, config, names.TRANSFORMER_ENGINE)
    stacked = {}
    ((_, _, parameters),) = target.ranks
    for one in parameters:
        has_experts = one.description.layer is not None and target.model.mlp_kind(one.description.layer) == "experts"
        expert = one.core.partition(".local_experts.")[2].partition(".")
        if expert[2]:
            key = f"decoder.layers.mlp.experts.experts.{expert[2]}"
        else:
            name = names.name_in_style(one.core, names.TRANSFORMER_ENGINE, has_experts)
            key = name if one.description.layer is None else f"decoder.layers.{name.split('.', 3)[3]}"
        stacked.setdefault(key, []).append(one)
    folder = Folder(path)
    for key, members in stacked.items():
        layers = len({one.description.layer for one in members})
        experts = len(members) // layers
        leading = () if members[0].description.layer is None else (layers, experts) if ".experts." in key else (layers,)
        inner = members[0].sharding.global_shape
        grid = [1] * len(inner)
        if members[0].description.tensor_parallel:
            axis = 1 if "linear_proj" in key or "linear_fc2" in key else 0
            grid[axis] = 4 if members[0].description.grouping == "gate_up" else 2
        for state in ("", "exp_avg", "exp_avg_sq", *(["fp32_param"] if is_flat else [])):
            source = "" if state == "fp32_param" else state
            keys = [optimizer_key(source, one.key) if source else one.key for one in members]
            array = np.stack([reader.arrays[one] for one in keys]).reshape(*leading, *inner)
            name, counts = f"optimizer.state.{state}.{key}" if state else key, [*leading, *grid]
            if not state or not is_flat:
                parts = [(tuple(part.start for part in place), array[place]) for _, place in boxes(array.shape, counts)]
                folder.add(name, array.shape, parts)
            elif array.ndim == 1:
                folder.add(name, array.shape, [((0,), array[:5]), ((5,), array[5:])])
            else:
                numel, parts = array.size // int(np.prod(counts)), []
                for index, place in boxes(array.shape, counts):
                    values = array[place].reshape((1,) * array.ndim + (-1,))
                    parts += [((*index, 0), values[..., : numel // 3]), ((*index, numel // 3), values[..., numel // 3 :])]
                folder.add(name, (*counts, numel), parts, array.shape)
    group = {"wd_mult": 1.0, "lr": 0.1}
    inner = {"param_groups": [{**group, "step": 7}]} if is_flat else {"state": {"common_step": 7.0}, "param_groups": [group]}
    values = {**target.arguments, "use_distributed_optimizer": is_flat, "params_dtype": Global("torch", "float32")}
    common = {"args": argparse.Namespace(**values), "checkpoint_version": 3.0, "iteration": 7}
    folder.finish({**common, "optimizer": {"optimizer": inner} if is_flat else inner, "opt_param_scheduler": SCHEDULE})
    return reader


CASES = {
    "rope": (LLAMA, {}),
    "biases, tied": (GPT, {}),
    "experts": (LLAMA, {**EXPERTS, "moe_shared_expert_intermediate_size": 8}),
}


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_read(tmp_path, case, is_flat):
    """Every weight and moment, bit by bit, from boxes and from flat ranges of them."""
    source = save(tmp_path / "iter_0000007", configured(*CASES[case]), is_flat)
    manifest = read_megatron_manifest(str(tmp_path / "iter_0000007"))
    with CheckpointReader(str(tmp_path / "iter_0000007"), manifest) as reader:
        assert_equal(reader, source.arrays)
        assert reader.verify() == []
    assert not manifest.not_resumable and manifest.states["optimizer"]["step"] == 7


def test_faults(tmp_path):
    path = tmp_path / "iter_0000007"
    save(path, configured(LLAMA, parallel={}), False)
    size = os.path.getsize(path / FILE)
    manifest = read_megatron_manifest(str(path))
    piece = next(iter(manifest.tensors.values())).pieces[0]
    with open(path / piece.file, "r+b") as file:
        file.seek(piece.start)
        file.write(b"\0\0\0\1")
    with CheckpointReader(str(path), manifest) as reader:
        problem = reader.verify()[0]
    assert f"{piece.file}: the check sum of its record" in problem and f"(tensor {next(iter(manifest.tensors))})" in problem
    content = (path / "common.pt").read_bytes()
    (path / "common.pt").write_bytes(content.replace(b"checkpoint_version", b"checkpoint_versioM", 1))
    with CheckpointReader(str(path), read_megatron_manifest(str(path))) as reader:
        assert any(text.startswith("common.pt: the check sum of its record") for text in reader.verify())
    with open(path / FILE, "r+b") as file:
        file.truncate(size - 100)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        read_megatron_manifest(str(path))
    os.remove(path / FILE)
    with pytest.raises(CheckpointError, match=rf"is incomplete: {FILE} is missing"):
        read_megatron_manifest(str(path))
    with pytest.raises(CheckpointError, match=r"common\.pt"):
        os.truncate(path / "common.pt", 100)
        read_megatron_manifest(str(path))


def test_written_in_rank_files(tmp_path):
    """From torch_dist to files of ranks and back: the same tensors."""
    source = save(tmp_path / "iter_0000007", configured(LLAMA), True)
    manifest = read_megatron_manifest(str(tmp_path / "iter_0000007"))
    with CheckpointReader(str(tmp_path / "iter_0000007"), manifest) as reader:
        path = MegatronTarget(reader, configured(LLAMA, parallel=TP2)).write(str(tmp_path / "new"))
    assert os.path.isfile(os.path.join(path, "mp_rank_01", "distrib_optim.pt"))
    with CheckpointReader(path, read_megatron_manifest(path)) as reader:
        assert_equal(reader, source.arrays)
