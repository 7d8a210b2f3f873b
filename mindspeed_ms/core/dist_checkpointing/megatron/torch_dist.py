"""Folders of Megatron's format `torch_dist`, by the names and shapes of their tensors.

Layers (and experts) are stacked on leading axes, `decoder.layers.mlp.linear_fc1.weight [layers, rows, columns]`, unless the
layers differ, under the names of Transformer Engine's spec. Optimizer states are `optimizer.state.exp_avg.NAME`. Parts are
boxes, or of a distributed optimizer flat ranges of boxes (`torch_file.distributed`). Source: Megatron core 0.12,
dist_checkpointing/strategies/torch.py.
"""

import itertools
import os
import re

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import optimizer_key
from mindspeed_ms.core.dist_checkpointing.megatron import files, names, optimizer
from mindspeed_ms.core.dist_checkpointing.torch_file import read_distributed
from mindspeed_ms.layout.parameters import describe_whole_model
from mindspeed_ms.layout.sharding import FlatSlice, ParameterSharding

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([a-z0-9_]+)\.(.+)")
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)|(mtp\.layers\.\d+\.transformer_layer)\.(.+)")
_EXPERTS = re.compile(r"mlp\.experts\.experts\.(linear_fc[12])\.(weight|bias)")


def read_files(folder):
    """(content of common.pt, DistributedCheckpoint) of a folder. CheckpointError: missing, damaged or refused."""
    return files.read_tree(os.path.join(folder, files.COMMON_FILE)), read_distributed(folder)


def shapes_of(content):
    """{core name: shape of one layer's (expert's) whole tensor} of all weights, and the number of layers."""
    shapes, layers = {}, 0
    for key, tensor in content.tensors.items():
        if "optimizer." not in key:
            for core, _, shape in _parts_of(key, tensor.shape):
                shapes[core] = shape
                layer = re.match(r"decoder\.layers\.(\d+)\.", core)
                layers = max(layers, int(layer[1]) + 1 if layer else 0)
    return shapes, layers


def _parts_of(key, shape):
    """(core name, indices on the leading axes, shape) of every tensor that is stacked in the stored tensor `key`."""
    found = _LAYER.fullmatch(key)
    if found is None:
        yield names.core_name(key)[0], (), tuple(shape)
        return
    layer, inside, further, inside_further = found.groups()
    is_stacked, inside = layer is None and further is None, inside or inside_further
    expert = _EXPERTS.fullmatch(inside)
    leading = is_stacked + (expert is not None)
    for indices in itertools.product(*map(range, shape[:leading])):
        place = further or f"{names.CORE_LAYERS}.{indices[0] if is_stacked else layer}"
        name = f"mlp.experts.local_experts.{indices[-1]}.{expert[1]}.{expert[2]}" if expert else inside
        yield names.core_name(f"{place}.{name}")[0], indices, tuple(shape[leading:])


def problem_of_experts(content, arguments):
    """Why the optimizer cannot be read: Megatron's GroupedMLP keeps the experts' states transposed, in ranges that cross rows,
    if the optimizer is a distributed one. "" if it is not so.

    Args:
        content (DistributedCheckpoint): of the folder.
        arguments (dict): Megatron's `args`, plain values.
    """
    if not arguments.get("use_distributed_optimizer") or not arguments.get("num_experts"):
        return ""
    is_engine = arguments.get("transformer_impl") == names.TRANSFORMER_ENGINE
    is_grouped = arguments.get("moe_grouped_gemm") and (arguments.get("moe_use_legacy_grouped_gemm") or not is_engine)
    for key, tensor in content.tensors.items():
        if "optimizer." not in key and ".experts.experts." in key:
            axis = 1 if key.startswith("decoder.layers.mlp.") else 0  # each expert is a part, but of GroupedMLP
            is_grouped = is_grouped or any(part.sizes[axis] > 1 for part in tensor.parts.values())
    return "the states of its experts are those of GroupedMLP with a distributed optimizer" if is_grouped else ""


