"""Parameter groups: parameters that share learning rate and weight decay. Source: Megatron core, `_get_param_groups`."""

import math

from mindspeed_ms.core import parallel_state
from mindspeed_ms.core.tensor_parallel.cell import description_of
from mindspeed_ms.layout.parameter_description import decays


def get_param_groups(named_params, config, no_weight_decay_cond=None, scale_lr_cond=None, lr_mult=1.0):
    """Sort parameters into groups, in the order in which the kinds are first met.

    Args:
        named_params (list[tuple[str, Parameter]]): in module order.
        config (OptimizerConfig): rates and decay.
        no_weight_decay_cond (Optional[Callable[[str, Parameter], bool]]): replaces the rule of `config`.
        scale_lr_cond (Optional[Callable[[str, Parameter], bool]]): parameters whose rate is multiplied by `lr_mult`.
        lr_mult (float): see `scale_lr_cond`.

    Returns:
        list[dict]: keys params, names, wd_mult, lr_mult, is_expert_parallel, is_decoupled_lr, max_lr, min_lr, lr,
        weight_decay.

    Raises:
        ValueError: a name in `no_weight_decay_params` matches no parameter.
    """
    _check_endings(named_params, config.no_weight_decay_params)
    groups = {}
    for name, param in named_params:
        no_decay = no_weight_decay_cond(name, param) if no_weight_decay_cond else has_no_weight_decay(name, param, config)
        scaled = bool(scale_lr_cond(name, param)) if scale_lr_cond else False
        decoupled = config.decoupled_lr is not None and is_embedding_or_output(param)
        key = (0.0 if no_decay else 1.0, lr_mult if scaled else 1.0, description_of(param).expert, decoupled)
        groups.setdefault(key, []).append((name, param))
    return [_make_group(key, members, config) for key, members in groups.items()]


def is_embedding_or_output(param):
    """Whether a parameter is the word embedding or the output layer: its layer says so."""
    marked = getattr(param, "is_embedding_or_output_parameter", False)  # of a user's layer, as in Megatron
    return bool(marked) or description_of(param).grouping == "vocab"


def has_no_weight_decay(name, param, config):
    """Whether a parameter has no weight decay: by the user's name endings, else by `layout.parameter_description.decays`."""
    if config.no_weight_decay_params is not None:
        return any(name.endswith(ending) for ending in config.no_weight_decay_params)
    return not decays(name, param.shape)


def _check_endings(named_params, endings):
    if not endings:
        return
    names = _names_of_all_stages([name for name, _ in named_params])
    for ending in endings:
        if not any(name.endswith(ending) for name in names):
            raise ValueError(
                f"no_weight_decay_params has {ending!r}, but no parameter's name ends so; names are like {names[0]!r}."
            )


def _names_of_all_stages(names):
    if not parallel_state.is_initialized() or parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return names
    return [name for stage in parallel_state.get_pipeline_model_parallel_group().all_gather_object(names) for name in stage]


def _make_group(key, members, config):
    wd_mult, lr_mult, expert, decoupled = key
    max_lr = config.decoupled_lr if decoupled else config.lr
    min_lr = config.min_lr
    if decoupled and config.decoupled_min_lr is not None:
        min_lr = config.decoupled_min_lr
    return {
        "params": [param for _, param in members],
        "names": [name for name, _ in members],
        "wd_mult": wd_mult,
        "lr_mult": lr_mult,
        "is_expert_parallel": expert,
        "is_decoupled_lr": decoupled,
        "max_lr": max_lr,
        "min_lr": min_lr,
        "lr": (max_lr if max_lr is not None else math.nan) * lr_mult,
        "weight_decay": config.weight_decay * wd_mult,
    }
