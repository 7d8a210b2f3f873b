"""Megatron's format torch_dist: stacked layers and experts in boxes, and flat ranges of boxes of a distributed optimizer."""

import argparse
import itertools
import os

import numpy as np
import pytest

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import optimizer_key
from mindspeed_ms.core.dist_checkpointing.megatron import names, torch_dist_buffers, torch_dist_writer
from mindspeed_ms.core.dist_checkpointing.megatron.manifest import _counts_of_arguments, read_megatron_manifest
from mindspeed_ms.core.dist_checkpointing.megatron.ranks import file_places, parameters_of
from mindspeed_ms.core.dist_checkpointing.megatron.torch_dist_writer import TorchDistTarget
from mindspeed_ms.core.dist_checkpointing.megatron.writer import MegatronTarget
from mindspeed_ms.core.dist_checkpointing.megatron.written_optimizer import OptimizerWriter
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.core.dist_checkpointing.torch_file import (
    Global,
    Opaque,
    Size,
    TensorToWrite,
    read_distributed,
    read_torch_file,
    write_torch_file,
)
from mindspeed_ms.core.dist_checkpointing.torch_file.distributed_writer import EntryToWrite, write_distributed
from mindspeed_ms.core.dist_checkpointing.torch_file.pickler import Pickler
from mindspeed_ms.testing.megatron_checkpoints import SCHEDULE, MadeUpReader
from tests.checkpoint.test_megatron import EP2, EXPERTS, GPT, LLAMA, PP2, SP, TP2, VPP2, assert_equal, configured

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


DENSE_FIRST = {**EXPERTS, "moe_layer_freq": [0, 0, 1, 1]}
WRITTEN = {
    "rope, stages": (LLAMA, {}, {**TP2, **VPP2}, False, "float32"),
    "biases, tied, half precision": (GPT, {}, {**PP2, "num_layer_list": [1, 4]}, False, "bfloat16"),
    "tied, distributed": (GPT, {}, {**TP2, **PP2, "num_layer_list": [1, 4]}, True, "bfloat16"),
    "distributed": ({**LLAMA, "qk_layernorm": True}, {}, TP2, True, "float32"),
    "experts": (LLAMA, {**EXPERTS, "moe_shared_expert_intermediate_size": 8}, {**TP2, **SP, **EP2}, False, "float32"),
    "experts on one stage, distributed": (LLAMA, DENSE_FIRST, {**PP2, **EP2}, True, "float32"),
    "experts in one tensor": (LLAMA, {**EXPERTS, "moe_grouped_gemm": True}, {**TP2, **SP, **EP2}, False, "float32"),
}


def one_by_one(arrays):
    """Arrays with experts that are one tensor as one for each, by our keys; rows and columns are swapped."""
    result = {}
    for key, values in arrays.items():
        stem, _, name = key.rpartition(".")
        if name in ("weight1", "weight2"):
            part = {"weight1": "mapping", "weight2": "projection"}[name]
            result.update({f"{stem}.local_experts.{number}.{part}.weight": one.T for number, one in enumerate(values)})
        else:
            result[key] = values
    return result


def written(path, case):
    model, experts, parallel, distributed, dtype = WRITTEN[case]
    config = configured(model, experts, parallel)
    target = TorchDistTarget(MadeUpReader(config, dtype), config, None, distributed)
    return target, target.write(str(path))


@pytest.mark.parametrize("case", WRITTEN)
def test_written_and_read_again(tmp_path, case):
    target, path = written(tmp_path, case)
    manifest = read_megatron_manifest(str(tmp_path))
    with CheckpointReader(path, manifest) as reader:
        assert_equal(reader, one_by_one(target.reader.arrays))
        assert reader.verify() == [] and reader.incomplete() == []
    assert not manifest.not_resumable and manifest.states["optimizer"] == {"step": 7, "grad_scaler": {}}
    assert manifest.states["train_state"]["consumed_train_samples"] == 28
    names_of_files = [name for name, _ in target.written]
    assert sorted(os.listdir(path)) == sorted([".metadata", "common.pt", "metadata.json", *names_of_files])
    assert read_torch_file(os.path.join(path, "common.pt"))["args"].ckpt_format == "torch_dist"


def test_gate_and_up_are_parts_of_their_own(tmp_path):
    """As Megatron saves them on one tensor-parallel rank too."""
    _, path = written(tmp_path, "experts on one stage, distributed")
    stored = read_distributed(path).tensors["decoder.layers.0.mlp.linear_fc1.weight"]
    assert sorted(stored.parts) == [(0, 0), (24, 0)]


