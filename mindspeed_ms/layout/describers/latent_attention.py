"""Describer of multi-latent attention (MLA, DeepSeek): its linears, norms and parameters. Source: Megatron core."""

from mindspeed_ms.layout.describers.registry import describe_linear, placed, register_describer
from mindspeed_ms.layout.layer_parameters import Linear, Norm, WholeLinear


def latent_linears(model):
    """`{name: Linear or WholeLinear}` of the projections.

    Queries are compressed by `q_down_proj` and expanded by `q_up_proj`, or without `q_lora_rank` projected by `q_proj`; rows
    per head `[qk_head_dim, qk_pos_emb_head_dim]`. `kv_down_proj` gives compressed keys and values and the key with positions
    that all heads share, `kv_up_proj` expands the former; rows per head `[qk_head_dim, v_head_dim]`.
    """
    initial, hidden, heads = model.initializers, model.hidden_size, model.num_attention_heads
    bias = initial.bias if model.qkv_has_bias else None
    common = {"column": True, "initializer": initial.block, "bias": None}
    result = {}
    if model.q_lora_rank:
        result["q_down_proj"] = WholeLinear(
            input_size=hidden, output_size=model.q_lora_rank, initializer=initial.block, bias=bias
        )
        result["q_up_proj"] = Linear(input_size=model.q_lora_rank, output_size=model.attention_width, **common)
    else:
        result["q_proj"] = Linear(input_size=hidden, output_size=model.attention_width, **common)
    result["kv_down_proj"] = WholeLinear(
        input_size=hidden, output_size=model.latent_width, initializer=initial.block, bias=bias
    )
    expanded = heads * (model.qk_head_dim + model.v_head_dim)
    result["kv_up_proj"] = Linear(input_size=model.kv_lora_rank, output_size=expanded, **common)
    result["out_proj"] = Linear(
        column=False,
        input_size=heads * model.v_head_dim,
        output_size=hidden,
        initializer=initial.output,
        bias=initial.bias if model.add_bias_linear or model.out_proj_has_bias else None,
    )
    return result


def latent_norms(model):
    """`{name: Norm}` of what is compressed (`qk_layernorm`)."""
    widths = {"q_layernorm": model.q_lora_rank, "kv_layernorm": model.kv_lora_rank} if model.qk_layernorm else {}
    return {name: Norm(model.norm, width) for name, width in widths.items() if width}


@register_describer("attention", "multi_latent")
def describe_latent_attention(model, rank):
    """Parameters of `MultiLatentAttention`."""
    descriptions = []
    for name, linear in latent_linears(model).items():
        is_whole = isinstance(linear, WholeLinear)
        descriptions += placed(name, linear.describe(rank.tensor)) if is_whole else describe_linear(rank, name, linear)
    norms = latent_norms(model).items()
    return descriptions + [one for name, norm in norms for one in placed(name, norm.describe(rank.tensor))]
