"""gpt-oss: attention sinks and alternating windows, experts with biases and a clamped SwiGLU, a router with a bias."""

from dataclasses import dataclass
from types import MappingProxyType

from mindspeed_ms.models.families.family import Family, Weight, register_family
from mindspeed_ms.models.families.llama import ATTENTION_WEIGHTS, NORM_WEIGHTS, OUTER_WEIGHTS, SETTINGS, SIZES, numerics, tied
from mindspeed_ms.models.families.quantization import Quantization
from mindspeed_ms.models.families.rules import Field, Fixed, Heads, Rotary, checked, m

_OURS, _THEIRS = "language_model.encoder.layers.{layer}", "model.layers.{layer}"
_EXPERT = f"{_OURS}.mlp.experts.local_experts.{{expert}}"
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_KINDS = ("full_attention", "sliding_attention")
_WINDOWS = m("sliding_window", "window_attn_skip_freq", "num_layers")


@dataclass(frozen=True)
class LongRotary(Rotary):
    """`Rotary` that means yarn where the file says nothing."""

    theta: float = 150000.0

    def read(self, config):
        if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
            config = {**config, "rope_scaling": _YARN}
        return super().read(config)

    def write(self, settings):
        written = super().write(settings)
        return {**written, "rope_scaling": written["rope_scaling"] or {"rope_type": "default"}}


@dataclass(frozen=True)
class AlternatingWindows:
    """`sliding_window` of the layers that `layer_types` names; left out: of every second layer, from the first on."""

    paths: tuple = _WINDOWS
    names = MappingProxyType(dict(zip(_WINDOWS[:2], ("sliding_window", "layer_types"))))

    def read(self, config):
        layers = config.get("num_hidden_layers")
        window = checked("sliding_window", config.get("sliding_window", 128), self.paths[0])
        kinds = config.get("layer_types") or [_KINDS[(layer + 1) % 2] for layer in range(layers)]
        if not isinstance(kinds, list) or len(kinds) != layers or {*map(str, kinds)} - {*_KINDS}:
            raise ValueError(f"layer_types is {kinds!r}: expected {' or '.join(_KINDS)} for each of {layers} layers")
        pattern = [_KINDS.index(kind) for kind in kinds]
        if window is None or not any(pattern):
            return {self.paths[0]: None, self.paths[1]: None, self.paths[2]: layers}
        return {self.paths[0]: window, self.paths[1]: None if all(pattern) else pattern, self.paths[2]: layers}

    def write(self, settings):
        window, pattern, layers = (settings[path] for path in self.paths)
        if pattern and len(pattern) == 1 and layers > 1:  # every n-th layer sees everything
            pattern = [int((layer + 1) % pattern[0] != 0) for layer in range(layers)]
        pattern = [0] * layers if window is None else pattern or [1] * layers
        return {"num_hidden_layers": layers, "sliding_window": window, "layer_types": [_KINDS[one] for one in pattern]}


def _experts(ours, theirs):
    """Weight and bias of all experts in one tensor each, the weight as [in, out]."""
    common = {"stacked": True, "alternating": theirs == "gate_up_proj"}
    names = (f"{_THEIRS}.mlp.experts.{theirs}",), (f"{_THEIRS}.mlp.experts.{theirs}_bias",)
    return (
        Weight(f"{_EXPERT}.{ours}.weight", names[0], transposed=True, **common),
        Weight(f"{_EXPERT}.{ours}.bias", names[1], **common),
    )


register_family(
    Family(
        name="gpt_oss",
        architecture="GptOssForCausalLM",
        weights=(
            *OUTER_WEIGHTS,
            *NORM_WEIGHTS,
            *ATTENTION_WEIGHTS,
            Weight(f"{_OURS}.attention.softmax_offset", (f"{_THEIRS}.self_attn.sinks",)),
            Weight(f"{_OURS}.mlp.router.gating.weight", (f"{_THEIRS}.mlp.router.weight",)),
            Weight(f"{_OURS}.mlp.router.gating.bias", (f"{_THEIRS}.mlp.router.bias",)),
            *_experts("mapping", "gate_up_proj"),
            *_experts("projection", "down_proj"),
        ),
        settings={
            **SETTINGS,
            "model_config.hidden_act": "clamped_swiglu",
            "model_config.softmax_type": "learnable",
            "model_config.mlp_has_bias": True,
            "moe_config.moe_router_has_bias": True,
            "moe_config.moe_router_pre_softmax": False,
            "moe_config.moe_router_score_function": "softmax",
        },
        rules=(
            *SIZES,
            *numerics(1e-5)[1:],
            Fixed("hidden_act", ("silu", None)),
            Heads(width=lambda config: 64, groups=8),
            LongRotary(),
            tied(False),
            AlternatingWindows(),
            Field("num_local_experts", ("moe_config.num_experts",), 128, also="num_experts"),
            Field("num_experts_per_tok", ("moe_config.moe_router_topk",), 4, also="experts_per_token"),
            Field("router_aux_loss_coef", ("moe_config.moe_aux_loss_coeff",), 0.001),
            Field("swiglu_limit", m("swiglu_limit"), 7.0),
            Field("swiglu_alpha", m("swiglu_alpha"), 1.702),
            Field("attention_bias", m("qkv_has_bias", "out_proj_has_bias"), True),
            Quantization("mxfp4"),
        ),
    )
)
