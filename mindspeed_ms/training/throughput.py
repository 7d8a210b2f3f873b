"""How much a model computes, for reports of TFLOP/s."""


def model_flops_per_token(model_config):
    """Floating point operations of one token's forward and backward, by Megatron's formula.

    Matrix products alone count, the backward twice as much as the forward, recomputation not at all, and half of the causal
    attention's scores. Of a mixture of experts, the experts that a token goes to.

    Args:
        model_config (TransformerConfig): sizes.
    """
    hidden, length, layers = model_config.hidden_size, model_config.seq_length, model_config.num_layers
    heads = model_config.num_attention_heads
    groups = model_config.num_query_groups if model_config.group_query_attention else heads
    width = (model_config.kv_channels or hidden // heads) * heads
    attention = 2 * hidden * width * (1 + groups / heads) + width * length
    feed_forward = 0
    for layer in range(layers):
        feed_forward += hidden * _feed_forward_width(model_config, layer) * (3 if _is_gated(model_config) else 2)
    return 6 * (layers * attention + feed_forward + hidden * model_config.vocab_size)


def _is_gated(model_config):
    return bool(model_config.gated_linear_unit) or model_config.hidden_act in ("swiglu", "fused_swiglu")


def _feed_forward_width(model_config, layer):
    moe = getattr(model_config, "moe_config", None)
    if not getattr(moe, "num_experts", None) or moe.num_experts < 2:
        return model_config.ffn_hidden_size
    frequency = moe.moe_layer_freq
    is_moe = frequency[layer] if isinstance(frequency, list) else layer % (frequency or 1) == 0
    if not is_moe or layer < (moe.first_k_dense_replace or 0):
        return model_config.ffn_hidden_size
    width = moe.moe_ffn_hidden_size or model_config.ffn_hidden_size
    return width * moe.moe_router_topk + (moe.moe_shared_expert_intermediate_size or 0)
