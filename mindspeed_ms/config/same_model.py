"""Same-model settings (`checkpoint=` of a field): a checkpoint's weights are of another model under other values."""

from functools import cache

from mindspeed_ms.config.schema import all_fields
from mindspeed_ms.config.sections.field import COMPARED, TAKEN, option_of
from mindspeed_ms.layout.model_description import NORMALIZATIONS

# without the one (None: without any value of it) the other has no effect
_ONLY_WITH = {
    "model_config.num_query_groups": ("group_query_attention", (True,)),
    "model_config.rotary_": ("position_embedding_type", ("rope",)),
    "model_config.rope_": ("position_embedding_type", ("rope",)),
    "model_config.window_": ("sliding_window", None),
}


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
        if name in before and name in now and _has_effect(path, now) and not is_same(before[name], now[name]):
            found.append((path, before[name], now[name]))
    return found


def _has_effect(path, own):
    if path.startswith("moe_config.") and path != "moe_config.num_experts":
        return own.get("num_experts", 1) > 1
    needs = [need for start, need in _ONLY_WITH.items() if path.startswith(start)]
    return all(own.get(switch) is not None if values is None else own.get(switch) in values for switch, values in needs)


def is_same(one, other):
    """Whether two values of a same-model setting, typed or read, mean the same."""
    forms = [NORMALIZATIONS.get(value, value) if isinstance(value, str) else value for value in (one, other)]
    return forms[0] == forms[1] or str(forms[0]).lower() == str(forms[1]).lower()
