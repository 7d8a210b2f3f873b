"""Optimizer state in Megatron's files as pieces of our tensors: exp_avg, exp_avg_sq and float32 masters.

Plain optimizers index their state by parameter: groups (with and without weight decay) in the order in which a walk over the
file's parameters meets them, module order inside. A half-precision one keeps masters beside it. The distributed optimizer keeps
flat buffers in `distrib_optim.pt` (`buffers`). With expert parallelism the optimizer is a list: dense parameters, experts.
"""

import os
from dataclasses import dataclass, field
from math import prod

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError, DamagedCheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import OPTIMIZER_PREFIX, optimizer_key
from mindspeed_ms.core.dist_checkpointing.megatron import buffers, files, names
from mindspeed_ms.core.dist_checkpointing.torch_file import TensorReference
from mindspeed_ms.layout.sharding import FlatSlice

HALF = ("bfloat16", "float16")
STATES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum_buffer", "master_param": "fp32_param"}
SCHEDULE = (
    *("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style"),
    *("start_wd", "end_wd", "wd_incr_steps", "wd_incr_style", "num_steps"),
)
_DECOUPLED = (names.WORDS, names.OUTPUT_LAYER)


@dataclass
class FoundStates:
    """Counters and settings of the optimizer, collected from all files.

    Attributes:
        steps (dict[int, str]): Adam's step and a file that has it.
        groups (list[dict]): settings of parameter groups, each once.
        problem (str): why the training cannot go on; "" if it can.
        kind (str): "plain" or "distributed"; "" without an optimizer.
        step_in_state, step_in_groups (bool): Adam's step is beside each parameter (torch's AdamW), in the groups (FusedAdam).
        grad_scaler, schedule (dict): of the first file.
    """

    steps: dict = field(default_factory=dict)
    groups: list = field(default_factory=list)
    problem: str = ""
    kind: str = ""
    step_in_state: bool = False
    step_in_groups: bool = False
    grad_scaler: dict = field(default_factory=dict)
    schedule: dict = field(default_factory=dict)

    def add_step(self, path, value):
        """Note Adam's step (number or TensorReference)."""
        self.steps.setdefault(int(scalar(value)), path)

    def add_groups(self, groups):
        """Note the settings of parameter groups."""
        for group in groups:
            self.step_in_groups = self.step_in_groups or "step" in group
            settings = {name: value for name, value in group.items() if name not in ("params", "step")}
            if settings not in self.groups:
                self.groups.append(settings)


def scalar(value):
    """Number in a tree: plain, or a tensor with one element."""
    return value.read().reshape(-1)[0].item() if isinstance(value, TensorReference) else value


def add_states(manifest, folder, rank, parameters, references, found):
    """Add the optimizer's state in the files of one rank.

    Args:
        manifest (MegatronManifest): with the weights of the rank.
        folder (str): of the checkpoint.
        rank (files.RankFile): the rank.
        parameters (list[FileParameter]): of its file, in module order.
        references (dict): (chunk, core name) -> TensorReference of the weight.
        found (FoundStates): gets counters and settings.

    Raises:
        CheckpointError: states that do not fit the weights; names file and tensor.
    """
    path, tree = os.path.join(folder, rank.name), rank.tree.get("optimizer")
    if not tree:
        found.problem = found.problem or f"{path} has none"
        return
    found.schedule = found.schedule or rank.tree.get("opt_param_scheduler") or {}
    parts = tree if isinstance(tree, list) else [tree]
    trained = [one for one in parameters if one.description.trainable]
    flat = _distributed_tree(manifest, folder, rank, trained)
    shares = shares_of(path, parts, trained)
    if isinstance(flat, list) != (len(parts) > 1) and flat is not None:
        raise CheckpointError(f"{os.path.join(rank.folder, files.OPTIMIZER_FILE)} does not belong to {path}: one holds a list.")
    for number, (part, share) in enumerate(zip(parts, shares)):
        inner = part.get("optimizer", part)
        groups = inner.get("param_groups") or []
        found.add_groups(groups)
        for group in groups:
            if "step" in group:
                found.add_step(path, group["step"])
        if part.get("grad_scaler"):
            found.grad_scaler = {name: scalar(value) for name, value in part["grad_scaler"].items()}
        if inner.get("state"):
            _add_indexed(manifest, rank, path, part, inner, share, references, found)
        elif flat is not None:
            found.kind = "distributed"
            buffer = flat[number] if isinstance(flat, list) else flat
            if buffer is not None:
                dtypes = {one.key: references[one.chunk, one.core].dtype for one in share}
                place = os.path.join(folder, rank.folder, files.OPTIMIZER_FILE)
                add_flat(manifest, folder, place, rank.pipeline, buffer, share, dtypes)
        elif share and not (rank.expert and len(parts) == 1):
            found.problem = found.problem or f"{path} has settings only, and {rank.folder} no {files.OPTIMIZER_FILE}"


