"""Qwen 1.5, 2 and 2.5: Llama's tensors with biases on query, key and value; a window over the last tokens is possible."""

from mindspeed_ms.models.families.family import Family, register_family
from mindspeed_ms.models.families.llama import COMPUTED, SETTINGS, SIZES, WEIGHTS, numerics, tied
from mindspeed_ms.models.families.rules import Fixed, Heads, Rotary
from mindspeed_ms.models.families.windows import LayerWindows

register_family(
    Family(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        weights=WEIGHTS,
        settings={
            **SETTINGS,
            "model_config.qkv_has_bias": True,
            "model_config.out_proj_has_bias": False,
            "model_config.mlp_has_bias": False,
        },
        rules=(
            *SIZES,
            *numerics(),
            Heads(groups=32),
            Rotary(),
            tied(False),
            LayerWindows(),
            Fixed("attention_bias", (None, True)),  # queries, keys and values have biases in any case
        ),
        computed=COMPUTED,
    )
)
