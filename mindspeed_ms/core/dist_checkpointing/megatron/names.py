"""Names of parameters: our state-dict keys, Megatron core's (local and Transformer Engine specs), and its legacy classes'.

Values and shapes are equal under all names. Core's names of the local spec are the common form (`core name`); layers and
experts have the indices of a file. `_extra_state` entries hold no weights.
"""

import re
from dataclasses import dataclass

from mindspeed_ms.layout.parameters import WORD_EMBEDDINGS

CORE, TRANSFORMER_ENGINE, LEGACY, OLD_LEGACY = "core", "transformer_engine", "legacy", "old_legacy"
STYLES = (CORE, TRANSFORMER_ENGINE, LEGACY, OLD_LEGACY)
# experts of a layer: SequentialMLP (local_experts.N), GroupedMLP (weight1, weight2), TEGroupedMLP (linear_fc1.weightN)
SEQUENTIAL, GROUPED, ENGINE_GROUPED = "sequential", "grouped", "te_grouped"
EXPERT_FORMS = (SEQUENTIAL, GROUPED, ENGINE_GROUPED)
EXTRA_STATE = "_extra_state"
CORE_LAYERS, _OUR_LAYERS = "decoder.layers", "language_model.encoder.layers"
_LEGACY_LAYERS = "language_model.encoder.layers"
OUTPUT_LAYER = "output_layer.weight"
WORDS = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Part:
    """Names of one part; `.weight` or `.bias` follows, unless a name ends in "_", to which it is joined.

    Attributes:
        ours, core (str): in our keys, in Megatron core's local spec. N stands for an expert's index.
        engine (Optional[str]): in the spec of Transformer Engine, where it differs.
        legacy (tuple[str]): in legacy models: that of today, and older ones.
        is_norm (bool): of a LayerNorm, `gamma` and `beta` are ours.
        is_linear (bool): Megatron saves an `_extra_state` behind it.
    """

    ours: str
    core: str
    engine: str | None = None
    legacy: tuple = ()
    is_norm: bool = False
    is_linear: bool = False


