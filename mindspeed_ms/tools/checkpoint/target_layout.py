"""Target layout of a reshard: slices of a checkpoint's tensors for the ranks of another layout."""

from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import OPTIMIZER_PREFIX, whole_slice
from mindspeed_ms.layout.errors import LayoutError
from mindspeed_ms.layout.parameters import describe_parameters
from mindspeed_ms.layout.ranks import WorldLayout, model_parallel_size, world_unit_of
from mindspeed_ms.layout.sharding import FlatSlice, ParameterSharding


def layout_cut(manifest, all_config, data_parallel_size=None):
    """Parts of a checkpoint's tensors for each rank of a layout: one list [(key, FlatSlice)] per rank.

    Weights are in the files of the first data-parallel ranks, optimizer states are cut evenly over all of them.

    Args:
        manifest (Manifest): of the checkpoint.
        all_config (AllConfig): model and layout.
        data_parallel_size (Optional[int]): ranks that share the optimizer's state; None: as few as experts need.

    Raises:
        CheckpointError: the configuration describes another model.
        LayoutError: impossible layout.
    """
    model = describe_model(all_config)
    ranks = model_parallel_size(model.parallel)
    least = world_unit_of(model.parallel) // ranks
    if data_parallel_size is not None and (data_parallel_size < 1 or data_parallel_size % least):
        raise LayoutError(
            f"data_parallel_size {data_parallel_size} is impossible: expected a multiple of {least}, the data-parallel ranks "
            "that the experts are spread over."
        )
    world = WorldLayout.from_description(model.parallel, ranks * (data_parallel_size or least))
    files, held = [], set()
    states = _states_by_weight(manifest)
    for rank in range(world.world_size):
        at = world.coordinates(rank)
        files.append([])
        for description in describe_parameters(model, at):
            # experts have their own grid, where context parallel ranks are copies like data parallel ones
            copy, copies = (at.expert_dp, world.expert_dp) if description.expert else (at.dp, world.dp)
            is_other = description.sharding.axis is None and (at.expert_tp if description.expert else at.tp) != 0
            if description.shared_with is not None or is_other or (at.cp != 0 and not description.expert):
                continue
            sharding = _fitting(manifest, description, at.tp, world.tp)
            held.add(description.name)
            if copy == 0:
                files[-1].append((description.name, whole_slice(sharding)))
            part = FlatSlice(sharding, *_share(sharding.numel, copy, copies))
            files[-1] += [(key, part) for key in states.get(description.name, ()) if part.start < part.stop]
    left = sorted({key for key in manifest.tensors if not key.startswith(OPTIMIZER_PREFIX)} - held)
    if left:
        raise CheckpointError(
            f"the configuration's model has no {', '.join(left[:5])}{' ...' if len(left) > 5 else ''}: give "
            "the one of the checkpoint's model with --config."
        )
    return files


def _states_by_weight(manifest):
    result = {}
    for key in manifest.tensors:
        if key.startswith(OPTIMIZER_PREFIX):
            weight = key.removeprefix(OPTIMIZER_PREFIX).partition(".")[2]
            result.setdefault(weight, []).append(key)
    return result


def _share(count, index, parts):
    return count * index // parts, count * (index + 1) // parts


def _fitting(manifest, description, index, parts):
    """Part of a stored tensor for a rank; padding of a vocabulary stays as it was saved."""
    stored, sharding = manifest.tensors.get(description.name), description.sharding
    if stored is None:
        raise CheckpointError(f"the checkpoint has no {description.name}: give the configuration of its model with --config.")
    if stored.shape == sharding.global_shape:
        return sharding
    if description.grouping != "vocab" or stored.shape[1:] != sharding.global_shape[1:] or stored.shape[0] < parts:
        raise CheckpointError(
            f"{description.name} is {list(stored.shape)} in the checkpoint and {list(sharding.global_shape)} "
            "in the configuration: give the one of the checkpoint's model with --config."
        )
    return ParameterSharding(stored.shape, 0, (_share(stored.shape[0], index, parts),))
