"""Rules about how the model is cut: tensor, sequence, context and expert parallelism, and the world."""

from mindspeed_ms.config.checks.rule import divides, rule

_P, _M = "parallel_config", "model_config"
_TP = f"{_P}.tensor_model_parallel_size"
_CP = f"{_P}.context_parallel_size"
_AXES = ("tp", "cp", "ep", "dp", "pp")


@rule
def world_fits(context):
    """world % (tp * pp * cp)."""
    size = context.model_parallel_size
    if context.world and context.world % size:
        parts = (f"{_P}.pipeline_model_parallel_size", _TP, _CP)
        yield context.problem(f"{_P}.world_size", f"needs a multiple of {size} ranks = tp * pp * cp", *parts)


@rule
def data_parallel_size_fits(context):
    """A given data parallel size must be the world's."""
    path, size = f"{_P}.data_parallel_size", context.data_parallel_size
    if size and context.was_set(path) and context.parallel.data_parallel_size not in (None, size):
        yield context.problem(path, f"expects {size} = world / (tp * pp * cp); leave it out", f"{_P}.world_size")


@rule
def order_names_the_axes(context):
    """The order string."""
    words = context.parallel.order.split("-")
    if sorted(words) not in (sorted(_AXES), sorted(set(_AXES) - {"ep"})):
        yield context.problem(
            f"{_P}.order", f"expects each of {', '.join(_AXES)} once, joined by -, such as tp-cp-ep-dp-pp"
        )


@rule
def heads_divide_hidden_size(context):
    """hidden % heads, unless the head width is given."""
    if context.model and not context.was_set(f"{_M}.kv_channels"):
        yield from divides(context, f"{_M}.hidden_size", f"{_M}.num_attention_heads", ", or kv_channels must be given")


@rule
def query_groups_divide_heads(context):
    """heads % groups; groups need the switch."""
    if not context.model:
        return
    path, model = f"{_M}.num_query_groups", context.model
    if model.group_query_attention:
        yield from divides(context, f"{_M}.num_attention_heads", path)
    elif context.was_set(path) and model.num_query_groups != model.num_attention_heads:
        yield context.problem(
            path,
            "has no effect without group_query_attention; switch that on, or leave this out",
            f"{_M}.group_query_attention",
        )


@rule
def tensor_parallel_divides(context):
    """heads, groups, ffn and vocabulary by tp."""
    if not context.model:
        return
    yield from divides(context, f"{_M}.num_attention_heads", _TP)
    if context.model.group_query_attention:
        yield from divides(context, f"{_M}.num_query_groups", _TP)
    if context.moe.num_experts == 1:
        yield from divides(context, f"{_M}.ffn_hidden_size", _TP)
    yield from divides(
        context, f"{_M}.vocab_size", _TP, "; pad it, or set make_vocab_size_divisible_by and the unpadded size"
    )
    if context.model.parallel_position_embedding:
        yield from divides(context, f"{_M}.max_position_embeddings", _TP)


@rule
def sequence_parallel_needs_tensor_parallel(context):
    """SP without TP, and the sequence by tp."""
    if not context.parallel.sequence_parallel:
        return
    if context.parallel.tensor_model_parallel_size == 1:
        yield context.problem(
            f"{_P}.sequence_parallel", "needs a tensor parallel size above 1; switch it off or raise that", _TP
        )
    elif context.model:
        per_rank = context.model.seq_length // context.parallel.context_parallel_size
        if per_rank % context.parallel.tensor_model_parallel_size:
            yield context.problem(
                f"{_M}.seq_length", "must be a multiple of tp * cp under sequence parallelism", _TP, _CP
            )


@rule
def context_parallel_divides(context):
    """The sequence by cp, by 2 * cp for ring algorithms."""
    parallel, model = context.parallel, context.model
    if not model or parallel.context_parallel_size == 1:
        return
    pieces = parallel.context_parallel_size * (1 if parallel.context_parallel_algo == "ulysses_cp_algo" else 2)
    if model.seq_length % pieces:
        yield context.problem(
            f"{_M}.seq_length", f"must be a multiple of {pieces} for {parallel.context_parallel_algo}", _CP
        )


