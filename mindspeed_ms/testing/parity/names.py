"""Translation between Megatron core's parameter names (local spec, one rank) and ours; shapes and layouts are equal."""

import re

_FIXED = {
    "embedding.word_embeddings.weight": "language_model.embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight": "language_model.embedding.position_embeddings.weight",
    "output_layer.weight": "language_model.output_layer.weight",
}
_LATENT = ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")
_LAYER_PARTS = {
    "input_layernorm": "input_norm",
    "pre_mlp_layernorm": "post_attention_norm",
    "self_attention.linear_qkv": "attention.qkv_proj",
    "self_attention.linear_proj": "attention.out_proj",
    "self_attention.q_layernorm": "attention.q_layernorm",
    "self_attention.k_layernorm": "attention.k_layernorm",
    "self_attention.kv_layernorm": "attention.kv_layernorm",
    **{f"self_attention.linear_{name}": f"attention.{name}" for name in _LATENT},
    "self_attention.core_attention": "attention",
    "mlp.linear_fc1": "mlp.mapping",
    "mlp.linear_fc2": "mlp.projection",
    "mlp.router": "mlp.router.gating",
    "mlp.shared_experts.linear_fc1": "mlp.shared_experts.mapping",
    "mlp.shared_experts.linear_fc2": "mlp.shared_experts.projection",
}
_EXPERT_PARTS = {"linear_fc1": "mapping", "linear_fc2": "projection"}
_WITHOUT_LINEAR = ("gate_weight", "expert_bias", "softmax_offset")
_MTP = r"(mtp\.layers\.\d+)\.(transformer_layer\.)?(.*)"
_LAYER_NORM_ENDS = {"weight": "gamma", "bias": "beta"}


_LEGACY_PARTS = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "pre_mlp_layernorm",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}


def core_name(name):
    """Megatron core's name of a parameter of Megatron's legacy classes; other names are unchanged."""
    if not name.startswith("language_model."):
        return name
    name = name.removeprefix("language_model.").replace("encoder.final_norm", "decoder.final_layernorm")
    match = re.fullmatch(r"encoder\.(layers\.\d+)\.(.*)\.(weight|bias)", name)
    if match is None:
        return name
    return f"decoder.{match.group(1)}.{_LEGACY_PARTS[match.group(2)]}.{match.group(3)}"


def megatron_name(name):
    """Megatron core's name of our parameter `name`: the inverse of `our_name`."""
    fixed = {ours: core for core, ours in _FIXED.items()}
    if name in fixed:
        return fixed[name]
    mtp = re.fullmatch(_MTP, name)
    if mtp and mtp[2]:
        inside = megatron_name(f"language_model.encoder.layers.0.{mtp[3]}").removeprefix("decoder.layers.0.")
        return f"{mtp[1]}.transformer_layer.{inside}"
    stem, end = name.rsplit(".", 1)
    end = {"gamma": "weight", "beta": "bias"}.get(end, end)
    if mtp:
        return f"{stem}.{end}"
    if stem == "language_model.encoder.final_norm":
        return f"decoder.final_layernorm.{end}"
    match = re.fullmatch(r"language_model\.encoder\.(layers\.\d+)\.(.*)", stem)
    parts = {ours: core for core, ours in _LAYER_PARTS.items()}
    part = match.group(2)
    if part.startswith("mlp.experts."):
        part, _, linear = part.rpartition(".")
        linears = {ours: core for core, ours in _EXPERT_PARTS.items()}
        return f"decoder.{match.group(1)}.{part}.{linears[linear]}.{end}"
    if end in _WITHOUT_LINEAR:
        return f"decoder.{match.group(1)}.{parts.get(part, part)}.{end}"
    return f"decoder.{match.group(1)}.{parts[part]}.{end}"


def our_name(name, layer_norm):
    """State-dict key of the parameter that Megatron core calls `name`.

    Args:
        name (str): such as "decoder.layers.0.mlp.linear_fc1.weight".
        layer_norm (bool): the model normalises by LayerNorm, whose parameters are `gamma` and `beta` here.

    Raises:
        KeyError: the name is not one of a dense GPT.
    """
    name = core_name(name)
    if name in _FIXED:
        return _FIXED[name]
    mtp = re.fullmatch(_MTP, name)
    if mtp and mtp[2]:
        inside = our_name(f"decoder.layers.0.{mtp[3]}", layer_norm).removeprefix("language_model.encoder.layers.0.")
        return f"{mtp[1]}.transformer_layer.{inside}"
    if mtp:
        stem, end = name.rsplit(".", 1)
        return f"{stem}.{_LAYER_NORM_ENDS[end] if layer_norm and stem.endswith('norm') else end}"
    match = re.fullmatch(r"decoder\.(layers\.\d+|final_layernorm)\.?(.*?)\.?(gate_weight|expert_bias|weight|bias)", name)
    if match is None:
        raise KeyError(name)
    place, part, end = match.group(1), match.group(2).rstrip("."), match.group(3)
    is_norm = place == "final_layernorm" or part.endswith("layernorm")
    end = _LAYER_NORM_ENDS[end] if is_norm and layer_norm else end
    if place == "final_layernorm":
        return f"language_model.encoder.final_norm.{end}"
    if part.startswith("mlp.experts."):
        part, _, linear = part.rpartition(".")
        return f"language_model.encoder.{place}.{part}.{_EXPERT_PARTS[linear]}.{end}"
    if end in _WITHOUT_LINEAR:
        return f"language_model.encoder.{place}.{part}.{end}"
    return f"language_model.encoder.{place}.{_LAYER_PARTS[part]}.{end}"


def our_names(names):
    """Names `{Megatron's name: ours}` of all parameters of one model."""
    layer_norm = any(name.endswith("norm.bias") for name in names)
    return {name: our_name(name, layer_norm) for name in names}