def add_tensors(manifest, folder, content, model, with_states=True):
    """Add all weights and optimizer states to a manifest; returns keys of unknown kinds of optimizer state.

    Args:
        content (DistributedCheckpoint): of the folder.
        model (ModelDescription): that it holds.
        with_states (bool): False: the weights alone.

    Raises:
        CheckpointError: tensors that do not fit the model, are missing or left over.
    """
    described = {names.core_name_of(one.local_name, one.layer): one for one in describe_whole_model(model)}
    missing, left, unknown = set(described), [], []
    for key, tensor in content.tensors.items():
        state = _STATE.fullmatch(key)
        if state and not with_states:
            continue
        if state is None and "optimizer." in key:
            unknown.append(key)
            continue
        for core, indices, shape in _parts_of(state[2] if state else key, tensor.flat_of or tensor.shape):
            parameter = described.get(core)
            if parameter is None:
                left.append(key)
                break
            if shape != parameter.sharding.global_shape:
                raise CheckpointError(
                    f"{folder}: {key} has shape {list(shape)}, expected {list(parameter.sharding.global_shape)} by its args."
                )
            if state is None:
                missing.discard(core)
            ours = optimizer_key(state[1], parameter.name) if state else parameter.name
            for part, stored, first in _pieces(folder, key, tensor, indices, shape):
                start = stored.tensor.start + first * stored.tensor.itemsize
                span = start, start + (part.stop - part.start) * stored.tensor.itemsize
                manifest.add(ours, part, tensor.dtype, parameter.grouping, stored.file, span)
    if missing or left:
        texts = [
            f"{title}: {', '.join(sorted(found)[:6])}{' ...' if len(found) > 6 else ''}"
            for title, found in (("missing", missing), ("left over", left))
            if found
        ]
        raise CheckpointError(f"{folder} does not hold the model of its args: {'; '.join(texts)}.")
    _drop_equal_masters(manifest)
    manifest.files.update(content.files)
    return unknown


def _drop_equal_masters(manifest):
    """A distributed optimizer saves float32 weights a second time, as its masters."""
    prefix = optimizer_key("fp32_param", "")
    for key in [key for key in manifest.tensors if key.startswith(prefix)]:
        if manifest.tensors[key.removeprefix(prefix)].dtype == "float32":
            del manifest.tensors[key]


def _pieces(folder, key, tensor, indices, shape):
    """(FlatSlice, Part, first element in it) of the tensor at `indices` of the leading axes."""
    leading = len(indices)
    for stored in tensor.parts.values():
        offsets, sizes = stored.offsets, stored.sizes
        if tensor.flat_of is None:
            inside = [index - start for index, start in zip(indices, offsets)]
            if any(not 0 <= place < size for place, size in zip(inside, sizes)):
                continue
            sharding = _box(folder, key, shape, offsets[leading:], sizes[leading:])
            number = 0
            for place, size in zip(inside, sizes):
                number = number * size + place
            yield FlatSlice(sharding, 0, sharding.numel), stored, number * sharding.numel
            continue
        box = [whole // count for whole, count in zip(tensor.flat_of, tensor.shape)]
        corner = [index * length for index, length in zip(offsets, box)]
        if any(length != 1 for length in box[:leading]):
            raise CheckpointError(f"{folder}: {key} stores several layers in one flat range, which is not supported.")
        if tuple(corner[:leading]) == tuple(indices):
            sharding = _box(folder, key, shape, corner[leading:], box[leading:])
            yield FlatSlice(sharding, offsets[-1], offsets[-1] + sizes[-1]), stored, 0


def _box(folder, key, shape, offsets, sizes):
    """ParameterSharding of a box."""
    cut = [axis for axis, (whole, size) in enumerate(zip(shape, sizes)) if size != whole]
    if not cut:
        return ParameterSharding.replicated(shape)
    bounds = [(start, start + size) for start, size in zip(offsets, sizes)]
    if len(cut) == 1:
        return ParameterSharding(shape, cut[0], (bounds[cut[0]],))
    if len(cut) == 2 and cut[0] == 0:
        return ParameterSharding(shape, cut[1], (bounds[cut[1]],), bounds[0])
    raise CheckpointError(f"{folder}: {key} is cut along axes {cut}, which is not supported.")


def note_optimizer(manifest, folder, common, unknown, found):
    """Counters of the optimizer from common.pt into `found` (optimizer.FoundStates)."""
    path = os.path.join(folder, files.COMMON_FILE)
    tree = common.get("optimizer")
    found.schedule = common.get("opt_param_scheduler") or {}
    if not tree:
        found.problem = f"{path} has none"
        return
    parts = list(tree.values()) if isinstance(tree, dict) and all(str(key).isdigit() for key in tree) else [tree]
    for part in parts:
        inner = part.get("optimizer", part)
        found.add_groups(inner.get("param_groups") or [])
        steps = [group["step"] for group in inner.get("param_groups") or [] if "step" in group]
        state = inner.get("state") or {}
        if "common_step" in state:
            steps.append(state["common_step"])
            found.step_in_state = True
        for step in steps:
            found.add_step(path, step)
        if part.get("grad_scaler"):
            found.grad_scaler = {name: optimizer.scalar(value) for name, value in part["grad_scaler"].items()}
    if unknown:
        found.problem = f"{folder}: the optimizer is stored in a form that is not read here ({unknown[0]})"
    found.kind = "distributed" if manifest.arguments.get("use_distributed_optimizer") else "plain"