def test_what_it_cannot_hold(tmp_path):
    config = configured(LLAMA)
    with pytest.raises(CheckpointError, match="legacy models have the format torch only"):
        TorchDistTarget(MadeUpReader(config), config, names.LEGACY)
    config = configured({**LLAMA, "num_layers": 6}, parallel={**PP2, "noop_layers": [5]})
    with pytest.raises(CheckpointError, match="noop_layers: Megatron's format torch_dist"):
        TorchDistTarget(MadeUpReader(config), config)


def save_in_buffers(monkeypatch, path, case):
    """A checkpoint whose optimizer is stored as objects (`dp_zero_gather_scatter`)."""
    prefix = "optimizer.distributed.dp_group_idx_"
    entries = TorchDistTarget._entries

    def without_states(target, parameter, chained):
        return [one for one in entries(target, parameter, chained) if "optimizer." not in one.key]

    def with_objects(folder, contents, workers):
        target, expert_groups = made[0], itertools.count()
        for _group, (_, at, parameters) in enumerate(target.ranks):
            has_experts = target.experts_in(parameters)
            tree = target.optimizer.flat(parameters, at, has_experts, at.ep == 0)
            settings = target.optimizer.tree(parameters, has_experts)
            groups = [at.pp * 2 + at.tp if not target.has_experts else at.pp, next(expert_groups) if has_experts else None]
            pairs = zip(tree, settings, groups) if has_experts else [(tree, settings, groups[0])]
            for number, (buffer, one, place) in enumerate(pairs):
                if buffer is not None and (number or at.ep == 0):
                    key = f"{f'chained_{number}.' if has_experts else ''}{prefix}{place}"
                    contents[0].append(EntryToWrite(f"{key}.param_state/shard_0_1", [buffer]))
                    contents[0].append(EntryToWrite(f"{key}.optimizer/shard_0_1", [one["optimizer"]]))
        write_distributed(folder, contents, workers)

    made, start = [], TorchDistTarget.__init__
    monkeypatch.setattr(TorchDistTarget, "_entries", without_states)
    monkeypatch.setattr(TorchDistTarget, "__init__", lambda one, *rest: (made.append(one), start(one, *rest))[1])
    monkeypatch.setattr(torch_dist_writer, "write_distributed", with_objects)
    monkeypatch.setattr(OptimizerWriter, "common_tree", lambda *_: {"param_state_sharding_type": "dp_zero_gather_scatter"})
    return written(path, case)


@pytest.mark.parametrize("case", ["tied, distributed", "distributed"])
def test_optimizer_in_buffers(monkeypatch, tmp_path, case):
    """`dp_zero_gather_scatter`: the states of each model-parallel rank as one object."""
    target, path = save_in_buffers(monkeypatch, tmp_path, case)
    manifest = read_megatron_manifest(path)
    with CheckpointReader(path, manifest) as reader:
        assert_equal(reader, target.reader.arrays)
    assert not manifest.not_resumable and manifest.states["optimizer"]["step"] == 7


def test_a_buffer_is_missing(monkeypatch, tmp_path):
    _, path = save_in_buffers(monkeypatch, tmp_path, "distributed")
    monkeypatch.setattr(torch_dist_buffers, "_ranks", lambda *_: {5: None})
    monkeypatch.setattr(torch_dist_buffers, "parameters_of", lambda model, *_: target_parameters(model))
    with pytest.raises(CheckpointError, match="dp_group_idx_5 of the optimizer is missing"):
        read_megatron_manifest(path)


def target_parameters(model):
    return parameters_of(model, next(iter(file_places(model).values())))


def test_experts_of_grouped_mlp_give_their_weights(tmp_path):
    """A distributed optimizer of Megatron's GroupedMLP has states of another form: they are not mistaken for ours."""
    _target, path = written(tmp_path, "experts on one stage, distributed")
    common = os.path.join(path, "common.pt")
    tree = read_torch_file(common)
    tree["args"].moe_grouped_gemm = True
    write_torch_file(common, tree)
    manifest = read_megatron_manifest(path)
    assert "GroupedMLP" in manifest.not_resumable
    assert not any(key.startswith("optimizer.") for key in manifest.tensors)
    tree["args"].transformer_impl = names.TRANSFORMER_ENGINE  # its grouped experts have the states of all others
    write_torch_file(common, tree)
    assert not read_megatron_manifest(path).not_resumable


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        (
            {"num_layers": 6, "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
            [[3], [3]],
        ),
        ({"num_layers": 3, "account_for_embedding_in_pipeline_split": True}, [[1], [2]]),
        (
            {"num_layers": 7, "account_for_loss_in_pipeline_split": True, "virtual_pipeline_model_parallel_size": 2},
            [[2, 2], [2, 1]],
        ),
    ],
)
def test_layers_of_stages_by_the_arguments(values, counts):
    assert _counts_of_arguments({"pipeline_model_parallel_size": 2, **values}) == counts
