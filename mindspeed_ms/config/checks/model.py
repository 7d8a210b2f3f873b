"""Rules about the model: positions, gate, dropout, initializers, recomputation, adapters."""

import re

from mindspeed_ms.config.argument_table import row_at
from mindspeed_ms.config.checks.rule import last_rule, rule
from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.config.sections.attention import FlashAttentionConfig
from mindspeed_ms.config.sections.field import default_of, option_of
from mindspeed_ms.layout.adapter_targets import target_problems
from mindspeed_ms.layout.model_description import GATED_ACTIVATIONS
from mindspeed_ms.spelling import did_you_mean

_M = "model_config"


@rule
def positions_fit(context):
    """Refuse position and rotary settings that contradict `position_embedding_type`."""
    model = context.model
    if not model:
        return
    kind, path = model.position_embedding_type, f"{_M}.position_embedding_type"
    learned = kind == "learned_absolute"
    if learned and model.seq_length > model.max_position_embeddings:
        yield context.problem(f"{_M}.seq_length", "must not be above max_position_embeddings", f"{_M}.max_position_embeddings")
    if not model.add_position_embedding and kind != "rope":
        yield context.problem(
            f"{_M}.add_position_embedding",
            f"False has an effect with rope only; {row_at(f'{_M}.add_position_embedding').reason}",
            path,
        )
    if model.parallel_position_embedding and not learned:
        yield context.problem(f"{_M}.parallel_position_embedding", "needs learned positions", path)
    if kind == "rope":
        yield from _rotary(context, model)
        return
    for name in ("rotary_interleaved", "rotary_seq_len_interpolation_factor", "rope_scaling", "apply_rope_fusion"):
        if model[name] and context.was_set(f"{_M}.{name}"):
            yield context.problem(f"{_M}.{name}", "needs position_embedding_type rope", path)
    if model.use_rotary_position_embeddings:
        yield context.problem(f"{_M}.use_rotary_position_embeddings", "contradicts position_embedding_type; keep one", path)


def _rotary(context, model):
    if model.rotary_interleaved and model.apply_rope_fusion:
        yield context.problem(
            f"{_M}.rotary_interleaved", "does not work with apply_rope_fusion; switch that off", f"{_M}.apply_rope_fusion"
        )
    scaling, path = model.rope_scaling, f"{_M}.rope_scaling"
    pairs = {"llama3": ("high_freq_factor", "low_freq_factor"), "yarn": ("beta_fast", "beta_slow")}
    upper, lower = pairs.get(scaling and scaling.type, (None, None))
    if upper and scaling[upper] <= scaling[lower]:
        yield context.problem(f"{path}.{upper}", f"must be above {lower}", f"{path}.{lower}")
    name = "qk_pos_emb_head_dim" if model.multi_latent_attention else "kv_channels"
    width = int(model[name] * model.rotary_percent)
    if width % 2 or width == 0:
        yield context.problem(
            f"{_M}.rotary_percent",
            f"rotates {width} of {model[name]} elements of a head; expects an even number",
            f"{_M}.{name}",
        )


@rule
def window_is_the_only_band(context):
    """Refuse a sliding window beside settings of `fa_config` that say which tokens a token attends to."""
    path = f"{_M}.sliding_window"
    if not context.model or context.model.sliding_window is None:
        return
    for name in ("pre_tokens", "next_tokens", "sparse_mode"):
        # a written configuration holds every default
        if context.was_set(f"{_M}.fa_config.{name}") and context.model.fa_config[name] != FlashAttentionConfig()[name]:
            yield context.problem(f"{_M}.fa_config.{name}", "contradicts sliding_window; keep one", path)


@rule
def gate_follows_activation(context):
    """Refuse `gated_linear_unit` and `apply_swiglu_fusion` that contradict `hidden_act`."""
    model = context.model
    if model and model.gated_linear_unit != (model.hidden_act in GATED_ACTIVATIONS):
        hint = "use hidden_act: swiglu for a gate" if model.gated_linear_unit else "this activation has a gate"
        yield context.problem(f"{_M}.gated_linear_unit", f"contradicts hidden_act; {hint}", f"{_M}.hidden_act")
    if model and model.apply_swiglu_fusion and model.hidden_act not in GATED_ACTIVATIONS:
        yield context.problem(f"{_M}.apply_swiglu_fusion", "needs hidden_act: swiglu", f"{_M}.hidden_act")


@rule
def sandwich_scales_are_used(context):
    """Refuse `attn_post_norm_scale` and `ffn_post_norm_scale` without `use_sandwich_norm`."""
    model = context.model
    if not model or model.use_sandwich_norm:
        return
    for name in ("attn_post_norm_scale", "ffn_post_norm_scale"):
        if model[name] != 1.0:
            yield context.problem(f"{_M}.{name}", "needs use_sandwich_norm", f"{_M}.use_sandwich_norm")


@rule
def chunked_loss_is_float32(context):
    """Refuse a chunked loss together with `fp16_lm_cross_entropy`."""
    model = context.model
    if model and model.loss_chunk_size and model.fp16_lm_cross_entropy:
        yield context.problem(f"{_M}.loss_chunk_size", "takes the loss in float32; leave it out", f"{_M}.fp16_lm_cross_entropy")