# in the order of Megatron core's modules
LAYER_PARTS = (
    Part("input_norm", "input_layernorm", "self_attention.linear_qkv.layer_norm_", ("input_norm", "input_layernorm"), True),
    Part("attention.out_proj", "self_attention.linear_proj", None, ("self_attention.dense", "attention.dense"), False, True),
    Part(
        "attention.qkv_proj",
        "self_attention.linear_qkv",
        None,
        ("self_attention.query_key_value", "attention.query_key_value"),
        False,
        True,
    ),
    Part("attention.q_layernorm", "self_attention.q_layernorm", None, ("self_attention.q_layernorm",), True),
    Part("attention.k_layernorm", "self_attention.k_layernorm", None, ("self_attention.k_layernorm",), True),
    *(
        Part(f"attention.{name}", f"self_attention.linear_{name}", None, (), False, True)
        for name in ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")
    ),
    Part("attention.kv_layernorm", "self_attention.kv_layernorm", None, (), True),
    Part(
        "post_attention_norm",
        "pre_mlp_layernorm",
        "mlp.linear_fc1.layer_norm_",
        ("post_attention_norm", "post_attention_layernorm"),
        True,
    ),
    Part("mlp.mapping", "mlp.linear_fc1", None, ("mlp.dense_h_to_4h",), False, True),
    Part("mlp.projection", "mlp.linear_fc2", None, ("mlp.dense_4h_to_h",), False, True),
    Part("mlp.router.gating", "mlp.router"),
    Part("mlp.router.expert_", "mlp.router.expert_"),
    Part(
        "mlp.experts.local_experts.N.mapping",
        "mlp.experts.local_experts.N.linear_fc1",
        None,
        ("mlp.local_experts.N.dense_h_to_4h",),
        False,
        True,
    ),
    Part(
        "mlp.experts.local_experts.N.projection",
        "mlp.experts.local_experts.N.linear_fc2",
        None,
        ("mlp.local_experts.N.dense_4h_to_h",),
        False,
        True,
    ),
    Part("mlp.shared_experts.gate_", "mlp.shared_experts.gate_"),
    Part("mlp.shared_experts.mapping", "mlp.shared_experts.linear_fc1", None, (), False, True),
    Part("mlp.shared_experts.projection", "mlp.shared_experts.linear_fc2", None, (), False, True),
)
# our name, core's, legacy ones; beside the layers
_FIXED = (
    (WORD_EMBEDDINGS, WORDS, ("language_model.embedding.word_embeddings.weight",)),
    (
        "language_model.embedding.position_embeddings.weight",
        "embedding.position_embeddings.weight",
        ("language_model.embedding.position_embeddings.weight",),
    ),
    (
        "language_model.embedding.tokentype_embeddings.weight",
        "embedding.tokentype_embeddings.weight",
        ("language_model.embedding.tokentype_embeddings.weight",),
    ),
    # the second name is that of a tied copy on the last stage
    (
        "language_model.output_layer.weight",
        OUTPUT_LAYER,
        ("language_model.output_layer.weight", "word_embeddings_for_head.weight"),
    ),
)
_FINAL_NORM = Part("encoder.final_norm", "final_layernorm", None, ("final_norm", "final_layernorm"), True)
_GROUPED = ("mlp.experts.weight1", "mlp.experts.weight2")  # the same in core and here
_SWAPPED = [number for number, part in enumerate(LAYER_PARTS) if part.ours in ("attention.out_proj", "attention.qkv_proj")]
# a layer of multi-token prediction: place, "transformer_layer." for what is in the inner layer, the rest of the name
MTP_LAYER = re.compile(r"(mtp\.layers\.\d+)\.(transformer_layer\.)?(.+)")
MTP_PARTS = ("enorm", "hnorm", "eh_proj", "final_layernorm")  # the inner layer stands before the last one
_ENDS = {"gamma": "weight", "beta": "bias"}
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_ENGINE_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)")


def _joined(stem, end):
    return f"{stem}{end}" if stem.endswith("_") else f"{stem}.{end}"


def core_name_of(local_name, layer_index):
    """Core's name of one of our parameters.

    Args:
        local_name (str): `ParameterDescription.local_name`: with the local index of an expert.
        layer_index (Optional[int]): of its layer in the chunk; None outside the layers.

    Raises:
        KeyError: Megatron has no such parameter.
    """
    for ours, core, _ in _FIXED:
        if local_name == ours:
            return core
    stem, _, end = local_name.rpartition(".")
    mtp = MTP_LAYER.fullmatch(local_name)
    if mtp and mtp[2]:
        inside = core_name_of(f"{_OUR_LAYERS}.0.{mtp[3]}", 0).removeprefix(f"{CORE_LAYERS}.0.")
        return f"{mtp[1]}.{mtp[2]}{inside}"
    if mtp and mtp[3].rpartition(".")[0] in MTP_PARTS:
        return f"{stem}.{_ENDS.get(end, end)}"
    if layer_index is None:
        if stem == f"language_model.{_FINAL_NORM.ours}":
            return f"decoder.{_FINAL_NORM.core}.{_ENDS.get(end, end)}"
        raise KeyError(local_name)
    inside = local_name.removeprefix(f"{_OUR_LAYERS}.").partition(".")[2]
    if inside in _GROUPED:
        return f"{CORE_LAYERS}.{layer_index}.{inside}"
    generic, expert = _without_expert(inside)
    for part in LAYER_PARTS:
        for ending in ("weight", "bias", "gamma", "beta"):
            if generic == _joined(part.ours, ending):
                name = _joined(part.core, _ENDS.get(ending, ending))
                return f"{CORE_LAYERS}.{layer_index}.{name.replace('.N.', f'.{expert}.')}"
    raise KeyError(local_name)


def _without_expert(name):
    found = _EXPERT.search(name)
    return (name, None) if found is None else (_EXPERT.sub(".local_experts.N.", name), found[1])