def _distributed_tree(manifest, folder, rank, parameters):
    name = f"{rank.folder}/{files.OPTIMIZER_FILE}"
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        if rank.expert and not any(one.is_expert for one in parameters):
            return None  # the rank before it has the whole state of a stage without experts
        if manifest.arguments.get("use_distributed_optimizer") and not manifest.arguments.get("no_save_optim"):
            raise DamagedCheckpointError(f"{folder} is incomplete: {name} is missing (its args say use_distributed_optimizer).")
        return None
    manifest.files[name] = os.path.getsize(path)
    return files.read_tree(path)


def shares_of(path, parts, parameters):
    """Parameters of each optimizer of a list."""
    if len(parts) == 1:
        return [parameters]
    of_experts = [any(group.get("is_expert_parallel") for group in _groups(part)) for part in parts]
    dense = [one for one in parameters if not one.is_expert]
    experts = [one for one in parameters if one.is_expert]
    if sum(of_experts) > 1 or (experts and not any(of_experts)) or len(parts) - sum(of_experts) > 2:
        raise CheckpointError(f"{path} has {len(parts)} optimizers: expected one of dense parameters and one of experts.")
    if len(parts) - sum(of_experts) == 2:  # --overlap-param-gather-with-optimizer-step
        shares = iter([[one for one in dense if one.chunk == 0], [one for one in dense if one.chunk]])
    else:
        shares = iter([dense])
    return [experts if is_expert else next(shares) for is_expert in of_experts]


def _groups(part):
    return part.get("optimizer", part).get("param_groups") or []


def _add_indexed(manifest, rank, path, part, inner, parameters, references, found):
    """State by the index of parameters, and masters by group."""
    found.kind = "plain"
    state, masters = dict(inner["state"]), part.get("fp32_from_fp16_params")
    if "common_step" in state:
        found.add_step(path, state.pop("common_step"))
    for number, (group, members) in enumerate(zip(inner["param_groups"], _members(path, inner["param_groups"], parameters))):
        for index, parameter in zip(group["params"], members):
            values = state.pop(index, None)
            if values is None:
                raise CheckpointError(f"{path}: optimizer state {index} ({parameter.core}) is missing.")
            _add_values(manifest, rank, path, index, values, parameter, found)
        if masters is not None:
            half = [one for one in members if references[one.chunk, one.core].dtype in HALF]
            _add_masters(manifest, rank, path, number, masters, half)
    if state:
        raise CheckpointError(f"{path}: optimizer states {sorted(state)[:6]} belong to no parameter.")


def _members(path, groups, parameters):
    """Parameters of each group, in its order."""
    decoupled = any(group.get("is_decoupled_lr") for group in groups)

    def kind_of(parameter):
        return not parameter.description.decay, decoupled and parameter.core in _DECOUPLED

    by_kind = {}
    for parameter in parameters:
        by_kind.setdefault(kind_of(parameter), []).append(parameter)
    if all("wd_mult" in group for group in groups):
        kinds = [(group["wd_mult"] == 0.0, bool(group.get("is_decoupled_lr"))) for group in groups]
    else:
        kinds = list(by_kind)  # the order in which the walk meets them
    result = [by_kind.pop(kind, []) for kind in kinds]
    for number, (group, members) in enumerate(zip(groups, result)):
        if len(group["params"]) != len(members):
            raise CheckpointError(
                f"{path}: parameter group {number} of the optimizer has {len(group['params'])} parameters, but the model "
                f"{len(members)} of its kind."
            )
    if by_kind or len(kinds) != len(groups):
        left = [one.core for members in by_kind.values() for one in members]
        raise CheckpointError(f"{path}: the optimizer's groups have no state of {', '.join(left[:6])}.")
    return result


