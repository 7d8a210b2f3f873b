"""What attention checks and derives from its arguments, the same on every device."""

import math

INPUT_LAYOUTS = ("BSH", "SBH", "BNSD", "BSND")
SPARSE_MODES = (0, 1, 2, 3, 4)


def check_heads(query, key, value):
    """Raise ValueError unless query [sq, b, n, d] and key, value [sk, b, groups, d] fit together."""
    if query.ndim != 4 or key.ndim != 4 or key.shape != value.shape:
        raise ValueError(
            f"attention got query {query.shape}, key {key.shape}, value {value.shape}: expected [sq, b, n, d] and "
            "twice [sk, b, groups, d]."
        )
    if query.shape[1] != key.shape[1] or query.shape[3] != key.shape[3]:
        raise ValueError(f"attention got query {query.shape} and key {key.shape}: batch and head size must be equal.")
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"attention got {query.shape[2]} query heads and {key.shape[2]} key-value groups: the heads must be a "
            "multiple of the groups."
        )


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
    """1 / sqrt(head_size) unless a scale is given."""
    return 1.0 / math.sqrt(head_size) if scale is None else float(scale)


def visible_band(queries, keys, causal=False, pre_tokens=None, next_tokens=None):
    """`lower`, `upper`: key j is visible to query i if i + lower <= j <= i + upper."""
    lower = -(queries + keys) if pre_tokens is None else -min(int(pre_tokens), queries + keys)
    upper = queries + keys if next_tokens is None else min(int(next_tokens), queries + keys)
    if causal:
        upper = min(upper, keys - queries)
    return lower, upper


def sparse_band(sparse_mode, has_mask, queries, keys, pre_tokens, next_tokens):
    """`visible_band` of a sparse mode, and whether the mask counts in it."""
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
