"""Qwen 1.5 and 2 with experts: some layers hold experts beside one that all tokens share, with a gate of its own."""

from mindspeed_ms.models.families.family import Family, Weight, register_family
from mindspeed_ms.models.families.llama import COMPUTED, SETTINGS, SIZES, WEIGHTS, numerics, tied
from mindspeed_ms.models.families.rules import DecoderSparseStep, Field, Heads, Rotary, m
from mindspeed_ms.models.families.windows import LayerWindows

_OURS, _THEIRS = "language_model.encoder.layers.{layer}.mlp", "model.layers.{layer}.mlp"

EXPERT_WEIGHTS = (
    Weight(f"{_OURS}.router.gating.weight", (f"{_THEIRS}.gate.weight",)),
    Weight(
        f"{_OURS}.experts.local_experts.{{expert}}.mapping.weight",
        tuple(f"{_THEIRS}.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up")),
    ),
    Weight(f"{_OURS}.experts.local_experts.{{expert}}.projection.weight", (f"{_THEIRS}.experts.{{expert}}.down_proj.weight",)),
)
EXPERT_SETTINGS = {"moe_config.moe_router_pre_softmax": True, "moe_config.moe_router_score_function": "softmax"}
EXPERT_RULES = (
    Field("moe_intermediate_size", ("moe_config.moe_ffn_hidden_size",)),
    Field("norm_topk_prob", ("moe_config.norm_topk_prob",), False),
    Field("router_aux_loss_coef", ("moe_config.moe_aux_loss_coeff",), 0.001),
    DecoderSparseStep(),
)

register_family(
    Family(
        name="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        weights=(
            *WEIGHTS,
            *EXPERT_WEIGHTS,
            Weight(
                f"{_OURS}.shared_experts.mapping.weight",
                tuple(f"{_THEIRS}.shared_expert.{name}_proj.weight" for name in ("gate", "up")),
            ),
            Weight(f"{_OURS}.shared_experts.projection.weight", (f"{_THEIRS}.shared_expert.down_proj.weight",)),
            Weight(f"{_OURS}.shared_experts.gate_weight", (f"{_THEIRS}.shared_expert_gate.weight",)),
        ),
        settings={
            **SETTINGS,
            **EXPERT_SETTINGS,
            "model_config.out_proj_has_bias": False,
            "model_config.mlp_has_bias": False,
            "moe_config.moe_shared_expert_gate": True,
        },
        rules=(
            *SIZES,
            *numerics(),
            Heads(groups=16),
            Rotary(),
            tied(False),
            LayerWindows(),
            *EXPERT_RULES,
            Field("num_experts", ("moe_config.num_experts",), 60, also="num_local_experts"),
            Field("num_experts_per_tok", ("moe_config.moe_router_topk",), 4),
            Field("qkv_bias", m("qkv_has_bias"), True),
            Field("shared_expert_intermediate_size", ("moe_config.moe_shared_expert_intermediate_size",), 5632),
        ),
        computed=COMPUTED,
    )
)
