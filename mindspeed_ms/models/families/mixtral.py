"""Mixtral: Mistral's attention, eight experts in each layer of which each token takes two."""

from mindspeed_ms.models.families.family import Family, Weight, register_family
from mindspeed_ms.models.families.llama import (
    ATTENTION_WEIGHTS,
    COMPUTED,
    NORM_WEIGHTS,
    OUTER_WEIGHTS,
    SETTINGS,
    SIZES,
    numerics,
    tied,
)
from mindspeed_ms.models.families.rules import Field, Heads, Rotary
from mindspeed_ms.models.families.windows import Window

_OURS, _THEIRS = "language_model.encoder.layers.{layer}.mlp", "model.layers.{layer}.block_sparse_moe"

register_family(
    Family(
        name="mixtral",
        architecture="MixtralForCausalLM",
        weights=(
            *OUTER_WEIGHTS,
            *NORM_WEIGHTS,
            *ATTENTION_WEIGHTS,
            Weight(f"{_OURS}.router.gating.weight", (f"{_THEIRS}.gate.weight",)),
            Weight(
                f"{_OURS}.experts.local_experts.{{expert}}.mapping.weight",
                (f"{_THEIRS}.experts.{{expert}}.w1.weight", f"{_THEIRS}.experts.{{expert}}.w3.weight"),
            ),
            Weight(f"{_OURS}.experts.local_experts.{{expert}}.projection.weight", (f"{_THEIRS}.experts.{{expert}}.w2.weight",)),
        ),
        settings={
            **SETTINGS,
            "model_config.qkv_has_bias": False,
            "model_config.out_proj_has_bias": False,
            "model_config.mlp_has_bias": False,
            "moe_config.moe_router_pre_softmax": False,
        },
        rules=(
            *SIZES,
            *numerics(epsilon=1e-5),
            Heads(),
            Rotary(theta=1e6),
            tied(False),
            Window(default=None),
            Field("num_local_experts", ("moe_config.num_experts",), 8),
            Field("num_experts_per_tok", ("moe_config.moe_router_topk",), 2),
            Field("router_aux_loss_coef", ("moe_config.moe_aux_loss_coeff",), 0.001),
            Field("router_jitter_noise", ("moe_config.moe_input_jitter_eps",), 0.0),
        ),
        computed=COMPUTED,
    )
)
