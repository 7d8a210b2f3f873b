"""Describers of feed-forward blocks: an MLP, or router, experts and shared experts; their linears and parameters."""

from mindspeed_ms.layout.describers.registry import describe_linear, placed, register_describer
from mindspeed_ms.layout.layer_parameters import GroupedExperts, Linear, Router, SharedExpertGate


def mlp_linears(model, width, expert=False):
    """`{name: Linear}` of an MLP with inner width `width`."""
    initial = model.initializers
    bias, expansion = initial.bias if model.has_mlp_bias else None, 2 if model.is_gated else 1
    return {
        "mapping": Linear(
            column=True,
            input_size=model.hidden_size,
            output_size=width * expansion,
            initializer=initial.block,
            bias=bias,
            stride=expansion,
            grouping="gate_up" if model.is_gated else None,
            expert=expert,
        ),
        "projection": Linear(
            column=False, input_size=width, output_size=model.hidden_size, initializer=initial.output, bias=bias, expert=expert
        ),
    }


def _describe_mlp(model, rank, width, expert=False):
    linears = mlp_linears(model, width, expert).items()
    return [description for name, linear in linears for description in describe_linear(rank, name, linear)]


@register_describer("mlp", "dense")
def describe_dense_mlp(model, rank):
    """Parameters of `ParallelMLP`."""
    return _describe_mlp(model, rank, model.ffn_hidden_size)


def router_of(model):
    """`Router` of the layers with experts."""
    initial = model.initializers
    return Router(
        model.num_experts,
        model.hidden_size,
        initial.block,
        model.moe_router_enable_expert_bias,
        initial.bias if model.moe_router_has_bias else None,
    )


@register_describer("mlp", "experts")
def describe_experts(model, rank):
    """Parameters of a mixture of experts: router, experts under their global ids, shared experts."""
    descriptions = placed("router", router_of(model).describe(rank.tensor))
    width = model.expert_ffn_size
    if model.moe_grouped_gemm:
        linears = mlp_linears(model, width, expert=True)
        grouped = GroupedExperts(model.num_experts, linears["mapping"], linears["projection"])
        part = grouped.describe(rank.expert_tensor, rank.experts.start, rank.experts.stop)
        descriptions += placed("experts", part)
    else:
        prefix = "experts.local_experts"
        for local, expert in enumerate(rank.experts):
            one = _describe_mlp(model, rank, width, expert=True)
            descriptions += [description.under(f"{prefix}.{expert}", f"{prefix}.{local}") for description in one]
    if model.shared_expert_ffn_size:
        descriptions += placed("shared_experts", _describe_mlp(model, rank, model.shared_expert_ffn_size))
        if model.moe_shared_expert_gate:
            gate = SharedExpertGate(model.hidden_size, model.initializers.block)
            descriptions += placed("shared_experts", gate.describe(rank.tensor))
    return descriptions