def core_name(name):
    """(core name, style) of a name in a file; the style is None where all have the name. Unknown names stay."""
    name = name.removeprefix("module.")
    for _, core, legacy in _FIXED:
        if name in legacy:
            return core, LEGACY
    engine = _ENGINE_EXPERT.fullmatch(name)
    if engine:
        return f"{engine[1]}.local_experts.{engine[4]}.{engine[2]}.{engine[3]}", TRANSFORMER_ENGINE
    legacy = re.fullmatch(r"language_model\.(?:encoder|transformer)\.(.+)\.(weight|bias)", name)
    if legacy:
        return _core_of_legacy(name, legacy[1], legacy[2])
    mtp = MTP_LAYER.fullmatch(name)
    if mtp and mtp[2]:
        core, style = core_name(f"{CORE_LAYERS}.0.{mtp[3]}")
        return f"{mtp[1]}.{mtp[2]}{core.removeprefix(f'{CORE_LAYERS}.0.')}", style
    layer = re.fullmatch(r"(decoder\.layers\.\d+)\.(.+)", name)
    if layer:
        for part in LAYER_PARTS:
            if part.engine and layer[2] in (_joined(part.engine, "weight"), _joined(part.engine, "bias")):
                return f"{layer[1]}.{_joined(part.core, layer[2].removeprefix(part.engine))}", TRANSFORMER_ENGINE
    return name, None


def is_engine_expert(name):
    """Whether a name in a file is that of an expert of TEGroupedMLP."""
    return _ENGINE_EXPERT.fullmatch(name) is not None


def _core_of_legacy(name, stem, end):
    if stem in _FINAL_NORM.legacy:
        return f"decoder.{_FINAL_NORM.core}.{end}", LEGACY if stem == _FINAL_NORM.legacy[0] else OLD_LEGACY
    layer = re.fullmatch(r"(layers\.\d+)\.(.+)", stem)
    generic, expert = _without_expert(f".{layer[2]}.") if layer else ("", None)
    for part in LAYER_PARTS:
        if generic.strip(".") in part.legacy:
            style = LEGACY if not part.is_norm or generic.strip(".") == part.legacy[0] else OLD_LEGACY
            return f"decoder.{layer[1]}.{part.core.replace('.N.', f'.{expert}.')}.{end}", style
    return name, LEGACY


def name_in_style(name, style, has_experts=False, is_tied=False, experts=ENGINE_GROUPED):
    """Name in a file of the core name `name`.

    Args:
        style (str): one of `STYLES`.
        has_experts (bool): the layer holds experts: Transformer Engine's norm before them stands alone.
        is_tied (bool): `output_layer.weight` is the copy of the word embeddings.
        experts (str): one of `EXPERT_FORMS`; Transformer Engine's names of experts differ.

    Raises:
        KeyError: the style has no name for it.
    """
    if style == CORE:
        return name
    if style == TRANSFORMER_ENGINE:
        return _engine_name(name, has_experts, experts)
    for _, core, legacy in _FIXED:
        if name == core:
            return legacy[-1] if is_tied and name == OUTPUT_LAYER else legacy[0]
    if MTP_LAYER.fullmatch(name):
        raise KeyError(name)  # legacy models have no such layers
    which = 0 if style == LEGACY else 1
    if name.startswith(f"decoder.{_FINAL_NORM.core}."):
        return f"language_model.encoder.{_FINAL_NORM.legacy[which]}.{name.rpartition('.')[2]}"
    index, inside = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name).groups()
    generic, expert = _without_expert(inside)
    stem, _, end = generic.rpartition(".")
    for part in LAYER_PARTS:
        if stem == part.core and part.legacy:
            legacy = part.legacy[which if part.is_norm and len(part.legacy) > which else 0]
            return f"{_LEGACY_LAYERS}.{index}.{legacy.replace('.N.', f'.{expert}.')}.{end}"
    raise KeyError(name)


