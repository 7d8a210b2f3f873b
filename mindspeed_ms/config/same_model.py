"""Which settings of ``model_config`` make a model the one that a checkpoint's weights belong to."""

from mindspeed_ms.layout.model_description import NORMALIZATIONS

# what the same weights compute: neither names nor shapes of tensors tell it
COMPUTES = (
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "group_query_attention",
    "num_query_groups",
    "kv_channels",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "hidden_act",
    "gated_linear_unit",
    "normalization",
    "norm_epsilon",
    "apply_layernorm_1p",
    "use_sandwich_norm",
    "apply_residual_connection_post_norm",
    "use_final_norm",
    "untie_embeddings_and_output_weights",
)
# which tensors there are
TENSORS = (
    "num_layers",
    "max_position_embeddings",
    "add_position_embedding",
    "use_rotary_position_embeddings",
    "add_bias_linear",
    "qkv_has_bias",
    "out_proj_has_bias",
    "mlp_has_bias",
    "qk_layernorm",
)
# what may change while it is trained
TRAINED_WITH = ("apply_query_key_layer_scaling", "attention_dropout", "hidden_dropout")

# without the one the other has no effect
_ONLY_WITH = {
    "num_query_groups": ("group_query_attention", True),
    **{name: ("position_embedding_type", "rope") for name in COMPUTES if name.startswith("rotary_")},
}


def differences(saved, own):
    """Settings in which the same weights compute something else.

    Args:
        saved (dict): model_config of a checkpoint; what it lacks is not compared.
        own (dict): model_config of this run.

    Returns:
        list[str]: names of fields.
    """
    return [
        name
        for name in COMPUTES
        if name in saved and name in own and _has_effect(name, own) and not is_same(saved[name], own[name])
    ]


def _has_effect(name, own):
    switch, value = _ONLY_WITH.get(name, (None, None))
    return own.get(switch) == value


def is_same(one, other):
    """Whether two values of a setting of the model mean the same, as they were typed or read."""
    forms = [NORMALIZATIONS.get(value, value) if isinstance(value, str) else value for value in (one, other)]
    return forms[0] == forms[1] or str(forms[0]).lower() == str(forms[1]).lower()
