"""DeepSeek V3 and R1: DeepSeek V2 with sigmoid scores and a bias per expert that balances their load."""

from mindspeed_ms.models.families.deepseek_v2 import WEIGHTS, expert_rules
from mindspeed_ms.models.families.family import Family, Weight, register_family
from mindspeed_ms.models.families.latent import LATENT_SETTINGS, LatentHeads
from mindspeed_ms.models.families.llama import COMPUTED, SETTINGS, SIZES, numerics, tied
from mindspeed_ms.models.families.quantization import Quantization
from mindspeed_ms.models.families.rules import Field, Fixed, Rotary, m

register_family(
    Family(
        name="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        weights=(
            *WEIGHTS,
            Weight(
                "language_model.encoder.layers.{layer}.mlp.router.expert_bias",
                ("model.layers.{layer}.mlp.gate.e_score_correction_bias",),
            ),
        ),
        settings={
            **SETTINGS,
            **LATENT_SETTINGS,
            "model_config.mlp_has_bias": False,
            "moe_config.moe_router_score_function": "sigmoid",
            "moe_config.moe_router_enable_expert_bias": True,
            "moe_config.moe_router_group_score_topk": 2,
            "moe_config.moe_router_dtype": "fp32",
        },
        rules=(
            *SIZES,
            *numerics(),
            LatentHeads(),
            Rotary(),
            tied(False),
            *expert_rules(256, 2048, 8, 1, 2.5, 3),
            Field("n_group", ("moe_config.moe_router_num_groups",), 8),
            Field("topk_group", ("moe_config.moe_router_group_topk",), 4),
            Field("norm_topk_prob", ("moe_config.norm_topk_prob",), True),
            Field("rope_interleave", m("rotary_interleaved"), True),
            Field("attention_bias", m("qkv_has_bias", "out_proj_has_bias"), False),
            Fixed("scoring_func", ("sigmoid", None)),
            Fixed("topk_method", ("noaux_tc", None)),
            Fixed("pretraining_tp", (1, None)),
            Quantization("fp8"),
        ),
        computed=COMPUTED,
        further_layers="num_nextn_predict_layers",
    )
)
