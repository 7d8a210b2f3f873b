"""Qwen 3: Llama's tensors with norms of queries and keys, and a width of heads of its own."""

from mindspeed_ms.models.families.family import Family, Weight, register_family
from mindspeed_ms.models.families.llama import COMPUTED, SETTINGS, SIZES, WEIGHTS, numerics, tied
from mindspeed_ms.models.families.rules import Field, Heads, Rotary, m
from mindspeed_ms.models.families.windows import LayerWindows

QK_NORM_WEIGHTS = tuple(
    Weight(
        f"language_model.encoder.layers.{{layer}}.attention.{name}_layernorm.weight",
        (f"model.layers.{{layer}}.self_attn.{name}_norm.weight",),
    )
    for name in ("q", "k")
)
QK_NORM = {"model_config.qk_layernorm": True}

register_family(
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        weights=(*WEIGHTS, *QK_NORM_WEIGHTS),
        settings={**SETTINGS, **QK_NORM, "model_config.mlp_has_bias": False},
        rules=(
            *SIZES,
            *numerics(),
            Heads(width=lambda config: 128, groups=32),
            Rotary(),
            tied(False),
            Field("attention_bias", m("qkv_has_bias", "out_proj_has_bias"), False),
            LayerWindows(),
        ),
        computed=COMPUTED,
    )
)
