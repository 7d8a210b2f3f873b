"""Scaling of rotary frequencies for long sequences (`rope_scaling`): linear, llama3, yarn.

Sources: Megatron core, `rotary_pos_embedding.py` and `yarn_rotary_pos_embedding.py`; transformers, `modeling_rope_utils.py`.
"""

import math

import numpy as np


def scale_frequencies(frequencies, scaling, base):
    """Frequencies for longer sequences.

    Args:
        frequencies (ndarray): float32 `[rot / 2]`, angle per position.
        scaling (RopeScalingConfig): rule and numbers.
        base (float): `rotary_base`.

    Returns:
        float32 `[rot / 2]`, and the factor (float) of cos and sin.
    """
    if scaling.type == "linear":
        return frequencies / np.float32(scaling.factor), 1.0
    if scaling.type == "llama3":
        return _llama3(frequencies, scaling), 1.0
    return _yarn(frequencies, scaling, base), attention_factor(scaling)


def _llama3(frequencies, scaling):
    """Long waves are scaled, short ones are not, between them is a ramp."""
    length, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    waves = np.float32(2 * math.pi) / frequencies
    smooth = np.clip((np.float32(length) / waves - np.float32(low)) / np.float32(high - low), 0, 1)
    return (1 - smooth) * (frequencies / np.float32(scaling.factor)) + smooth * frequencies


def _yarn(frequencies, scaling, base):
    """Frequencies that rotate less than `beta_slow` times are scaled, more than `beta_fast` times not, between is a ramp."""
    count = frequencies.size
    limits = [_index_of_rotations(turns, scaling, 2 * count, base) for turns in (scaling.beta_fast, scaling.beta_slow)]
    if scaling.truncate:
        limits = [math.floor(limits[0]), math.ceil(limits[1])]
    first, last = max(limits[0], 0), min(limits[1], 2 * count - 1)
    if first == last:
        last += 0.001  # no division by zero
    ramp = np.clip((np.arange(count, dtype=np.float32) - np.float32(first)) / np.float32(last - first), 0, 1)
    return frequencies / np.float32(scaling.factor) * ramp + frequencies * (1 - ramp)


def _index_of_rotations(rotations, scaling, dimension, base):
    """Index (float) of the frequency that rotates so many times within the first training's sequence."""
    length = scaling.original_max_position_embeddings
    return dimension * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))


def attention_factor(scaling):
    """Factor of cos and sin under yarn: `attention_factor`, or what `mscale` and `mscale_all_dim` give."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    over_all = 1.0 if scaling.mscale_all_dim is None else _temperature(scaling.factor, scaling.mscale_all_dim)
    return _temperature(scaling.factor, scaling.mscale) / over_all


def score_factor(scaling):
    """Factor of attention scores under yarn with `mscale_all_dim`, of attention whose heads have parts without positions.

    Source: transformers, `modeling_deepseek_v3.py`; Megatron core takes `mscale`, which equals it in DeepSeek's models.
    """
    if scaling is None or scaling.type != "yarn" or scaling.mscale_all_dim is None:
        return 1.0
    return _temperature(scaling.factor, scaling.mscale_all_dim) ** 2


def _temperature(factor, mscale):
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