@rule
def ulysses_degree_fits(context):
    """heads % (tp * ulysses), and the degree of the hybrid algorithm."""
    parallel, model = context.parallel, context.model
    path = f"{_P}.ulysses_degree_in_cp"
    size, degree, algorithm = (
        parallel.context_parallel_size,
        parallel.ulysses_degree_in_cp,
        parallel.context_parallel_algo,
    )
    if size == 1 or algorithm == "megatron_cp_algo":
        return
    if algorithm == "hybrid_cp_algo":
        if degree is None:
            yield context.problem(path, "must be given for hybrid_cp_algo", _CP)
            return
        if size % degree or size // degree < 2:
            yield context.problem(path, "must divide context_parallel_size and leave a ring of at least 2", _CP)
    degree = size if algorithm == "ulysses_cp_algo" else degree
    if model and model.num_attention_heads % (parallel.tensor_model_parallel_size * degree):
        yield context.problem(
            f"{_M}.num_attention_heads",
            f"must be a multiple of tp * ulysses degree = {parallel.tensor_model_parallel_size * degree}",
            _TP,
            _CP,
        )


@rule
def ulysses_degree_is_used(context):
    """The degree belongs to the hybrid algorithm."""
    parallel = context.parallel
    if parallel.ulysses_degree_in_cp is not None and parallel.context_parallel_algo != "hybrid_cp_algo":
        yield context.problem(
            f"{_P}.ulysses_degree_in_cp",
            "has an effect with hybrid_cp_algo only; leave it out",
            f"{_P}.context_parallel_algo",
        )


@rule
def experts_fit(context):
    """experts % ep, expert parallelism without experts, top-k, experts with TP but without SP."""
    parallel, moe = context.parallel, context.moe
    ep = f"{_P}.expert_model_parallel_size"
    if parallel.expert_model_parallel_size > 1 and moe.num_experts == 1:
        yield context.problem(ep, "needs experts", "moe_config.num_experts")
    if moe.num_experts == 1:
        return
    yield from divides(context, "moe_config.num_experts", ep)
    if moe.moe_router_topk > moe.num_experts:
        yield context.problem(
            "moe_config.moe_router_topk", "must not be above the number of experts", "moe_config.num_experts"
        )
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield context.problem(f"{_P}.sequence_parallel", "must be on when experts meet tensor parallelism", _TP)
    if moe.moe_pad_expert_input_to_capacity and moe.moe_expert_capacity_factor is None:
        yield context.problem("moe_config.moe_pad_expert_input_to_capacity", "needs moe_expert_capacity_factor")
    yield from _expert_world(context)


def _expert_world(context):
    parallel = context.parallel
    tensor = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    size = tensor * parallel.expert_model_parallel_size * parallel.pipeline_model_parallel_size
    if context.world and context.world % size:
        yield context.problem(
            f"{_P}.world_size",
            f"needs a multiple of {size} ranks = expert tp * ep * pp",
            f"{_P}.expert_model_parallel_size",
            f"{_P}.pipeline_model_parallel_size",
        )
    width = context.moe.moe_ffn_hidden_size or (context.model.ffn_hidden_size if context.model else tensor)
    if width % tensor:
        path = "moe_config.moe_ffn_hidden_size" if context.moe.moe_ffn_hidden_size else f"{_M}.ffn_hidden_size"
        yield context.problem(path, f"must be a multiple of the experts' tensor parallel size {tensor}")


@rule
def expert_numbers_agree(context):
    """model_config.num_experts is the same setting."""
    if context.model and context.model.num_experts not in (None, context.moe.num_experts):
        yield context.problem(
            f"{_M}.num_experts", "contradicts moe_config.num_experts; keep one", "moe_config.num_experts"
        )
