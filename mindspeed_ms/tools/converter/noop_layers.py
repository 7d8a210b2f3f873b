"""Models with layers without weights: `num_layers` and lists of layers count their places, as in MindSpeed-LLM."""

from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.layout.experts import expert_pattern
from mindspeed_ms.layout.noop_layers import with_noops, without_noops
from mindspeed_ms.models.families.configuration import config_of_model


def without_places(sections, noops, place):
    """Sections (nested dict) of a model with no more layers than have weights; `place` names their file."""
    if not noops:
        return sections
    config = config_of_model({**sections, "parallel_config": {"noop_layers": noops}}, place)
    return _with_layers(sections, config, lambda entries: without_noops(entries, noops))


def with_places(sections, noops, place):
    """Sections (nested dict) of a model with places for layers without weights too; `place` names their file."""
    if not noops:
        return sections
    return _with_layers(sections, config_of_model(sections, place), lambda entries: with_noops(entries, noops, False))


def _with_layers(sections, config, change):
    pattern = expert_pattern(describe_model(config))
    changed = change(pattern)
    result = {**sections, "model_config": {**sections["model_config"], "num_layers": len(changed)}}
    if any(pattern) and not all(pattern):
        frequency = [int(has_experts) for has_experts in changed]
        result["moe_config"] = {**sections["moe_config"], "moe_layer_freq": frequency, "first_k_dense_replace": None}
    return result
