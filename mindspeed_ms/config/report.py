"""Report of `config check`: settings, layout, groups, layers per stage, parameters."""

from math import prod

from mindspeed_ms.config.availability import missing_features
from mindspeed_ms.config.model_description import describe_model, describe_parallel
from mindspeed_ms.config.printing import page
from mindspeed_ms.config.start import start_problems
from mindspeed_ms.layout.parameters import count_active_parameters, count_parameters, describe_parameters
from mindspeed_ms.layout.ranks import WorldLayout, world_unit_of
from mindspeed_ms.layout.vocabulary import padded_vocab_size

_GROUPS = ("tp", "pp", "dp", "cp", "ep", "embedding")


def report(all_config):
    """Text about a checked configuration.

    Args:
        all_config (AllConfig): checked.

    Raises:
        LayoutError: what only the layout finds.
    """
    parts = ["== settings", page(all_config), "", "== layout", *_layout_lines(all_config)]
    if all_config.model_config is None:
        parts += ["", "no model_config: no layers and parameters to show"]
    else:
        parts += ["", "== layers", *_stage_lines(all_config), "", "== parameters", *_parameter_lines(all_config)]
    missing = missing_features(all_config)
    if missing:
        parts += ["", "== not available yet (the configuration is valid, a start would refuse it)"]
        parts += [f"{item.key} = {item.value!r}: {feature}" for feature, asked in missing.items() for item in asked]
    problems = start_problems(all_config)
    if problems:
        parts += ["", "== missing for a start", *map(str, problems)]
    return "\n".join(parts)


def _layout_lines(all_config):
    parallel, dataset = all_config.parallel_config, all_config.dataset_config
    sizes = {
        "tp": parallel.tensor_model_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
        "cp": parallel.context_parallel_size,
        "ep": parallel.expert_model_parallel_size,
        "vpp": parallel.virtual_pipeline_model_parallel_size or 1,
    }
    if not parallel.world_size:
        return [
            " ".join(f"{name}{size}" for name, size in sizes.items()),
            f"the world size is not known: add --world N, a multiple of {world_unit_of(describe_parallel(all_config))}",
        ]
    world = WorldLayout.from_description(describe_parallel(all_config), parallel.world_size)
    lines = [
        f"{parallel.world_size} ranks: dp{world.dp} "
        + " ".join(f"{name}{size}" for name, size in sizes.items())
        + f", order {parallel.order}",
        (
            f"batch: {dataset.global_batch_size} samples = {dataset.batch_size} per micro-batch * "
            f"{dataset.micro_batch_num} "
            f"micro-batches * {world.dp} data parallel ranks"
        ),
    ]
    for kind in _GROUPS:
        groups = world.groups(kind)
        if len(groups[0]) > 1:
            shown = " ".join(str(_short(group)) for group in groups[:2])
            lines.append(f"{kind:<10} {len(groups):>4} groups of {len(groups[0])}: {shown}{' ...' if len(groups) > 2 else ''}")
    return lines


def _short(group):
    step = group[1] - group[0]
    if len(group) > 4 and group == list(range(group[0], group[-1] + step, step)):
        return f"[{group[0]}, {group[1]}, ..., {group[-1]}]"
    return group


def _stage_lines(all_config):
    stages = describe_model(all_config).stages
    return [f"layers per stage: {'/'.join(map(str, stages.stage_totals))}", *stages.table().splitlines()]


def _parameter_lines(all_config):
    model, parallel = all_config.model_config, all_config.parallel_config
    description = describe_model(all_config)
    total = count_parameters(description)
    lines = [f"{total:,} parameters, kept in {model.params_dtype}, computed in {model.compute_dtype}"]
    active = count_active_parameters(description)
    if active != total:
        sparse = len(description.layers_with_experts)
        lines.append(
            f"{active:,} of them active per token: {description.moe_router_topk} of {description.num_experts} experts in "
            f"{sparse} of {description.stages.num_layers} layers"
        )
        lines.append(
            f"experts of such a layer on each rank: {description.num_experts // parallel.expert_model_parallel_size} of "
            f"{description.num_experts}, each cut over {describe_parallel(all_config).expert_tensor_size} ranks"
        )
    world = WorldLayout.from_description(
        describe_parallel(all_config), parallel.world_size or world_unit_of(describe_parallel(all_config))
    )
    tensor_ranks = [world.dense.rank_at(tp=0, pp=stage, dp=0, cp=0) for stage in range(parallel.pipeline_model_parallel_size)]
    for stage, rank in enumerate(tensor_ranks):
        count = sum(prod(entry.sharding.local_shape) for entry in describe_parameters(description, world, rank))
        lines.append(f"stage {stage}: {count:,} on each of its ranks")
    padded = padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by, parallel.tensor_model_parallel_size)
    if model.vocab_size != padded:
        lines.append(f"vocabulary {model.vocab_size}, as given; padding would make it {padded}")
    return lines
