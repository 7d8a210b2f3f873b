"""Attention of new tokens to a key-value cache, for inference."""

from mindspeed_ms.ops.forms import operator


@operator
def cached_attention(
    query, key, value, key_cache, value_cache, slots, starts, lengths, scale=None, window=None, sinks=None, value_width=None
):
    """Write new keys and values into a cache and attend to all that it holds; not differentiable.

    Row r holds the tokens at positions starts[r] to starts[r] + lengths[r] - 1 of the sequence in cache slot slots[r],
    whose earlier positions are in the cache. Position p lies at place p % capacity, so that a cache of a sliding window needs
    no more than window - 1 + s places. The query at position p sees the keys max(0, p - window + 1) to p.

    Args:
        query (Tensor): [s, b, n, d]; key, value (Tensor): [s, b, groups, d], n a multiple of groups. What follows a row's
            `lengths[r]` tokens is padding: it is not written, its output is finite and means nothing.
            `value` may be None with `value_width`: a value is the beginning of its key (compressed keys and values).
        key_cache, value_cache (Tensor): [slots, groups, capacity, d] in the dtype of `key`, from `core.storage`; changed in
            place. `value_cache` is None where `value` is.
        slots, starts, lengths (ndarray): int32 [b] in host memory; slots differ, except those of empty rows.
        scale: None means 1 / sqrt(d).
        window (int): None: all earlier keys.
        sinks (Tensor): [n] or None, as in `core_attention`.
        value_width (int): number of elements of a key that are its value, where `value` is None.

    Returns:
        Tensor [s, b, n * d] (or n * value_width), dtype of `query`; computed in float32 on CPU.

    Raises:
        ValueError: shapes or dtypes that do not fit; a row that needs more places than there are, or a slot that does not
            exist.
    """
