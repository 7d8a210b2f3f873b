"""Fields of config.json that change what a model computes, in ways that no family here has: other values are refused.

A family whose rules read a field decides about it itself. All further fields that nobody knows are kept.
"""

_OFF = (False, None)
_NONE = (None,)
_ONE = (1, None)
_ZERO = (0, None)
_FULL = "full_attention"
# field -> values that ask for nothing
NEUTRAL = {
    # stored weights
    **dict.fromkeys(("quantization_config", "compression_config", "quantization"), _NONE),
    # positions
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), _ONE),
    **dict.fromkeys(("rotary_dim", "rope_local_base_freq", "no_rope_layers", "no_rope_layer_interval"), (None, [], 0)),
    **dict.fromkeys(("alibi", "use_alibi", "use_mrope", "attn_temperature_tuning"), _OFF),
    # attention
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "clip_qkv"), _NONE),
    **dict.fromkeys(("attention_multiplier", "softmax_scale", "attn_scale", "attention_chunk_size"), _NONE),
    **dict.fromkeys(("sliding_window", "kv_lora_rank", "q_lora_rank"), (None, 0)),
    **dict.fromkeys(("use_sliding_window", "use_qk_norm", "qk_norm", "qk_layernorm", "multi_query"), _OFF),
    **dict.fromkeys(("add_cross_attention", "is_encoder_decoder", "use_attention_sinks"), _OFF),
    "is_causal": (True, None),
    # biases and the order of a layer's parts
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "o_proj_bias", "use_bias", "bias", "lm_head_bias"), _OFF),
    **dict.fromkeys(("parallel_attn", "use_parallel_residual"), _OFF),
    # factors
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "scale_emb"), _ONE),
    **dict.fromkeys(("scale_depth", "dim_model_base", "swiglu_limit"), _NONE),
    # dropouts
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "hidden_dropout", "residual_dropout", "embedding_dropout"), _ZERO),
    # experts and further heads
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (None, 0, 1)),
    **dict.fromkeys(("n_shared_experts", "num_nextn_predict_layers", "first_k_dense_replace", "n_group"), (None, 0, 1)),
    "routed_scaling_factor": _ONE,
    "scoring_func": ("softmax", None),
}


def check_unsupported(rules, config):
    """Raise ValueError if config.json asks for what no rule of the family reads and our models do not compute.

    Args:
        rules (tuple): of the family.
        config (dict): content of config.json.
    """
    known = {name for rule in rules for name in (*rule.names.values(), *getattr(rule, "fields", ()))}
    for name, accepted in NEUTRAL.items():
        if name in config and name not in known and config[name] not in accepted:
            texts = " or ".join(repr(one) for one in accepted)
            raise ValueError(f"{name} is {config[name]!r}, which models of this family do not have here: expected {texts}")
    kinds = config.get("layer_types")
    if kinds is not None and "layer_types" not in known and (not isinstance(kinds, list) or set(map(str, kinds)) - {_FULL}):
        raise ValueError(f"layer_types is {kinds!r}: expected {_FULL} for each layer, as this family has them")
