"""DeepSeek V2: multi-latent attention, layers of experts behind some dense ones, shared experts, choice within groups."""

from dataclasses import dataclass
from types import MappingProxyType

from mindspeed_ms.models.families.family import Family, Weight, register_family
from mindspeed_ms.models.families.latent import LATENT_SETTINGS, LATENT_WEIGHTS, LatentHeads
from mindspeed_ms.models.families.llama import (
    COMPUTED,
    MLP_WEIGHTS,
    NORM_WEIGHTS,
    OUTER_WEIGHTS,
    SETTINGS,
    SIZES,
    numerics,
    tied,
)
from mindspeed_ms.models.families.quantization import Quantization
from mindspeed_ms.models.families.qwen2_moe import EXPERT_WEIGHTS
from mindspeed_ms.models.families.rules import REQUIRED, Field, Fixed, Rotary, checked, m

_OURS, _THEIRS = "language_model.encoder.layers.{layer}.mlp", "model.layers.{layer}.mlp"
_GROUPS = ("moe_config.moe_router_num_groups", "moe_config.moe_router_group_topk")

WEIGHTS = (
    *OUTER_WEIGHTS,
    *NORM_WEIGHTS,
    *LATENT_WEIGHTS,
    *MLP_WEIGHTS,
    *EXPERT_WEIGHTS,
    Weight(
        f"{_OURS}.shared_experts.mapping.weight",
        tuple(f"{_THEIRS}.shared_experts.{name}_proj.weight" for name in ("gate", "up")),
    ),
    Weight(f"{_OURS}.shared_experts.projection.weight", (f"{_THEIRS}.shared_experts.down_proj.weight",)),
)


def expert_rules(experts, width, chosen, shared, scaling, dense):
    """Rules of the experts with what fields mean that are left out: experts, their width, those per token, shared ones, factor,
    dense layers.
    """
    return (
        Field("n_routed_experts", ("moe_config.num_experts",), experts, also="num_local_experts"),
        Field("moe_intermediate_size", ("moe_config.moe_ffn_hidden_size",), width),
        Field("num_experts_per_tok", ("moe_config.moe_router_topk",), chosen),
        Field("n_shared_experts", ("moe_config.n_shared_experts",), shared),
        Field("routed_scaling_factor", ("moe_config.moe_router_topk_scaling_factor",), scaling),
        Field("first_k_dense_replace", ("moe_config.first_k_dense_replace",), dense),
        Fixed("moe_layer_freq", (1, None)),
    )


@dataclass(frozen=True)
class LimitedGroups:
    """`topk_method` greedy, or group_limited_greedy among the experts of the best `topk_group` of `n_group` groups."""

    paths: tuple = _GROUPS
    names = MappingProxyType(dict(zip(_GROUPS, ("n_group", "topk_group"))))
    fields = ("topk_method",)

    def read(self, config):
        method = config.get("topk_method") or "greedy"
        if method not in ("greedy", "group_limited_greedy"):
            raise ValueError(f"topk_method is {method!r}: expected 'greedy' or 'group_limited_greedy'")
        if method == "greedy":
            return dict.fromkeys(self.paths)
        groups = {path: checked(name, config.get(name), path) for path, name in self.names.items()}
        if None in groups.values():
            raise ValueError("topk_method is 'group_limited_greedy', but there is no n_group or topk_group")
        return groups

    def write(self, settings):
        groups, chosen = (settings[path] for path in self.paths)
        method = "greedy" if groups is None else "group_limited_greedy"
        return {"topk_method": method, "n_group": groups, "topk_group": chosen}


register_family(
    Family(
        name="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        weights=WEIGHTS,
        settings={
            **SETTINGS,
            **LATENT_SETTINGS,
            "model_config.rotary_interleaved": True,
            "model_config.mlp_has_bias": False,
            "moe_config.moe_router_pre_softmax": True,
            "moe_config.moe_router_score_function": "softmax",
            "moe_config.moe_router_group_score_topk": 1,
            "moe_config.moe_router_dtype": "fp32",
        },
        rules=(
            *SIZES,
            *numerics(),
            LatentHeads(),
            Rotary(),
            tied(False),
            *expert_rules(64, 1407, REQUIRED, 2, 1.0, 0),
            LimitedGroups(),
            Field("attention_bias", m("qkv_has_bias", "out_proj_has_bias"), False),
            Fixed("mlp_bias", (False, None)),
            Fixed("norm_topk_prob", (False, None)),
            Fixed("scoring_func", ("softmax", None)),
            Fixed("pretraining_tp", (1, None)),
            Quantization("fp8"),
        ),
        computed=COMPUTED,
    )
)