def _add_values(manifest, rank, path, index, values, parameter, found):
    for name, value in values.items():
        if name == "step":
            found.step_in_state = True
            found.add_step(path, value)
            continue
        if name not in STATES or not isinstance(value, TensorReference):
            raise CheckpointError(f"{path}: state {name} of optimizer parameter {index} ({parameter.core}) is unknown here.")
        _add_tensor(manifest, rank.name, path, f"{name} of optimizer parameter {index}", value, STATES[name], parameter)


def _add_masters(manifest, rank, path, number, masters, members):
    tensors = masters[number] if number < len(masters) else []
    if len(tensors) != len(members):
        raise CheckpointError(
            f"{path}: group {number} has {len(tensors)} float32 masters for {len(members)} parameters of half precision."
        )
    for place, (tensor, parameter) in enumerate(zip(tensors, members)):
        what = f"fp32_from_fp16_params[{number}][{place}]"
        _add_tensor(manifest, rank.name, path, what, tensor, "fp32_param", parameter)


def _add_tensor(manifest, file, path, what, tensor, state, parameter):
    shape = parameter.sharding.local_shape
    # experts of one tensor have two axes in Megatron and three here
    if prod(tensor.shape) != prod(shape) or (tuple(tensor.shape) != tuple(shape) and len(shape) != 3):
        raise CheckpointError(f"{path}: {what} has shape {list(tensor.shape)}, expected {list(shape)} of {parameter.core}.")
    if not tensor.is_contiguous:
        raise CheckpointError(f"{path}: {what} is not stored row by row (strides {list(tensor.stride)}).")
    part = FlatSlice(parameter.sharding, 0, parameter.sharding.numel)
    key, grouping = optimizer_key(state, parameter.key), parameter.description.grouping
    manifest.add(key, part, tensor.dtype, grouping, file, (tensor.start, tensor.stop))


def add_flat(manifest, folder, path, stage, tree, parameters, dtypes, with_weights=True):
    """Add the flat buffers of one rank: {number: {(parameter dtype, gradient dtype): {param, exp_avg, exp_avg_sq}}}.

    Args:
        folder (str): of the checkpoint.
        path (str): of their file, for messages.
        stage (int): pipeline rank.
        parameters (list[FileParameter]): that they hold, in module order.
        dtypes (dict[str, str]): of the weights, by our key.
        with_weights (bool): float32 weights are compared with those in the buffers.

    Raises:
        CheckpointError: buffers that do not fit the parameters.
    """
    held = [
        (_dtype_name(kinds), entry)
        for number in sorted((key for key in tree if key != "buckets_coalesced"), key=int)
        for kinds, entry in tree[number].items()
    ]
    wanted = {}
    for parameter in parameters:
        wanted.setdefault((parameter.chunk, dtypes[parameter.key]), []).append(parameter)
    if [dtype for dtype, _ in held] != [dtype for _, dtype in wanted]:
        raise CheckpointError(
            f"{path} has buffers of {', '.join(dtype for dtype, _ in held) or 'nothing'}, but the weights beside it are "
            f"{', '.join(dtype for _, dtype in wanted)}."
        )
    for (dtype, entry), ((chunk, _), members) in zip(held, wanted.items()):
        _add_buffer(manifest, folder, path, stage, chunk, dtype, entry, members, with_weights)


def _dtype_name(dtypes):
    first = dtypes[0] if isinstance(dtypes, tuple) else dtypes
    return getattr(first, "name", str(first)).rpartition(".")[2]


