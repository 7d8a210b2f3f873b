"""Mixture of experts: layers with experts, widths, rules; parameters: `describers/mlp.py`. `model` is a ModelDescription."""


def has_experts(model):
    """Whether the model is a mixture of experts."""
    return model.num_experts > 1


def expert_width(model):
    """(field, inner width of one expert)."""
    name = "moe_ffn_hidden_size" if model.moe_ffn_hidden_size else "ffn_hidden_size"
    return name, getattr(model, name)


def shared_expert_width(model):
    """(field, inner width of all shared experts together); (None, 0) without shared experts."""
    if model.moe_shared_expert_intermediate_size:
        return "moe_shared_expert_intermediate_size", model.moe_shared_expert_intermediate_size
    if model.n_shared_experts:
        return "n_shared_experts", model.n_shared_experts * expert_width(model)[1]
    return None, 0


def expert_pattern(model):
    """Whether each layer of `num_layers` (noop layers included) holds experts: list[bool].

    `moe_layer_freq` is one number n (every n-th layer from layer 0) or a list of 0 and 1 per layer, as in Megatron; the
    first `first_k_dense_replace` layers are dense.
    """
    frequency, dense = model.moe_layer_freq or [1], model.first_k_dense_replace or 0
    if not has_experts(model):
        return [False] * model.num_layers
    if len(frequency) == 1:
        asked = [frequency[0] > 0 and layer % frequency[0] == 0 for layer in range(model.num_layers)]
    else:
        asked = [bool(frequency[layer % len(frequency)]) for layer in range(model.num_layers)]
    return [layer >= dense and is_asked for layer, is_asked in enumerate(asked)]


def expert_problems(model):
    """Problems of the experts' settings: list of (field, problem, field that it depends on)."""
    if not has_experts(model):
        return []
    problems = [(name, message, "num_layers") for name, message in _pattern_problems(model)]
    width = model.n_shared_experts and model.n_shared_experts * expert_width(model)[1]
    if width and shared_expert_width(model)[1] != width:
        message = f"gives shared experts of the width {width}; keep one"
        problems.append(("n_shared_experts", message, "moe_shared_expert_intermediate_size"))
    bias = next((name for name in ("add_bias_linear", "mlp_has_bias") if getattr(model, name)), None)
    if model.moe_grouped_gemm and bias:
        problems.append(("moe_grouped_gemm", "has no biases; switch them off", bias))
    return problems


def _pattern_problems(model):
    frequency, problems = [1] if model.moe_layer_freq is None else model.moe_layer_freq, []
    if not frequency or (len(frequency) == 1 and frequency[0] < 1):
        problems.append(("moe_layer_freq", "expects a number above 0, or 0 and 1 for each layer"))
    elif len(frequency) > 1 and (len(frequency) != model.num_layers or set(frequency) - {0, 1}):
        problems.append(("moe_layer_freq", f"expects 0 or 1 for each of the {model.num_layers} layers"))
    if (model.first_k_dense_replace or 0) > model.num_layers:
        problems.append(("first_k_dense_replace", f"is more than the {model.num_layers} layers"))
    if not problems and not any(expert_pattern(model)):
        name = "first_k_dense_replace" if model.first_k_dense_replace else "moe_layer_freq"
        problems.append((name, "leaves no layer with experts"))
    return problems