def _engine_name(name, has_experts, experts):
    mtp = MTP_LAYER.fullmatch(name)
    if mtp and mtp[2]:
        inside = _engine_name(f"{CORE_LAYERS}.0.{mtp[3]}", has_experts, experts).removeprefix(f"{CORE_LAYERS}.0.")
        return f"{mtp[1]}.{mtp[2]}{inside}"
    layer = re.fullmatch(r"(decoder\.layers\.\d+)\.(.+)", name)
    if layer is None:
        return name
    expert = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)", layer[2])
    if expert and experts == ENGINE_GROUPED:
        return f"{layer[1]}.mlp.experts.{expert[2]}.{expert[3]}{expert[1]}"
    stem, _, end = layer[2].rpartition(".")
    for part in LAYER_PARTS:
        if part.engine and stem == part.core and not (has_experts and part.core == "pre_mlp_layernorm"):
            return f"{layer[1]}.{_joined(part.engine, end)}"
    return name


def is_linear(name):
    """Whether Megatron saves an `_extra_state` behind the parameters of this core name's module."""
    if name == OUTPUT_LAYER:
        return True
    mtp = MTP_LAYER.fullmatch(name)
    if mtp:
        return is_linear(f"{CORE_LAYERS}.0.{mtp[3]}") if mtp[2] else mtp[3].startswith("eh_proj.")
    stem = _without_expert(name.partition("layers.")[2].partition(".")[2])[0].rpartition(".")[0]
    return any(part.is_linear and part.core == stem for part in LAYER_PARTS)


def extra_state_name(name):
    """Name of the `_extra_state` of the module that has the parameter `name` of a file."""
    engine = re.fullmatch(r"(.+\.experts\.linear_fc[12])\.(?:weight|bias)\d+", name)
    return f"{engine[1] if engine else name.rpartition('.')[0]}.{EXTRA_STATE}"


def module_order(name, style=CORE, experts=ENGINE_GROUPED):
    """Key that sorts core names of a chunk in the order of Megatron's modules.

    Legacy models have qkv before the output; Transformer Engine has the norm in front of attention inside qkv, and
    with TEGroupedMLP (`experts`) first all experts' first linears.
    """
    outside = [core for _, core, _ in _FIXED]
    if name in outside[:-1]:
        return (0, outside.index(name))
    if name == OUTPUT_LAYER:
        return (4,)
    mtp = MTP_LAYER.fullmatch(name)
    if mtp:
        number, part = int(mtp[1].rpartition(".")[2]), mtp[3].rpartition(".")[0]
        if mtp[2]:
            return (3, number, 3, *module_order(f"{CORE_LAYERS}.0.{mtp[3]}", style, experts))
        return (3, number, MTP_PARTS.index(part) + (part == "final_layernorm"), mtp[3].endswith(".bias"))
    if name.startswith(f"decoder.{_FINAL_NORM.core}."):
        return (2, name.endswith(".bias"))
    index, inside = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name).groups()
    if inside in _GROUPED:
        return (1, int(index), len(LAYER_PARTS), _GROUPED.index(inside), 0, False)
    generic, expert = _without_expert(inside)
    place = next(
        number
        for number, part in enumerate(LAYER_PARTS)
        if generic in (_joined(part.core, "weight"), _joined(part.core, "bias"))
    )
    # experts one after the other, each with both of its linears
    first = min(number for number, part in enumerate(LAYER_PARTS) if ".N." in part.core)
    group = first if expert is not None else place
    if style in (LEGACY, OLD_LEGACY) and place in _SWAPPED:
        group = place = sum(_SWAPPED) - place
    if style == TRANSFORMER_ENGINE and LAYER_PARTS[place].ours == "input_norm":
        group = place = _SWAPPED[1] - 0.5
    if style == TRANSFORMER_ENGINE and experts == ENGINE_GROUPED and expert is not None:
        return (1, int(index), group, place, int(expert), inside.endswith("bias"))
    return (1, int(index), group, int(expert or 0), place, inside.endswith("bias"))
