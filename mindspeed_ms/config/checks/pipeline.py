"""Rules about pipeline stages: layer lists, virtual stages, no-op layers, recomputation lists."""

from mindspeed_ms.config.checks.rule import last_rule, rule
from mindspeed_ms.config.model_description import describe_model, describe_parallel
from mindspeed_ms.layout.errors import LayoutError
from mindspeed_ms.layout.stages import recompute_of, spread_layers

_P, _M = "parallel_config", "model_config"
_PP = f"{_P}.pipeline_model_parallel_size"
_VPP = f"{_P}.virtual_pipeline_model_parallel_size"
_FIRST, _LAST = f"{_P}.num_layers_in_first_pipeline_stage", f"{_P}.num_layers_in_last_pipeline_stage"
_PER = f"{_P}.num_layers_per_virtual_pipeline_stage"
_LIST = f"{_P}.num_layer_list"
_GROUP = f"{_P}.microbatch_group_size_per_virtual_pipeline_stage"
_RECOMPUTE = ("recompute", "select_recompute", "select_comm_recompute")


def virtual_size(parallel, num_layers):
    """Number of chunks per stage that a configuration asks for; 1 without virtual pipeline.

    A layer list decides by its columns, then `virtual_pipeline_model_parallel_size`, then the layers per chunk.
    """
    rows = parallel.num_layer_list
    if rows and isinstance(rows[0], list):
        return len(rows[0]) if parallel.num_layer_list_order == "pp_vpp" else len(rows)
    if parallel.virtual_pipeline_model_parallel_size:
        return parallel.virtual_pipeline_model_parallel_size
    if rows or not parallel.num_layers_per_virtual_pipeline_stage or not num_layers:
        return 1
    stages, layers = spread_layers(num_layers, describe_parallel(parallel))
    return max(1, layers // (max(1, stages) * parallel.num_layers_per_virtual_pipeline_stage))


@rule
def layer_list_fits(context):
    """Refuse a `num_layer_list` of a wrong shape, with wrong entries, or with a sum other than the number of layers."""
    rows = context.parallel.num_layer_list
    if not rows:
        return
    nested = isinstance(rows[0], list)
    counts = [count for row in rows for count in row] if nested else rows
    if any(count <= 0 for count in counts):
        yield context.problem(_LIST, "expects numbers of layers above 0; noop_layers makes layers pass through")
    if context.model and sum(counts) != context.model.num_layers:
        yield context.problem(
            _LIST, f"has the sum {sum(counts)}, but the model has {context.model.num_layers} layers", f"{_M}.num_layers"
        )
    yield from _list_shape(context, rows, nested)


def _list_shape(context, rows, nested):
    parallel = context.parallel
    stages = parallel.pipeline_model_parallel_size
    allowed = (stages, stages - 1) if parallel.standalone_embedding_stage else (stages,)
    chunks = parallel.virtual_pipeline_model_parallel_size
    if not nested:
        if len(rows) not in allowed:
            yield context.problem(_LIST, f"expects one number for each of the {stages} pipeline stages", _PP)
        if chunks not in (None, 1):
            yield context.problem(
                _LIST, f"expects {stages} rows (stages) of {chunks} numbers (chunks) under virtual pipeline", _VPP
            )
        return
    upstream = parallel.num_layer_list_order == "vpp_pp"
    found = (len(rows[0]), len(rows)) if upstream else (len(rows), len(rows[0]))
    meaning = "rows are chunks, columns stages" if upstream else "rows are stages, columns chunks"
    if found[0] not in allowed or (chunks is not None and found[1] != chunks):
        other = "pp_vpp" if upstream else "vpp_pp"
        swapped = found[1] in allowed and chunks in (None, found[0])
        hint = f"; it fits with num_layer_list_order: {other}" if swapped else ""
        yield context.problem(
            _LIST,
            f"expects {stages} stages{f' with {chunks} chunks each' if chunks else ''} ({meaning}), "
            f"found {found[0]} stages with {found[1]} chunks{hint}",
            _PP,
            _VPP,
        )


@rule
def layer_list_reading_is_clear(context):
    """Notice if upstream would read a square `num_layer_list` the other way round."""
    rows, parallel = context.parallel.num_layer_list, context.parallel
    if not rows or not isinstance(rows[0], list) or context.was_set(f"{_P}.num_layer_list_order"):
        return ()
    turned = [list(column) for column in zip(*rows, strict=True)]
    if len(rows) == len(rows[0]) == parallel.pipeline_model_parallel_size and turned != rows:
        context.notice(
            f"{context.name(_LIST)}: rows are read as pipeline stages, so stages hold "
            f"{[sum(row) for row in rows]} layers; upstream reads rows as chunks, which gives "
            f"{[sum(row) for row in turned]}. Say num_layer_list_order: pp_vpp (as here) or vpp_pp (upstream)"
        )
    return ()


@rule
def virtual_pipeline_needs_pipeline(context):
    """Refuse virtual pipeline stages with a pipeline size of 1."""
    parallel = context.parallel
    if parallel.pipeline_model_parallel_size > 1:
        return
    for path in (_VPP, _PER):
        if (context.value(path) or 1) > 1 or (path == _PER and context.value(path)):
            yield context.problem(path, "virtual pipeline needs a pipeline size above 1", _PP)


@rule
def layers_spread_over_chunks(context):
    """Refuse a `num_layers` that stages and layers per chunk do not divide, or that is too small for all stages."""
    parallel, model = context.parallel, context.model
    per = parallel.num_layers_per_virtual_pipeline_stage
    if not model or parallel.num_layer_list or parallel.pipeline_model_parallel_size == 1:
        return
    stages, layers = spread_layers(model.num_layers, describe_parallel(parallel))
    chunks = parallel.virtual_pipeline_model_parallel_size
    if per and layers % (stages * per):
        yield context.problem(
            f"{_M}.num_layers",
            f"must be a multiple of pp * layers per virtual stage = {stages * per}; or give num_layer_list",
            _PP,
            _PER,
        )
    elif per and chunks and layers != stages * per * chunks:
        yield context.problem(
            _VPP,
            f"expects {layers // (stages * per)} = num_layers / pp / layers per virtual stage",
            f"{_M}.num_layers",
            _PP,
            _PER,
        )
    if _ends_given(context):
        yield from _given_ends_fit(context)
    elif layers < stages * virtual_size(parallel, model.num_layers):
        yield context.problem(f"{_M}.num_layers", "is less than one layer for each stage and chunk", _PP, _VPP)


def _ends_given(context):
    return [path for path in (_FIRST, _LAST) if context.value(path) is not None]


def _given_ends_fit(context):
    """Problems of given numbers of layers of the first and last stage: too few left for the others, or not whole chunks."""
    parallel, layers = context.parallel, context.model.num_layers
    paths, chunks = _ends_given(context), virtual_size(parallel, layers)
    others, left = parallel.pipeline_model_parallel_size - len(paths), layers - sum(map(context.value, paths))
    rest = [*paths[1:], f"{_M}.num_layers", _PP]
    if left < others * chunks or (left and not others):
        need = f"need at least {others * chunks}" if others else "there are no other stages"
        yield context.problem(paths[0], f"leaves {left} layers for the other {others} stages; {need}", *rest)
    for path in paths:
        if context.value(path) % chunks:
            yield context.problem(path, f"must be a multiple of the {chunks} chunks of a stage", _VPP)


@rule
def micro_batches_fit_interleaving(context):
    """Refuse numbers of micro-batches that the interleaved schedule cannot group (multiples of pp)."""
    parallel, model = context.parallel, context.model
    stages = parallel.pipeline_model_parallel_size
    if stages == 1 or virtual_size(parallel, model.num_layers if model else None) == 1:
        return
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    if group is not None and group < stages:
        yield context.problem(_GROUP, f"must be at least pp = {stages}", _PP)
    counts = {}
    for count, key in numbers_of_micro_batches(context):
        rest = count % (group or stages)
        if rest and (group is None or rest < stages):
            counts.setdefault(key, []).append(count)
    for key, wrong in counts.items():
        found = ", ".join(map(str, wrong))
        if group is None:
            yield context.problem(
                key, f"gives {found} micro-batches; the interleaved schedule needs a multiple of pp = {stages}", _PP
            )
        else:
            lasts = ", ".join(str(count % group) for count in wrong)
            yield context.problem(
                _GROUP,
                f"leaves a last group of {lasts} of the {found} micro-batches; a group needs at least pp = {stages}",
                _PP,
                key,
            )


@rule
def group_size_has_an_effect(context):
    """Notice if a micro-batch group size is set without virtual pipeline stages."""
    model, parallel = context.model, context.parallel
    is_asked = context.was_set(_GROUP) and context.value(_GROUP) is not None
    if is_asked and virtual_size(parallel, model.num_layers if model else None) == 1:
        context.notice(f"{context.name(_GROUP)} has no effect without virtual pipeline stages")
    return ()


def numbers_of_micro_batches(context):
    """(micro-batches, path they come from) of every step size of the run, as far as they are known."""
    size, ramp = context.data_parallel_size, ramp_up_sizes(context.dataset)
    unit = context.dataset.batch_size * size if size else None
    during = [] if unit is None else [(max(batch // unit, 1), "dataset_config.rampup_batch_size") for batch in ramp[:-1]]
    count, key = number_of_micro_batches(context)
    return during if count is None else [*during, (count, key)]


def ramp_up_sizes(dataset):
    """Global batch sizes of a ramp-up from the first to the last; [] without one, or if it has errors of its own."""
    ramp, end = dataset.rampup_batch_size, dataset.global_batch_size
    if not ramp or len(ramp) != 3 or min(ramp[:2]) <= 0 or end is None or ramp[0] > end or (end - ramp[0]) % ramp[1]:
        return []
    return list(range(ramp[0], end + 1, ramp[1]))


def number_of_micro_batches(context):
    """(micro-batches per step, path it comes from); None if it is not known."""
    dataset, size = context.dataset, context.data_parallel_size
    if dataset.global_batch_size and context.was_set("dataset_config.global_batch_size"):
        divides = size and dataset.global_batch_size % (dataset.batch_size * size) == 0
        if not size or (not divides and not dataset.decrease_batch_size_if_needed):
            return None, ""
        return dataset.global_batch_size // (dataset.batch_size * size), "dataset_config.global_batch_size"
    if context.was_set("dataset_config.micro_batch_num"):
        return dataset.micro_batch_num, "dataset_config.micro_batch_num"
    return None, ""


@rule
def noop_layers_in_range(context):
    """Refuse `noop_layers` out of range, named twice, or covering all layers."""
    noop, model = context.parallel.noop_layers, context.model
    if not noop or not model:
        return
    wrong = [layer for layer in noop if not 0 <= layer < model.num_layers]
    if wrong:
        yield context.problem(f"{_P}.noop_layers", f"has {wrong} outside 0..{model.num_layers - 1}", f"{_M}.num_layers")
    elif len(set(noop)) != len(noop):
        yield context.problem(f"{_P}.noop_layers", "names a layer twice")
    elif len(noop) == model.num_layers:
        yield context.problem(f"{_P}.noop_layers", "leaves no layer that computes", f"{_M}.num_layers")


@rule
def recompute_lists_fit(context):
    """Refuse recompute lists with negative numbers or beside `recompute_granularity`."""
    lists = [name for name in _RECOMPUTE if context.parallel[name]]
    for name in lists:
        rows = context.parallel[name]
        counts = [count for row in rows for count in (row if isinstance(row, list) else [row])]
        if any(count < 0 for count in counts):
            yield context.problem(f"{_P}.{name}", "expects numbers of layers from 0")
    if lists and context.model and context.model.recompute_granularity:
        yield context.problem(
            f"{_P}.{lists[0]}",
            "and recompute_granularity both choose what is recomputed; keep one",
            f"{_M}.recompute_granularity",
        )
    if context.parallel.select_comm_recompute and not context.parallel.sequence_parallel:
        yield context.problem(
            f"{_P}.select_comm_recompute", "repeats the gather of sequence parallelism, which is off", f"{_P}.sequence_parallel"
        )


@last_rule
def layout_can_be_built(context):
    """Refuse stages and recompute lists that `mindspeed_ms.layout` refuses (runs last)."""
    parallel = context.parallel
    lists = [name for name in _RECOMPUTE if parallel[name]]
    if not context.model:
        return
    path = _LIST if parallel.num_layer_list else next(iter(_ends_given(context)), _PP)
    try:
        model = describe_model(context.all_config)
        _ = model.stages
        path = f"{_P}.{lists[0]}" if lists else path
        recompute_of(model)
    except LayoutError as error:
        yield context.problem(path, str(error))
