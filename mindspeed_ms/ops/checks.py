"""Argument checks of operators and values derived from the arguments, for the forms of all devices."""

import math

import numpy as np

ACTIVATION_NAMES = ("gelu_tanh", "gelu_erf", "silu", "relu", "squared_relu", "swiglu", "clamped_swiglu")
"""Activations of `bias_activation`."""
HALVING = ("swiglu", "clamped_swiglu")
"""Those that halve the last dimension."""
INPUT_LAYOUTS = ("BSH", "SBH", "BNSD", "BSND")
SPARSE_MODES = (0, 1, 2, 3, 4)


def check_bias_activation(x, bias, name):
    """Raise ValueError for an unknown activation, a bias that is not [n], or an odd n for "swiglu"."""
    if name not in ACTIVATION_NAMES:
        raise ValueError(f"activation {name!r} is unknown: expected one of {', '.join(ACTIVATION_NAMES)}.")
    if bias is not None and bias.shape != (x.shape[-1],):
        raise ValueError(
            f"bias_activation got an input of shape {x.shape} and a bias of shape {bias.shape}: expected ({x.shape[-1]},)."
        )
    if name in HALVING and x.shape[-1] % 2:
        raise ValueError(f"{name} halves the last dimension, which is {x.shape[-1]}: expected an even size.")


def check_dropout(p, keep_mask, x):
    """Raise ValueError for a probability outside [0, 1), or a mask that is missing or not of the shape of `x`."""
    if not 0 <= p < 1:
        raise ValueError(f"dropout got p={p}: expected 0 <= p < 1.")
    if p > 0 and keep_mask is None:
        raise ValueError(f"dropout got p={p} without a keep mask: draw one from core.rng.")
    if p > 0 and keep_mask.shape != x.shape:
        raise ValueError(
            f"dropout got an input of shape {x.shape} and a mask of shape {keep_mask.shape}: expected equal shapes."
        )


def check_residual(x, residual):
    """Raise ValueError unless the residual has the shape of `x`."""
    if residual.shape != x.shape:
        raise ValueError(
            f"bias_dropout_add got an input of shape {x.shape} and a residual of shape {residual.shape}: expected equal shapes."
        )


def embedding_range(weight, vocab_start, vocab_end, vocab_size):
    """(end of the id range that the rows of `weight` hold, size of the whole vocabulary).

    Raises:
        ValueError: the range is not as long as the weight.
    """
    vocab_end = vocab_start + weight.shape[0] if vocab_end is None else vocab_end
    if vocab_end - vocab_start != weight.shape[0]:
        raise ValueError(
            f"embedding_lookup got a weight of {weight.shape[0]} rows for ids {vocab_start} to {vocab_end}: "
            f"expected {vocab_end - vocab_start} rows."
        )
    return vocab_end, vocab_end if vocab_size is None else vocab_size


def check_vocabulary(logits, vocab_start, vocab_end, label_smoothing=0.0, vocab_size=None):
    """Raise ValueError unless the logits cover the range of ids and label smoothing has the vocabulary's size."""
    if logits.shape[-1] != vocab_end - vocab_start:
        raise ValueError(
            f"cross entropy got logits over {logits.shape[-1]} ids for the range {vocab_start} to {vocab_end}: "
            f"expected {vocab_end - vocab_start}."
        )
    if label_smoothing and not vocab_size:
        raise ValueError(f"cross_entropy_gradient got label_smoothing={label_smoothing} without vocab_size.")


def check_grouped_linear(x, weight, counts):
    """Raise ValueError unless x [rows, in], weight [experts, in, out] and the counts [experts] of the rows fit together."""
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(
            f"grouped_linear got an input of shape {x.shape} ({x.dtype}) and a weight of shape {weight.shape} "
            f"({weight.dtype}): expected [rows, in] and [experts, in, out] of one dtype."
        )
    if len(counts) != weight.shape[0] or sum(counts) != x.shape[0] or any(count < 0 for count in counts):
        raise ValueError(
            f"grouped_linear got {len(counts)} counts with the sum {sum(counts)} for {weight.shape[0]} experts and "
            f"{x.shape[0]} rows: expected a count of rows for each expert."
        )


def check_unpermute(x, order, probs):
    """Raise ValueError unless there is one place, and one probability if any, for each row of x [rows, h]."""
    rows = (x.shape[0],)
    if order.shape != rows or (probs is not None and probs.shape != rows):
        raise ValueError(
            f"unpermute got rows of shape {x.shape}, an order of shape {order.shape} and probabilities of shape "
            f"{None if probs is None else probs.shape}: expected {rows} for both."
        )