@rule
def attention_dropout_agrees(context):
    """Refuse a `fa_config.keep_prob` other than 1 - attention_dropout."""
    model = context.model
    if not model or model.fa_config.keep_prob is None:
        return
    if abs(model.fa_config.keep_prob - (1.0 - model.attention_dropout)) > 1e-9:
        yield context.problem(
            f"{_M}.fa_config.keep_prob", "must be 1 - attention_dropout; leave it out", f"{_M}.attention_dropout"
        )


@rule
def initialisers_are_known(context):
    """Refuse an `init_method` or `bias_init` that is neither a known name nor a number."""
    for name in ("init_method", "bias_init"):
        value = context.model[name] if context.model else "normal"
        if value not in ("normal", "zeros", "ones") and (isinstance(value, bool) or not isinstance(value, (int, float))):
            yield context.problem(f"{_M}.{name}", "expects normal, zeros, ones or a number")


@rule
def recompute_settings_fit(context):
    """Refuse recompute methods, numbers of layers and distributed activations that contradict the granularity."""
    model = context.model
    if not model:
        return
    granularity, method, number = (f"{_M}.recompute_{name}" for name in ("granularity", "method", "num_layers"))
    if model.recompute_granularity is None:
        for path in (method, number):
            if context.value(path) is not None:
                yield context.problem(path, "needs recompute_granularity: full", granularity)
    elif model.recompute_granularity == "selective":
        if model.recompute_method is not None:
            yield context.problem(method, "has no effect on selective recomputation; leave it out", granularity)
    else:
        if model.recompute_method is None:
            yield context.problem(granularity, "full needs recompute_method: uniform or block")
        if model.recompute_num_layers is None:
            yield context.problem(granularity, "full needs recompute_num_layers")
        elif model.recompute_num_layers > model.num_layers:
            yield context.problem(number, "must not be above the number of layers", f"{_M}.num_layers")
    if model.distribute_saved_activations:
        if context.parallel.tensor_model_parallel_size == 1 or model.recompute_granularity != "full":
            yield context.problem(
                f"{_M}.distribute_saved_activations",
                "needs tensor parallelism and recompute_granularity: full",
                "parallel_config.tensor_model_parallel_size",
                granularity,
            )
        elif context.parallel.sequence_parallel:
            yield context.problem(
                f"{_M}.distribute_saved_activations",
                "and sequence parallelism do the same; keep one",
                "parallel_config.sequence_parallel",
            )


@rule
def adapters_fit(context):
    """target_cells: one list of patterns, then special cells that match one of them."""
    lora, path = context.lora, "lora_config.target_cells"
    if not lora.use_lora:
        yield from _adapters_left_off(context)
        return
    cells = lora.target_cells
    heads = [cell for cell in cells or [] if isinstance(cell, dict) and "target_cells" in cell]
    if len(heads) != 1 or not heads[0]["target_cells"]:
        yield context.problem(path, "expects exactly one {'target_cells': [pattern, ...]} with at least one pattern")
        return
    patterns = heads[0]["target_cells"]
    wrong = [] if isinstance(patterns, list) else [patterns]
    wrong += [pattern for pattern in patterns if not _is_pattern(pattern)] if not wrong else []
    for pattern in wrong:
        yield context.problem(path, f"target_cells expects a list of regular expressions, found {pattern!r}")
    for cell in cells:
        yield from _special_cell(context, path, cell, [] if wrong else patterns)


def _adapters_left_off(context):
    """Problems of settings of adapters where nothing says whether there are adapters."""
    for name, info in type(context.lora).own_fields().items() if not context.was_set("lora_config.use_lora") else ():
        path = f"lora_config.{name}"
        is_other = context.lora[name] not in (None, default_of(info)) and not option_of(info).ignored
        if is_other and context.was_set(path):
            message = "has no effect without use_lora (--lora-target-modules): set it True, or False to train everything"
            yield context.problem(path, message)


@last_rule
def adapters_have_targets(context):
    """Refuse patterns of `target_cells` that no linear of the model fits."""
    if context.model and context.lora.use_lora:
        for pattern, message in target_problems(describe_model(context.all_config)):
            yield context.problem("lora_config.target_cells", f"{pattern!r} {message}")


# key of an entry of target_cells -> (test of its value, expected value in words)
_CELL_KEYS = {
    "cell": (lambda value: isinstance(value, str), "the name of a layer"),
    "rank": (lambda value: type(value) is int and value > 0, "an integer > 0"),
    "alpha": (lambda value: type(value) in (int, float) and value > 0, "a number > 0"),
}


def _is_pattern(pattern):
    try:
        return bool(re.compile(pattern))
    except (re.error, TypeError):
        return False


def _special_cell(context, path, cell, patterns):
    """Problems of one entry of target_cells."""
    if not isinstance(cell, dict):
        yield context.problem(path, f"expects mappings, found {cell!r}")
        return
    known = ("target_cells",) if "target_cells" in cell else tuple(_CELL_KEYS)
    for key, value in cell.items():
        if key not in known:
            hint = did_you_mean(key, known)
            yield context.problem(path, f"{cell!r} has the unknown key {key!r}; expects {', '.join(known)}.{hint}")
        elif key in _CELL_KEYS and not _CELL_KEYS[key][0](value):
            yield context.problem(path, f"{key} = {value!r} expects {_CELL_KEYS[key][1]}")
    name = cell.get("cell")
    if "target_cells" not in cell and (name is None or not any(re.fullmatch(one, str(name)) for one in patterns)):
        yield context.problem(path, f"{cell!r} needs a 'cell' that matches one of the patterns {patterns}")
