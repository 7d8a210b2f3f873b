"""Sliding-window attention: which layers have a window, rules. `model` is a ModelDescription."""


def has_window(model, layer):
    """Whether the global layer `layer` (from 0, noop layers not counted) attends within `sliding_window`.

    `window_attn_skip_freq` is one number n (layers n, 2n, ..., counted from 1, attend to all tokens) or a list of 0 and 1
    per layer, as in Megatron.
    """
    frequency = model.window_attn_skip_freq
    if model.sliding_window is None or frequency is None:
        return model.sliding_window is not None
    if _is_number(model):
        return (layer + 1) % frequency[0] != 0
    return bool(frequency[layer])


def window_problems(model):
    """Problems of the windows' settings: list of (field, problem, field that it depends on)."""
    frequency, layers = model.window_attn_skip_freq, model.stages.num_layers
    if frequency is None:
        return []
    if model.sliding_window is None:
        return [("window_attn_skip_freq", "needs sliding_window; set that, or leave this out", "sliding_window")]
    if _is_number(model):
        is_right = frequency[0] > 1
    else:
        is_right = len(frequency) == layers and not set(frequency) - {0, 1}
    if is_right:
        return []
    return [("window_attn_skip_freq", f"expects a number above 1, or 0 or 1 for each of the {layers} layers", "num_layers")]


def _is_number(model):
    return len(model.window_attn_skip_freq) == 1 and model.stages.num_layers > 1
