"""Describer of self attention with packed query, key and value: its linears, norms and parameters."""

from mindspeed_ms.layout.describers.registry import describe_linear, placed, register_describer
from mindspeed_ms.layout.layer_parameters import Linear, Norm, Sinks


def attention_linears(model):
    """`{name: Linear}` of the projections. Rows of `qkv_proj`: `groups * (heads / groups + 2) * head_dim`."""
    initial, hidden, width = model.initializers, model.hidden_size, model.attention_width
    return {
        "qkv_proj": Linear(
            column=True,
            input_size=hidden,
            output_size=width + 2 * model.query_groups * model.head_dim,
            initializer=initial.block,
            bias=initial.bias if model.add_bias_linear or model.qkv_has_bias else None,
            grouping="qkv",
        ),
        "out_proj": Linear(
            column=False,
            input_size=width,
            output_size=hidden,
            initializer=initial.output,
            bias=initial.bias if model.add_bias_linear or model.out_proj_has_bias else None,
        ),
    }


def head_norms(model):
    """`{name: Norm}` of queries and keys (`qk_layernorm`), each over one head."""
    norm = Norm(model.norm, model.head_dim, over_heads=True)
    return {"q_layernorm": norm, "k_layernorm": norm} if model.qk_layernorm else {}


def attention_sinks(model):
    """`Sinks` of the heads; None without learned ones."""
    return Sinks(model.num_attention_heads, model.initializers.block) if model.has_learned_sinks else None


@register_describer("attention", "self_attn")
def describe_self_attention(model, rank):
    """Parameters of `ParallelAttention`."""
    linears, norms = attention_linears(model).items(), head_norms(model).items()
    descriptions = [description for name, linear in linears for description in describe_linear(rank, name, linear)]
    sinks = attention_sinks(model)
    descriptions += sinks.describe(rank.tensor) if sinks else []
    return descriptions + [one for name, norm in norms for one in placed(name, norm.describe(rank.tensor))]