def check_top_k(x, k):
    """Raise ValueError unless `k` of the last dimension of `x` can be chosen."""
    if not 1 <= k <= x.shape[-1]:
        raise ValueError(f"top_k got k={k} for {x.shape[-1]} elements: expected 1 to {x.shape[-1]}.")


def check_core_dropout(dropout_p, dropout_mask):
    """Raise ValueError for a dropout probability of attention outside [0, 1), or without a mask."""
    if not 0 <= dropout_p < 1 or (dropout_p > 0 and dropout_mask is None):
        raise ValueError(
            f"core_attention got dropout_p={dropout_p} and dropout_mask "
            f"{'None' if dropout_mask is None else dropout_mask.shape}: expected 0 <= dropout_p < 1, with a mask."
        )


def check_heads(query, key, value, sinks=None):
    """Raise ValueError unless query [sq, b, n, d], key [sk, b, groups, d], value [sk, b, groups, dv] and sinks [n] (or None)
    fit together."""
    if query.ndim != 4 or key.ndim != 4 or tuple(key.shape[:3]) != tuple(value.shape[:-1]):
        raise ValueError(
            f"attention got query {query.shape}, key {key.shape}, value {value.shape}: expected [sq, b, n, d], "
            "[sk, b, groups, d] and [sk, b, groups, dv]."
        )
    if query.shape[1] != key.shape[1] or query.shape[3] != key.shape[3]:
        raise ValueError(f"attention got query {query.shape} and key {key.shape}: batch and head size must be equal.")
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"attention got {query.shape[2]} query heads and {key.shape[2]} key-value groups: the heads must be a "
            "multiple of the groups."
        )
    if sinks is not None and tuple(sinks.shape) != (query.shape[2],):
        raise ValueError(f"attention got sinks {sinks.shape}: expected one for each of {query.shape[2]} query heads.")


def check_partial_attention(query, key, value, first_keys, stop_keys, mask):
    """Raise ValueError unless query [sq, b, n, d], key [sk, b, groups, d], value [sk, b, groups, dv], int32 arrays [b or 1, sq]
    of visible keys and a mask fit together."""
    shapes = query.shape, key.shape, value.shape
    is_fitting = query.ndim == key.ndim == value.ndim == 4 and key.shape[:3] == value.shape[:3]
    if not is_fitting or query.shape[1] != key.shape[1] or query.shape[3] != key.shape[3] or query.shape[2] % key.shape[2]:
        raise ValueError(
            f"attention_with_statistics got query {shapes[0]}, key {shapes[1]}, value {shapes[2]}: expected [sq, b, n, d], "
            "[sk, b, groups, d] and [sk, b, groups, dv] with n a multiple of groups."
        )
    queries, batch = query.shape[:2]
    for name, places in (("first_keys", first_keys), ("stop_keys", stop_keys)):
        if places.shape not in ((1, queries), (batch, queries)) or places.dtype != np.int32:
            raise ValueError(
                f"attention_with_statistics got {name} {places.shape} of {places.dtype}: expected int32 (1 or {batch}, "
                f"{queries})."
            )
    if first_keys.shape != stop_keys.shape or first_keys.min() < 0 or stop_keys.max() > key.shape[0]:
        raise ValueError(
            f"attention_with_statistics got keys {first_keys.shape} from {first_keys.min()} to {stop_keys.shape} "
            f"{stop_keys.max()}: expected equal shapes and places from 0 to {key.shape[0]}."
        )
    check_mask(mask, batch, queries, key.shape[0])


def visible_block(first_keys, stop_keys):
    """Rectangle with everything that is visible: ((first query, stop), (first key, stop)); (None, None): nothing is."""
    sees = stop_keys > first_keys
    if not sees.any():
        return None, None
    queries = np.nonzero(sees.any(axis=0))[0]
    return (int(queries[0]), int(queries[-1]) + 1), (int(first_keys[sees].min()), int(stop_keys[sees].max()))


