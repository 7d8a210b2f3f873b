"""Rules about a mixture of experts: routing, capacity, dispatchers, shared experts, expert and tensor parallelism.

Source of most: Megatron core, `TransformerConfig.__post_init__`. Sizes that must divide: `layout.divisibility`.
"""

from mindspeed_ms.config.checks.rule import rule

_P, _M, _E = "parallel_config", "model_config", "moe_config"
_TP = f"{_P}.tensor_model_parallel_size"
_EXPERTS, _TOPK, _BALANCE = f"{_E}.num_experts", f"{_E}.moe_router_topk", f"{_E}.moe_router_load_balancing_type"
_DISPATCHER = f"{_E}.moe_token_dispatcher_type"


@rule
def experts_fit(context):
    """Refuse expert parallelism without experts, experts with tensor but without sequence parallelism, another expert TP."""
    parallel, moe = context.parallel, context.moe
    if moe.num_experts == 1:
        if parallel.expert_model_parallel_size > 1:
            yield context.problem(f"{_P}.expert_model_parallel_size", "needs experts", _EXPERTS)
        return
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield context.problem(f"{_P}.sequence_parallel", "must be on when experts meet tensor parallelism", _TP)
    path = f"{_P}.expert_tensor_parallel_size"
    if moe.moe_extended_tp and parallel.expert_tensor_parallel_size != 1:
        yield context.problem(
            f"{_E}.moe_extended_tp", "spreads experts over tensor parallel ranks without cutting them; set that to 1", path
        )


@rule
def routing_fits(context):
    """Refuse a router whose top-k, groups, score function and balance contradict each other."""
    moe = context.moe
    if moe.num_experts == 1:
        return
    sinkhorn = moe.moe_router_load_balancing_type == "sinkhorn"
    if moe.moe_router_topk > moe.num_experts:
        yield context.problem(_TOPK, "must not be above the number of experts", _EXPERTS)
    elif (
        moe.moe_router_topk == 1 and moe.moe_router_score_function == "softmax" and not (moe.moe_router_pre_softmax or sinkhorn)
    ):
        yield context.problem(
            f"{_E}.moe_router_pre_softmax",
            "must be on for top-1: a softmax over the one chosen expert is always 1, so the router would not learn",
            _TOPK,
        )
    elif moe.moe_router_topk == 1 and moe.norm_topk_prob and moe.moe_router_score_function == "softmax" and not sinkhorn:
        context.notice(
            f"{context.name(f'{_E}.norm_topk_prob')}: with top-1 the one probability is always 1, so the router does not learn"
        )
    yield from _groups(context, moe)
    if moe.moe_router_enable_expert_bias and moe.moe_router_score_function != "sigmoid":
        yield context.problem(
            f"{_E}.moe_router_enable_expert_bias", "needs moe_router_score_function: sigmoid", f"{_E}.moe_router_score_function"
        )
    if not sinkhorn:
        return
    for name in (
        "moe_aux_loss_coeff",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_topk_scaling_factor",
        "moe_router_enable_expert_bias",
        "moe_expert_capacity_factor",
        "moe_router_pre_softmax",
        "norm_topk_prob",
    ):
        if moe[name]:
            yield context.problem(f"{_E}.{name}", "does not work with sinkhorn; leave it out", _BALANCE)
    if moe.moe_router_score_function == "sigmoid":
        yield context.problem(f"{_E}.moe_router_score_function", "follows from top-k under sinkhorn; leave it out", _BALANCE)


def _groups(context, moe):
    """Problems of group-limited routing."""
    number, chosen = f"{_E}.moe_router_num_groups", f"{_E}.moe_router_group_topk"
    groups, topk = moe.moe_router_num_groups, moe.moe_router_group_topk
    if (groups is None) != (topk is None):
        given, missing = (number, chosen) if topk is None else (chosen, number)
        yield context.problem(given, f"needs {missing.rpartition('.')[2]}; set both or none")
        return
    if groups is None:
        return
    if moe.num_experts % groups:
        yield context.problem(_EXPERTS, f"must be a multiple of {groups}, the number of groups", number)
        return
    size = moe.num_experts // groups
    if (moe.moe_router_group_score_topk or 0) > size:
        path = f"{_E}.moe_router_group_score_topk"
        yield context.problem(path, f"must not be above the {size} experts of a group", number)
    if topk > groups:
        yield context.problem(chosen, "must not be above the number of groups", number)
    elif moe.moe_router_topk > topk * size:
        yield context.problem(_TOPK, f"must not be above the {topk * size} experts of the chosen groups", chosen, number)
    elif not topk <= moe.moe_router_topk:
        yield context.problem(chosen, "must not be above the experts per token", _TOPK)


@rule
def capacity_fits(context):
    """Refuse capacities without an all-to-all dispatcher, and padding without a capacity."""
    moe, path = context.moe, f"{_E}.moe_expert_capacity_factor"
    if moe.num_experts == 1:
        return
    if moe.moe_expert_capacity_factor is None:
        if moe.moe_pad_expert_input_to_capacity:
            yield context.problem(f"{_E}.moe_pad_expert_input_to_capacity", "needs moe_expert_capacity_factor")
        return
    if moe.moe_expert_capacity_factor == 0:
        yield context.problem(path, "must be above 0: every token would be dropped; leave it out to drop none")
    if moe.moe_token_dispatcher_type not in ("alltoall", "alltoall_seq", "flex"):
        yield context.problem(path, "needs the dispatcher alltoall", _DISPATCHER)


@rule
def dispatcher_fits(context):
    """Refuse dispatchers that do not exist here or do not suit the layout."""
    moe, parallel = context.moe, context.parallel
    if moe.num_experts == 1:
        return
    if moe.moe_token_dispatcher_type == "flex":
        yield context.problem(
            _DISPATCHER, "needs the kernels of DeepEP, which exist for NVIDIA GPUs only; use alltoall, the numbers are the same"
        )
    tp = parallel.tensor_model_parallel_size
    if moe.moe_token_dispatcher_type == "alltoall_seq" and parallel.expert_tensor_parallel_size not in (None, tp):
        yield context.problem(
            _DISPATCHER,
            "needs experts cut like the other layers; use alltoall, or leave expert_tensor_parallel_size out",
            f"{_P}.expert_tensor_parallel_size",
        )


@rule
def shared_experts_fit(context):
    """Refuse settings of shared experts without shared experts, and their overlap without all-to-all."""
    moe = context.moe
    if moe.num_experts == 1:
        return
    has_shared = moe.moe_shared_expert_intermediate_size or moe.n_shared_experts
    for name in ("moe_shared_expert_gate", "moe_shared_expert_overlap"):
        if moe[name] and not has_shared:
            yield context.problem(
                f"{_E}.{name}", "needs shared experts: set moe_shared_expert_intermediate_size or n_shared_experts"
            )
    if moe.moe_shared_expert_overlap and moe.moe_token_dispatcher_type == "allgather":
        yield context.problem(f"{_E}.moe_shared_expert_overlap", "needs the dispatcher alltoall", _DISPATCHER)


@rule
def expert_numbers_agree(context):
    """Refuse different values of `model_config.num_experts` and `moe_config.num_experts`."""
    if context.model and context.model.num_experts not in (None, context.moe.num_experts):
        yield context.problem(f"{_M}.num_experts", "contradicts moe_config.num_experts; keep one", _EXPERTS)
