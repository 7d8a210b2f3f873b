"""FLOPs: floating point operations of a token's forward and backward, from the model description."""


def flops_per_token(model):
    """Floating point operations of one token's forward and backward, by Megatron's formula.

    Matrix products alone count, the backward twice as much as the forward, recomputation not at all, and half of the causal
    attention's scores. Of a mixture of experts, the experts that a token goes to; the router does not count.

    Args:
        model (ModelDescription): the model.
    """
    attention = _latent_attention(model) if model.is_latent else _attention(model)
    mlp_width = sum(_mlp_width(model, layer) for layer in range(model.stages.num_layers))
    mlp = model.hidden_size * mlp_width * (3 if model.is_gated else 2)
    outputs = 1 if model.gives_values else model.vocab_size
    return 6 * (model.stages.num_layers * attention + mlp + model.hidden_size * outputs)


def _attention(model):
    width, key_value_width = model.attention_width, model.query_groups * model.head_dim
    return 2 * model.hidden_size * (width + key_value_width) + width * model.seq_length


def _latent_attention(model):
    """Multiplications of a token in multi-latent attention: its projections, and half of the scores and of their sums."""
    heads, hidden, rank = model.num_attention_heads, model.hidden_size, model.q_lora_rank
    queries = rank * (hidden + model.attention_width) if rank else hidden * model.attention_width
    latent = hidden * model.latent_width + model.kv_lora_rank * heads * (model.qk_head_dim + model.v_head_dim)
    out = heads * model.v_head_dim * hidden
    return queries + latent + out + heads * (model.head_dim + model.v_head_dim) * model.seq_length // 2


def _mlp_width(model, layer):
    """Width of the feed-forward blocks that a token goes through in the global layer `layer`."""
    if model.mlp_kind(layer) == "experts":
        return model.expert_ffn_size * model.moe_router_topk + model.shared_expert_ffn_size
    return model.ffn_hidden_size
