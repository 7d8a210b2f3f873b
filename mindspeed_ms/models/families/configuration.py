"""config.json of a family's model <-> our configuration."""

import numpy as np

from mindspeed_ms.config import ConfigError, RopeScalingConfig, init_configs_from_dict
from mindspeed_ms.config.same_model import has_effect, is_same, model_paths
from mindspeed_ms.config.schema import field_info
from mindspeed_ms.config.sections.field import COMPARED, TAKEN, default_of
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.models.families.rules import REMOVED
from mindspeed_ms.models.families.unsupported import check_unsupported

_SECTIONS = ("model_config", "moe_config")
_SIZES = (
    *(
        f"model_config.{name}"
        for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
    ),
    "model_config.kv_channels",
    *(f"model_config.{name}" for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")),
    "moe_config.num_experts",
    "moe_config.moe_ffn_hidden_size",
)
# neither shapes nor what the trained model computes, or settings that follow from others
_FREE = (
    "model_config.attention_dropout",
    "model_config.hidden_dropout",
    "model_config.num_experts",
    "model_config.num_query_groups",
    "model_config.use_rotary_position_embeddings",
    "model_config.max_position_embeddings",
)
# what a setting means that is left out, from the others
_DERIVED = {
    "model_config.kv_channels": lambda settings: (
        settings["model_config.kv_channels"]  # of no effect
        if settings["model_config.multi_latent_attention"]
        else settings["model_config.hidden_size"] // settings["model_config.num_attention_heads"]
    ),
    "moe_config.moe_ffn_hidden_size": lambda settings: (
        settings["moe_config.moe_ffn_hidden_size"] and settings["model_config.ffn_hidden_size"]
    ),
}
# what a setting of the checkpoint means that is null
_MEANT = {
    "model_config.qk_layernorm_epsilon": lambda settings: settings["model_config.norm_epsilon"],
    "moe_config.moe_router_group_score_topk": lambda settings: (
        settings["moe_config.moe_router_topk"] // settings["moe_config.moe_router_group_topk"]
        if settings["moe_config.moe_router_group_topk"]
        else None
    ),
}
_ALL_BIASES, _BIASES = (
    "model_config.add_bias_linear",
    ("model_config.qkv_has_bias", "model_config.out_proj_has_bias", "model_config.mlp_has_bias"),
)
# what a size means that is left out: another size
_SAME_AS = {"moe_config.moe_ffn_hidden_size": "model_config.ffn_hidden_size"}


def read_configuration(family, config, path, **changes):
    """AllConfig of the model that a config.json describes.

    Args:
        family (Family): of the model.
        config (dict): content of the file.
        path (str): of the file, for messages.
        changes: further settings by section: `moe_config={...}`.

    Raises:
        CheckpointError: a field is missing, or has a value that our models do not know.
    """
    settings = dict(family.settings)
    try:
        check_unsupported(family.rules, config)
        for rule in family.rules:
            settings.update(rule.read(config))
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: {error}.") from error
    nested = {name: dict(changes.get(name, {})) for name in _SECTIONS}
    for name, value in settings.items():
        section, field = name.split(".")
        if value is not None or (field_info(name) is not None and default_of(field_info(name)) is not None):
            nested[section][field] = value
    positions = settings.get("model_config.max_position_embeddings")
    nested["model_config"].setdefault("seq_length", positions if positions and positions > 0 else 1)  # else reported itself
    try:
        return config_of_model({name: values for name, values in nested.items() if values}, path)
    except CheckpointError as error:
        text = str(error)
        for rule in family.rules:
            for place, name in rule.names.items():
                text = text.replace(place, name)
        raise CheckpointError(text) from error


def config_of_model(sections, place):
    """AllConfig of the sections (nested dict) that describe a model.

    Args:
        place (str): where they come from, for messages.

    Raises:
        CheckpointError: they contradict each other.
    """
    try:
        return init_configs_from_dict(
            {name: values for name, values in sections.items() if name in (*_SECTIONS, "parallel_config")}
        )
    except ConfigError as error:
        text = " ".join(str(error).split())
        raise CheckpointError(f"{place} describes no model that is known here: {text}") from error


def settings_of(all_config):
    """Settings of the model by path (`section.field`): dict; `add_bias_linear` is also the biases that it stands for."""
    values = all_config.to_dict()
    settings = {f"{name}.{field}": value for name in _SECTIONS for field, value in values[name].items()}
    if settings[_ALL_BIASES]:
        settings.update(dict.fromkeys(_BIASES, True))
    return settings


def write_configuration(family, all_config, base=None):
    """config.json (dict) of our model.

    Args:
        family (Family): of the model.
        all_config (AllConfig): our configuration.
        base (Optional[dict]): config.json that the model came from. Its unknown fields stay, and so do those that
            say the same; None: a new one.

    Raises:
        CheckpointError: the family cannot say one of our settings.
    """
    settings = {**{path: None for rule in family.rules for path in rule.paths}, **settings_of(all_config)}
    check_expressible(family, settings)
    result = dict(base) if base is not None else {"architectures": [family.architecture], "model_type": family.name}
    for rule in family.rules:
        wanted = {path: settings[path] for path in rule.paths if path in settings}
        if base is not None and not getattr(rule, "is_always_written", False) and _says(rule, base, wanted):
            continue
        try:
            written = rule.write(settings)
        except ValueError as error:
            raise CheckpointError(f"config.json of the family {family.name} {error}.") from error
        if base is not None and hasattr(rule, "respelled"):
            written = rule.respelled(written, base)
        for name, value in written.items():
            if value is REMOVED:
                result.pop(name, None)
            else:
                result[name] = value
    return result


def check_same_sizes(family, all_config, base, path):
    """Compare the sizes of a config.json, which is to be written for our model, with the model's.

    Raises:
        CheckpointError: it is of a model with other shapes; names field and both values.
    """
    theirs, ours = settings_of(read_configuration(family, base, path)), settings_of(all_config)
    for name in _SIZES:
        other = _SAME_AS.get(name, name)
        if (theirs[name] or theirs[other]) != (ours[name] or ours[other]):
            raise CheckpointError(
                f"{path} is of another model: {name} is {theirs[name]!r} there and {ours[name]!r} in the checkpoint. Give the "
                "folder of the checkpoint's model."
            )


def _says(rule, base, wanted):
    try:
        found = rule.read(base)
    except (ValueError, TypeError, AttributeError):
        return False
    return all(_is_equal(found.get(path), value, path) for path, value in wanted.items())


def _is_equal(theirs, ours, path):
    if isinstance(theirs, dict) and isinstance(ours, dict):  # what is left out has its default
        return RopeScalingConfig(**theirs) == RopeScalingConfig(**ours)
    if theirs is None:
        info = field_info(path)
        return ours is None or (info is not None and is_same(default_of(info), ours))
    return theirs == ours if isinstance(theirs, (int, float)) else is_same(theirs, ours)


def check_expressible(family, settings):
    """Raise CheckpointError if one of our settings (by path) is another than all models of the family have."""
    known = {path for rule in family.rules for path in rule.paths}
    for path in model_paths(COMPARED, TAKEN):
        if path in known or path in (*_FREE, _ALL_BIASES) or path not in settings:
            continue
        section = path.split(".")[0]
        if not has_effect(path, {name.split(".")[1]: value for name, value in settings.items() if name.startswith(section)}):
            continue
        expected = family.settings.get(path, default_of(field_info(path)))
        if path in _BIASES and family.settings.get(_ALL_BIASES):
            expected = True
        if expected is None and path in _DERIVED:
            expected = _DERIVED[path](settings)
        value = settings[path]
        if value is None and expected is not None and path in _MEANT:
            value = _MEANT[path](settings)
            if value is None:  # of no effect
                continue
        is_neutral = section == "moe_config" and expected is None and not set(np.atleast_1d(settings[path])) - {None, 0, 1}
        if not is_same(value, expected) and not is_neutral:
            raise CheckpointError(
                f"{family.name} models have {path} = {expected!r}, but the checkpoint's has {settings[path]!r}: choose "
                "another family (--model-type-hf)."
            )


def model_sections(values):
    """The sections of a configuration (nested dict) that describe the model, without its layout."""
    return {name: dict(values[name]) for name in _SECTIONS if values.get(name)}
