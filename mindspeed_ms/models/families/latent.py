"""Multi-latent attention in config.json and its tensors, as DeepSeek's models have it."""

from dataclasses import dataclass
from types import MappingProxyType

from mindspeed_ms.models.families.family import Weight
from mindspeed_ms.models.families.rules import checked, m

_OURS, _THEIRS = "language_model.encoder.layers.{layer}.attention", "model.layers.{layer}.self_attn"
_NAMES = {
    "q_proj": "q_proj",
    "q_down_proj": "q_a_proj",
    "q_layernorm": "q_a_layernorm",
    "q_up_proj": "q_b_proj",
    "kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "kv_up_proj": "kv_b_proj",
    "out_proj": "o_proj",
}
LATENT_WEIGHTS = tuple(
    Weight(f"{_OURS}.{ours}.{end}", (f"{_THEIRS}.{theirs}.{end}",))
    for ours, theirs in _NAMES.items()
    for end in ("weight", "bias")
)
LATENT_SETTINGS = {
    "model_config.multi_latent_attention": True,
    "model_config.qk_layernorm": True,
    "model_config.qk_layernorm_epsilon": 1e-6,  # of the classes of transformers, whatever rms_norm_eps is
}
_SIZES = {
    "num_attention_heads": "num_attention_heads",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
_DEFAULTS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@dataclass(frozen=True)
class LatentHeads:
    """Heads, ranks and widths of multi-latent attention. `q_lora_rank` null: queries are not compressed; left out: 1536.

    `head_dim` and `qk_head_dim`, which some files have, follow from the others.
    """

    paths: tuple = m(*_SIZES.values(), "q_lora_rank")
    names = MappingProxyType(
        {f"model_config.{ours}": theirs for theirs, ours in {**_SIZES, "q_lora_rank": "q_lora_rank"}.items()}
    )
    fields = ("num_key_value_heads", "head_dim", "qk_head_dim")

    def read(self, config):
        result = {}
        for name, ours in _SIZES.items():
            value = config.get(name)
            value = _DEFAULTS.get(name) if value is None else value
            if type(value) is not int or value < 1:
                raise ValueError(f"has no {name}" if value is None else f"{name} is {value!r}: expected an integer above 0")
            result[f"model_config.{ours}"] = value
        heads, groups = config["num_attention_heads"], config.get("num_key_value_heads")
        if groups not in (None, heads):
            raise ValueError(f"num_key_value_heads is {groups!r}: expected num_attention_heads {heads}, or nothing")
        rank = checked("q_lora_rank", config.get("q_lora_rank", 1536), "model_config.q_lora_rank")
        return {**result, "model_config.q_lora_rank": rank or None}

    def write(self, settings):
        written = {name: settings[f"model_config.{ours}"] for name, ours in _SIZES.items()}
        heads = written["num_attention_heads"]
        return {**written, "num_key_value_heads": heads, "q_lora_rank": settings["model_config.q_lora_rank"]}
