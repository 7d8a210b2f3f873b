"""Mistral 7B and its like: Llama's tensors, a window over the last tokens."""

from mindspeed_ms.models.families.family import Family, register_family
from mindspeed_ms.models.families.llama import COMPUTED, SETTINGS, SIZES, WEIGHTS, numerics, tied
from mindspeed_ms.models.families.rules import Heads, Rotary
from mindspeed_ms.models.families.windows import Window

register_family(
    Family(
        name="mistral",
        architecture="MistralForCausalLM",
        weights=WEIGHTS,
        settings={
            **SETTINGS,
            "model_config.qkv_has_bias": False,
            "model_config.out_proj_has_bias": False,
            "model_config.mlp_has_bias": False,
        },
        rules=(*SIZES, *numerics(), Heads(groups=8), Rotary(), tied(False), Window(default=4096)),
        computed=COMPUTED,
    )
)