def check_cache(query, key, key_cache, value_cache, slots, starts, lengths, window, value_width=None):
    """Length of the longest sequence, after a check that caches [slots, groups, capacity, d] can take keys [s, b, groups, d].

    Args:
        query, key, key_cache, value_cache (Tensor or ndarray): only their shapes and dtypes are read.
        slots, starts, lengths, window, value_width: as in `ops.cached_attention`.

    Raises:
        ValueError: they do not fit.
    """
    new, batch, groups, size = key.shape
    count, _, capacity, _ = shape = key_cache.shape
    if shape != value_cache.shape or shape != (count, groups, capacity, size) or query.shape[0] != new:
        raise ValueError(
            f"cached_attention got query {query.shape}, key {key.shape} and caches {shape} and {value_cache.shape}: expected "
            f"[s, b, n, d], [s, b, groups, d] and twice [slots, groups, capacity, d]."
        )
    if value_width is not None and (key_cache is not value_cache or not 0 < value_width <= size):
        raise ValueError(f"cached_attention got value_width {value_width} of keys of {size}: expected no values beside it.")
    if value_width is None and key_cache is value_cache:
        raise ValueError("cached_attention got no values: expected value_width.")
    if not key.dtype == key_cache.dtype == value_cache.dtype:
        raise ValueError(
            f"cached_attention got keys of {key.dtype} and caches of {key_cache.dtype} and {value_cache.dtype}: expected one "
            "dtype."
        )
    if not len(slots) == len(starts) == len(lengths) == batch:
        raise ValueError(
            f"cached_attention got {batch} rows, but {len(slots)} slots, {len(starts)} starts and {len(lengths)} lengths."
        )
    longest = 0
    for slot, start, length in zip(slots.tolist(), starts.tolist(), lengths.tolist()):
        longest = max(longest, start + length)
        places = start + length if window is None else min(start + length, window - 1 + length)
        if not (0 <= slot < count and start >= 0 and 0 <= length <= new and places <= capacity):
            raise ValueError(
                f"cached_attention got {length} of {new} tokens from position {start} on for slot {slot} (window {window}): "
                f"the caches have {count} slots of {capacity} places."
            )
    return longest


def check_mask(mask, batch, queries, keys):
    """Raise ValueError unless mask is None, [b or 1, 1, sq, sk] or [sq, sk]."""
    if mask is None:
        return
    shape = tuple(mask.shape)
    if shape not in ((queries, keys), (1, 1, queries, keys), (batch, 1, queries, keys)):
        raise ValueError(
            f"attention got a mask of shape {shape}: expected ({queries}, {keys}), (1, 1, {queries}, {keys}) or "
            f"({batch}, 1, {queries}, {keys})."
        )


def check_flash_arguments(mask, sparse_mode, input_layout, keep_prob, dropout_seed):
    """Raise ValueError for an unknown layout or mode, a missing mask or a missing seed."""
    if input_layout not in INPUT_LAYOUTS:
        raise ValueError(f"flash_attention got input_layout={input_layout!r}: expected one of {', '.join(INPUT_LAYOUTS)}.")
    if sparse_mode not in SPARSE_MODES:
        raise ValueError(f"flash_attention got sparse_mode={sparse_mode!r}: expected one of {SPARSE_MODES}.")
    if sparse_mode == 1 and mask is None:
        raise ValueError(
            "flash_attention got sparse_mode=1 without a mask: mode 1 applies the whole mask; use mode 0 for none."
        )
    if not 0 < keep_prob <= 1:
        raise ValueError(f"flash_attention got keep_prob={keep_prob}: expected 0 < keep_prob <= 1.")
    if keep_prob < 1 and dropout_seed is None:
        raise ValueError(f"flash_attention got keep_prob={keep_prob} without dropout_seed: draw one from core.rng.")


def default_scale(scale, head_size):
    """Scale of attention scores: 1 / sqrt(head_size) unless given."""
    return 1.0 / math.sqrt(head_size) if scale is None else float(scale)


def visible_band(queries, keys, causal=False, pre_tokens=None, next_tokens=None):
    """Band limits (lower, upper): key j is visible to query i if i + lower <= j <= i + upper."""
    lower = -(queries + keys) if pre_tokens is None else -min(int(pre_tokens), queries + keys)
    upper = queries + keys if next_tokens is None else min(int(next_tokens), queries + keys)
    if causal:
        upper = min(upper, keys - queries)
    return lower, upper


def sparse_band(sparse_mode, has_mask, queries, keys, pre_tokens, next_tokens):
    """Band limits of a sparse mode (`visible_band`), and whether the mask counts in it."""
    if sparse_mode == 0 and has_mask:
        return *visible_band(queries, keys, False, pre_tokens, next_tokens), True
    if sparse_mode in (0, 1):
        return *visible_band(queries, keys), has_mask
    if sparse_mode == 2:
        return *visible_band(queries, keys, False, None, 0), False
    if sparse_mode == 3:
        return *visible_band(queries, keys, True), False
    shift = keys - queries  # the band counts from the lower right corner
    lower, upper = visible_band(queries, keys, False, pre_tokens, next_tokens)
    return lower + shift, upper + shift, False
