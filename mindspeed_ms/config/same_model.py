"""Same-model settings (`checkpoint=` of a field): a checkpoint's weights are of another model under other values."""

from functools import cache

from mindspeed_ms.config.schema import all_fields
from mindspeed_ms.config.sections.field import COMPARED, TAKEN, option_of
from mindspeed_ms.layout.model_description import NORMALIZATIONS


def _is(switch, *values):
    return lambda section: section.get(switch) in values


# (beginning of the names in model_config, function: whether the other settings of the section give it an effect)
_ONLY_WITH = (
    ("num_query_groups", _is("group_query_attention", True)),
    ("use_rotary_position_embeddings", lambda section: "position_embedding_type" not in section),  # says the same
    ("rotary_", _is("position_embedding_type", "rope")),
    ("rope_", _is("position_embedding_type", "rope")),
    ("window_", lambda section: section.get("sliding_window") is not None),
    ("swiglu_", _is("hidden_act", "clamped_swiglu")),
    ("qk_layernorm_epsilon", _is("qk_layernorm", True)),
    *((name, _is("multi_latent_attention", True)) for name in ("q_lora", "kv_lora", "qk_head", "qk_pos_emb", "v_head")),
    (
        "bias_gelu_fusion",
        lambda section: (
            section.get("hidden_act") == "gelu" and any(section.get(name) for name in ("add_bias_linear", "mlp_has_bias"))
        ),
    ),
)


@cache
def model_paths(*kinds):
    """Config paths of the same-model settings.

    Args:
        kinds (str): COMPARED (the same weights compute something else under another value), TAKEN (only
            `use_checkpoint_args` concerns them).
    """
    return tuple(path for path, info in all_fields() if option_of(info).checkpoint in kinds)


@cache
def _shape_paths():
    return tuple(
        path for path, info in all_fields() if option_of(info).checkpoint == TAKEN and option_of(info).seen == "parameters"
    )


def differences(saved, own, with_shapes=False):
    """Settings under which the same weights would compute something else.

    Args:
        saved (dict): configuration in a checkpoint, by sections; missing settings are not compared.
        own (dict): configuration of this run, by sections.
        with_shapes (bool): also those that decide which parameters there are, which the same model may write in several ways.

    Returns:
        list[tuple]: (path, value in the checkpoint, own value).
    """
    found = []
    for path in [*model_paths(COMPARED), *(_shape_paths() if with_shapes else ())]:
        section, name = path.split(".")
        before, now = saved.get(section) or {}, own.get(section) or {}
        if name in before and name in now and has_effect(path, now) and not is_same(before[name], now[name]):
            found.append((path, before[name], now[name]))
    return found


def has_effect(path, section):
    """Whether a same-model setting does something, by the other settings of its section (dict)."""
    kind, name = path.split(".")
    if kind == "moe_config":
        return name == "num_experts" or section.get("num_experts", 1) > 1
    return all(needed(section) for start, needed in _ONLY_WITH if name.startswith(start))


def is_same(one, other):
    """Whether two values of a same-model setting, typed or read, mean the same."""
    forms = [NORMALIZATIONS.get(value, value) if isinstance(value, str) else value for value in (one, other)]
    return forms[0] == forms[1] or str(forms[0]).lower() == str(forms[1]).lower()