def _add_buffer(manifest, folder, path, stage, chunk, dtype, entry, members, with_weights):
    sizes = [one.sharding.numel for one in members]
    entries = entry if isinstance(entry, list) else [entry]
    states = [key for key in entries[0] if key != "numel_unpadded"]
    unknown = [key for key in states if key != "param" and key not in STATES]
    if unknown:
        raise CheckpointError(f"{path}: state {unknown[0]} of buffer {chunk} is unknown here.")
    for state in states:
        tensors = [one[state] for one in entries]
        if isinstance(entry, list):
            places = buffers.places_in_buckets(sizes, [prod(tensor.shape) for tensor in tensors])
        else:
            places = _joined_places(manifest, stage, chunk, members, sizes, prod(tensors[0].shape))
        if places is None:
            raise CheckpointError(
                f"{path}: {state} of buffer {chunk} has {sum(prod(tensor.shape) for tensor in tensors)} elements, which the "
                f"{sum(sizes)} of its {len(sizes)} parameters do not fill by Megatron's rules."
            )
        target = STATES[state] if state != "param" else "fp32_param" if dtype in HALF else None
        if target is None and not with_weights:
            continue
        for (bucket, start), parameter in zip(places, members):
            tensor, part = tensors[bucket], FlatSlice(parameter.sharding, 0, parameter.sharding.numel)
            itemsize = (tensor.stop - tensor.start) // max(prod(tensor.shape), 1)
            first = tensor.start + start * itemsize
            # the values of float32 weights are in both files
            key = parameter.key if target is None else optimizer_key(target, parameter.key)
            span = first, first + parameter.sharding.numel * itemsize
            file = os.path.relpath(tensor.path, folder)
            manifest.add(key, part, tensor.dtype, parameter.description.grouping, file, span)


def _joined_places(manifest, stage, chunk, members, sizes, length):
    shared = [index for index, one in enumerate(members) if one.description.shared]
    for bucket_size in dict.fromkeys((buffers.bucket_size_of(manifest.arguments, stage, chunk), None)):
        starts, total = buffers.places(sizes, shared, bucket_size)
        if total == length:
            return [(0, start) for start in starts]
    return None


def finish(manifest, folder, found):
    """Check that the states are complete, and fill the manifest's counters.

    Raises:
        CheckpointError: elements of a tensor that no file has, or states of different steps.
    """
    for key, stored in manifest.tensors.items():
        held = sum(piece.slice.stop - piece.slice.start for piece in stored.pieces)
        if held != prod(stored.shape):
            raise CheckpointError(f"{folder}: {key} has {prod(stored.shape)} elements, but the files hold {held} of them.")
    has_states = any(key.startswith(OPTIMIZER_PREFIX) for key in manifest.tensors)
    if not has_states or found.problem:
        manifest.not_resumable = found.problem or f"{folder} has no optimizer state"
        _drop_states(manifest)
        return
    if len(found.steps) > 1:
        texts = [f"{step} in {path}" for step, path in sorted(found.steps.items())[:3]]
        raise CheckpointError(f"{folder}: the optimizer's states are of different steps: {', '.join(texts)}.")
    missing = [name for name in SCHEDULE if name not in found.schedule]
    if missing:
        manifest.not_resumable = f"opt_param_scheduler lacks {', '.join(missing[:4])}"
    else:
        manifest.states["opt_param_scheduler"] = {name: scalar(found.schedule[name]) for name in SCHEDULE}
    step = next(iter(found.steps), manifest.iteration)
    manifest.states["optimizer"] = {"step": step, "grad_scaler": found.grad_scaler}
    manifest.states["train_state"]["skipped_iterations"] = max(0, manifest.iteration - step)


def _drop_states(manifest):
    manifest.tensors = {key: stored for key, stored in manifest.tensors.items() if not key.startswith(OPTIMIZER_PREFIX)}
    manifest.replicas = [replica for replica in manifest.replicas if not replica[0].startswith(OPTIMIZER_PREFIX)]
