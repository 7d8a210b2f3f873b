"""Attention masks: every accepted form expanded to `[b or 1, 1, sq, sk]`, once per forward.

A mask says 1 (or True) where a query may not look at a key. Without a mask the mask type decides: `causal` and
`padding_causal` look back only, `padding` and `no_mask` look everywhere. A mask given with `causal` replaces the
triangle, one given with `padding_causal` is added to it (Megatron's rules).
"""

from mindspore import dtype, mint

from mindspeed_ms.legacy.model.enums import AttnMaskType

_READY = (dtype.bool_, dtype.uint8)


def is_causal(mask_type, mask):
    """Whether the lower triangle applies, given the mask type and the mask (or None)."""
    if mask_type == AttnMaskType.padding_causal:
        return True
    return mask_type == AttnMaskType.causal and mask is None


def expand_attention_mask(mask, batch, query_length, key_length, mask_type):
    """Expand `mask` to contiguous bool or uint8 `[b or 1, 1, sq, sk]`; None stays None.

    Args:
        mask (Optional[Tensor]): `[sq, sk]`, `[b, sk]` (blocked keys; read so only for the padding types), `[b or 1, sq,
            sk]` or `[b or 1, 1, sq or 1, sk]`; bool, integers or floats, anything but 0 blocks.
        batch, query_length, key_length (int): b, sq, sk.
        mask_type (AttnMaskType): meaning of a two-dimensional mask.

    Raises:
        ValueError: another shape.
    """
    if mask is None:
        return None
    shape = tuple(mask.shape)
    is_whole = len(shape) == 4 and shape[0] in (1, batch) and shape[1:] == (1, query_length, key_length)
    if is_whole and mask.dtype in _READY:
        return mask
    four = _four_dimensional(shape, batch, query_length, key_length, mask_type)
    if four is None:
        raise ValueError(
            f"attention_mask of shape {shape} does not fit batch {batch}, {query_length} queries and {key_length} "
            "keys: expected [sq, sk], [b, sq, sk], [b, 1, sq, sk] or, for the padding mask types, [b, sk]."
        )
    if mask.dtype not in _READY:
        mask = mask != 0
    mask = mask.reshape(four)
    if four[2] != query_length:
        mask = mint.broadcast_to(mask, (four[0], 1, query_length, key_length))
    return mask.contiguous()


def _four_dimensional(shape, batch, query_length, key_length, mask_type):
    """`shape` with the missing axes of size 1, or None when it does not fit."""
    is_padding = mask_type in (AttnMaskType.padding, AttnMaskType.padding_causal)
    if len(shape) == 2:
        blocks_keys = is_padding and shape == (batch, key_length)
        shape = (batch, 1, 1, key_length) if blocks_keys else (1, 1, *shape)
    elif len(shape) == 3:
        shape = (shape[0], 1, *shape[1:])
    if len(shape) != 4 or shape[0] not in (1, batch) or shape[1] != 1:
        return None
    if shape[2] not in (1, query_length) or shape[3] != key_length:
        return None
    return shape
