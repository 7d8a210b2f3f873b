"""Qwen 3 with experts: its attention, layers of experts without a shared one."""

from mindspeed_ms.models.families.family import Family, register_family
from mindspeed_ms.models.families.llama import COMPUTED, SETTINGS, SIZES, WEIGHTS, numerics, tied
from mindspeed_ms.models.families.qwen2_moe import EXPERT_RULES, EXPERT_SETTINGS, EXPERT_WEIGHTS
from mindspeed_ms.models.families.qwen3 import QK_NORM, QK_NORM_WEIGHTS
from mindspeed_ms.models.families.rules import Field, Heads, Rotary, m
from mindspeed_ms.models.families.windows import Window

register_family(
    Family(
        name="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        weights=(*WEIGHTS, *QK_NORM_WEIGHTS, *EXPERT_WEIGHTS),
        settings={**SETTINGS, **EXPERT_SETTINGS, **QK_NORM, "model_config.mlp_has_bias": False},
        rules=(
            *SIZES,
            *numerics(),
            Heads(groups=4),
            Rotary(),
            tied(False),
            Window(switch="use_sliding_window", default=4096),
            *EXPERT_RULES,
            Field("num_experts", ("moe_config.num_experts",), 128, also="num_local_experts"),
            Field("num_experts_per_tok", ("moe_config.moe_router_topk",), 8),
            Field("attention_bias", m("qkv_has_bias", "out_proj_has_bias"), False),
        ),
        computed=COMPUTED,
    )
)
