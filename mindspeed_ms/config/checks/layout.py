"""Rules about parallel layout: tensor, sequence, context and expert parallelism, world size."""

import contextlib

from mindspeed_ms.config.checks.rule import last_rule, rule
from mindspeed_ms.config.model_description import describe_model, describe_parallel
from mindspeed_ms.config.schema import ModelParallelConfig, MoEConfig, TransformerConfig
from mindspeed_ms.layout.divisibility import sequence_misfits, size_misfits
from mindspeed_ms.layout.errors import LayoutError
from mindspeed_ms.layout.experts import expert_problems
from mindspeed_ms.layout.ranks import model_parallel_size
from mindspeed_ms.layout.sequence import ulysses_problem
from mindspeed_ms.layout.windows import window_problems

_P, _M = "parallel_config", "model_config"
_TP = f"{_P}.tensor_model_parallel_size"
_CP = f"{_P}.context_parallel_size"
_AXES = ("tp", "cp", "ep", "dp", "pp")


def _path(name):
    sections = (MoEConfig, ModelParallelConfig, TransformerConfig)
    return next(f"{section.config_name}.{name}" for section in sections if name in section.own_fields())


@rule
def world_fits(context):
    """Refuse a world size that tp * pp * cp (and with experts expert tp * ep * pp) does not divide."""
    if context.world and context.world % context.world_unit:
        dense = model_parallel_size(context.parallel)
        parts = [f"{_P}.pipeline_model_parallel_size", _TP, _CP]
        meaning = "tp * pp * cp"
        if context.world_unit != dense:
            meaning = "what tp * pp * cp and expert tp * ep * pp divide"
            parts += [f"{_P}.expert_model_parallel_size", f"{_P}.expert_tensor_parallel_size"]
        yield context.problem(f"{_P}.world_size", f"needs a multiple of {context.world_unit} ranks = {meaning}", *parts)


@rule
def sizes_divide(context):
    """Refuse heads, groups, widths, vocabulary, experts and sequence lengths that the layout does not divide."""
    if not context.model:
        return
    model = describe_model(context.all_config)
    for misfit in (*size_misfits(model), *sequence_misfits(model)):
        message = f"must be a multiple of {misfit.unit}{misfit.hint}"
        yield context.problem(_path(misfit.name), message, *map(_path, misfit.by))
    for name, message, other in expert_problems(model):
        yield context.problem(_path(name), message, _path(other))


@last_rule
def windows_fit(context):
    """Refuse sliding windows per layer that do not suit the number of layers."""
    if not context.model:
        return
    with contextlib.suppress(LayoutError):  # stages that cannot be built: `layout_can_be_built` says so
        for name, message, other in window_problems(describe_model(context.all_config)):
            yield context.problem(_path(name), message, _path(other))


@rule
def data_parallel_size_fits(context):
    """Refuse a data parallel size other than world / (tp * pp * cp)."""
    path, size = f"{_P}.data_parallel_size", context.data_parallel_size
    if size and context.was_set(path) and context.parallel.data_parallel_size not in (None, size):
        yield context.problem(path, f"expects {size} = world / (tp * pp * cp); leave it out", f"{_P}.world_size")


@rule
def order_names_the_axes(context):
    """Refuse an `order` that does not name each axis (tp, cp, ep, dp, pp) once."""
    words = context.parallel.order.split("-")
    if sorted(words) not in (sorted(_AXES), sorted(set(_AXES) - {"ep"})):
        yield context.problem(f"{_P}.order", f"expects each of {', '.join(_AXES)} once, joined by -, such as tp-cp-ep-dp-pp")


@rule
def query_groups_have_their_switch(context):
    """Refuse `num_query_groups` without `group_query_attention`."""
    path = f"{_M}.num_query_groups"
    if not context.model or context.model.group_query_attention or not context.was_set(path):
        return
    if context.model.num_query_groups != context.model.num_attention_heads:
        yield context.problem(
            path,
            "has no effect without group_query_attention; switch that on, or leave this out",
            f"{_M}.group_query_attention",
        )


@rule
def sequence_parallel_needs_tensor_parallel(context):
    """Refuse sequence parallelism with a tensor parallel size of 1."""
    if context.parallel.sequence_parallel and context.parallel.tensor_model_parallel_size == 1:
        yield context.problem(
            f"{_P}.sequence_parallel", "needs a tensor parallel size above 1; switch it off or raise that", _TP
        )


@rule
def ulysses_degree_fits(context):
    """Refuse a `ulysses_degree_in_cp` that does not fit context parallel size and heads."""
    problem = ulysses_problem(describe_parallel(context.all_config))
    if problem:
        yield context.problem(f"{_P}.ulysses_degree_in_cp", problem, _CP)


@rule
def context_parallelism_has_no_attention_dropout(context):
    """Refuse attention dropout under context parallelism: its pattern would depend on the cut."""
    model = context.model
    if model and context.parallel.context_parallel_size > 1 and model.attention_dropout:
        yield context.problem(
            f"{_M}.attention_dropout", "must be 0 where the sequence is cut over ranks, each drawing its own numbers", _CP
        )


@rule
def ulysses_degree_is_used(context):
    """Refuse `ulysses_degree_in_cp` without `hybrid_cp_algo`."""
    parallel = context.parallel
    if parallel.ulysses_degree_in_cp is not None and parallel.context_parallel_algo != "hybrid_cp_algo":
        yield context.problem(
            f"{_P}.ulysses_degree_in_cp", "has an effect with hybrid_cp_algo only; leave it out", f"{_P}.context_parallel_algo"
        )
