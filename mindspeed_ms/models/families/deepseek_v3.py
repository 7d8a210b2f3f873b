"""DeepSeek V3 and R1: DeepSeek V2 with sigmoid scores and a bias per expert that balances their load."""

from dataclasses import dataclass
from types import MappingProxyType

from mindspeed_ms.models.families.deepseek_v2 import WEIGHTS, expert_rules
from mindspeed_ms.models.families.family import Family, Weight, register_family
from mindspeed_ms.models.families.latent import LATENT_SETTINGS, LatentHeads
from mindspeed_ms.models.families.llama import COMPUTED, SETTINGS, SIZES, numerics, tied
from mindspeed_ms.models.families.quantization import Quantization
from mindspeed_ms.models.families.rules import Field, Fixed, Rotary, m

_NORMALIZED = "moe_config.norm_topk_prob"
_MTP = "model_config.mtp_num_layers"
_FURTHER = "num_nextn_predict_layers"


@dataclass(frozen=True)
class Normalized:
    """`norm_topk_prob`: sigmoid scores of several chosen experts are always divided by their sum here, that of one never is."""

    paths: tuple = (_NORMALIZED,)
    names = MappingProxyType({_NORMALIZED: "norm_topk_prob"})
    fields = ("num_experts_per_tok",)

    def read(self, config):
        value, chosen = config.get("norm_topk_prob", True), config.get("num_experts_per_tok", 8)
        if value is not True:
            raise ValueError(f"norm_topk_prob is {value!r}: expected True")
        if chosen == 1:
            raise ValueError("num_experts_per_tok is 1: expected more, whose scores are divided by their sum")
        return {self.paths[0]: True}

    def write(self, settings):
        del settings
        return {"norm_topk_prob": True}


@dataclass(frozen=True)
class FurtherLayers:
    """`num_nextn_predict_layers`: layers of multi-token prediction, where the folder holds them (see `stored_layers`)."""

    paths: tuple = (_MTP,)
    names = MappingProxyType({_MTP: _FURTHER})
    fields = ()

    def read(self, config):
        value = config.get(_FURTHER) or None
        if value is not None and (type(value) is not int or not 0 < value < 100):
            raise ValueError(f"{_FURTHER} is {value!r}: expected an integer from 0")
        return {_MTP: value}

    def write(self, settings):
        return {_FURTHER: settings[_MTP] or 0}


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
            *(
                Weight(f"mtp.layers.{{layer}}.{ours}.weight", (f"model.layers.{{layer}}.{theirs}.weight",))
                for ours, theirs in (
                    ("enorm", "enorm"),
                    ("hnorm", "hnorm"),
                    ("eh_proj", "eh_proj"),
                    ("final_layernorm", "shared_head.norm"),
                )
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
            Normalized(),
            FurtherLayers(),
            Field("rope_interleave", m("rotary_interleaved"), True),
            Field("attention_bias", m("qkv_has_bias", "out_proj_has_bias"), False),
            Fixed("scoring_func", ("sigmoid", None)),
            Fixed("topk_method", ("noaux_tc", None)),
            Fixed("pretraining_tp", (1, None)),
            Quantization("fp8"),
        ),
        computed=COMPUTED,
        further_layers=_FURTHER,
        further_copies={
            "language_model.embedding.word_embeddings.weight": "model.layers.{layer}.embed_tokens.weight",
            "language_model.output_layer.weight": "model.layers.{layer}.shared_head.head.weight",
        },
    )
)
