"""Optimizer state of a folder of the format `torch_dist` in flat buffers (Megatron's `dp_zero_gather_scatter`).

Without `--ckpt-fully-parallel-save`, each model-parallel rank saves its distributed optimizer as objects, whose content is
that of `distrib_optim.pt` (see `buffers`), and the groups:

    optimizer.distributed.dp_group_idx_G.param_state/shard_0_1    chained_N. before it where experts have an optimizer of
    optimizer.distributed.dp_group_idx_G.optimizer/shard_0_1      their own

G counts tensor-parallel ranks, then stages; of experts: expert-tensor-parallel ranks, expert-parallel ranks, stages.
"""

import re

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.megatron import optimizer
from mindspeed_ms.core.dist_checkpointing.megatron.ranks import parameters_of
from mindspeed_ms.layout.ranks import WorldLayout, world_unit_of

_OBJECT = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(\w+)/shard_0_1")


def has_buffers(content):
    """Whether a DistributedCheckpoint has such objects."""
    return any(_is_buffer(key) for key in content.objects)


def _is_buffer(key):
    found = _OBJECT.fullmatch(key)
    return found is not None and found[3] == "param_state"


def add_buffers(manifest, folder, content, model, style, found):
    """Add the states to a manifest, which has the weights.

    Args:
        content (DistributedCheckpoint): of the folder.
        model (ModelDescription): in the layout of the checkpoint.
        style (str): names of the model that was saved, which decide the order of its parameters.
        found (optimizer.FoundStates): gets counters and settings.

    Raises:
        CheckpointError: buffers that are missing or do not fit the weights.
    """
    objects = {}
    for key, saved in content.objects.items():
        place = _OBJECT.fullmatch(key)
        if place and place[3] in ("param_state", "optimizer", "grad_scaler"):
            number, group = int(place[1] or 0), int(place[2])
            objects.setdefault(number, {}).setdefault(group, {})[place[3]] = key, saved.read()[0]
    parts = [next(iter(objects[number].values())).get("optimizer", ("", {}))[1] for number in sorted(objects)]
    for (number, groups), part in zip(sorted(objects.items()), parts):
        is_expert = any(group.get("is_expert_parallel") for group in part.get("param_groups") or ())
        for group, at in _ranks(model.parallel, is_expert).items():
            path = f"{folder}: chained_{number}.dp_group_idx_{group}" if len(parts) > 1 else f"{folder}: dp_group_idx_{group}"
            held = groups.get(group, {})
            trained = [one for one in parameters_of(model, at, style) if one.description.trainable]
            share = optimizer.shares_of(path, parts, trained)[number]
            if not share:
                continue  # a stage without experts
            if "param_state" not in held:
                raise CheckpointError(f"{path} of the optimizer is missing.")
            dtypes = {one.key: manifest.tensors[one.key].dtype for one in share}
            optimizer.add_flat(manifest, folder, path, at.pp, held["param_state"][1], share, dtypes, with_weights=False)
            settings = held["optimizer"][1].get("param_groups") or []
            found.add_groups(settings)
            for one in settings:
                if "step" in one:
                    found.add_step(path, one["step"])
            if "grad_scaler" in held:
                found.grad_scaler = {name: optimizer.scalar(value) for name, value in held["grad_scaler"][1].items()}
    found.kind = "distributed"


def _ranks(parallel, is_expert):
    """{number of the data-parallel group: Coordinates of its first rank}."""
    world = WorldLayout.from_description(parallel, world_unit_of(parallel))
    groups = {}
    for at in map(world.coordinates, range(world.world_size)):
        dense = at.pp * world.tp + at.tp
        group = (at.pp * world.ep + at.ep) * world.expert_tp + at.expert_tp if is_expert else dense
        groups.setdefault(group, at)
    return groups
