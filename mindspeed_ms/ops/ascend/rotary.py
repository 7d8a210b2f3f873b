"""Ascend forms of rotary position embedding and of the split of the fused qkv linear's output."""

from mindspore import mint, ops


def _turned(x, interleaved):
    """Pairs (-x2, x1) of pairs (x1, x2)."""
    if interleaved:
        pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
        return mint.cat([-pairs[..., 1:], pairs[..., :1]], dim=-1).reshape(x.shape)
    half = x.shape[-1] // 2
    # mint.split's backward gives wrong numbers where a part goes into a join as it is
    first, second = mint.narrow(x, -1, 0, half), mint.narrow(x, -1, half, half)
    return mint.cat([-second, first], dim=-1)


def apply_rotary(t, cos, sin, interleaved=False, fused=True):
    """See `ops.apply_rotary`; cos and sin are cast to the dtype of `t`, as the fused operator requires."""
    rot = cos.shape[-1]
    cos, sin = cos.astype(t.dtype), sin.astype(t.dtype)
    if rot < t.shape[-1]:
        rotated, rest = mint.narrow(t, -1, 0, rot), mint.narrow(t, -1, rot, t.shape[-1] - rot)
        return mint.cat([apply_rotary(rotated, cos, sin, interleaved, fused), rest], dim=-1)
    # the fused operator interleaves only angles shared by the batch
    if not fused or (interleaved and cos.shape[1] > 1):
        return t * cos + _turned(t, interleaved) * sin
    return rotary_position_embedding(t, cos, sin, int(interleaved))


def rotary_position_embedding(x, cos, sin, mode):
    """Fused rotary position embedding in any of the operator's layouts."""
    return ops.rotary_position_embedding(x, cos, sin, mode)


def split_query_key_value(mixed, groups, queries_per_group, head_size, rotary=None, fused=True):
    """See `ops.split_query_key_value`."""
    s, b = mixed.shape[:2]
    sizes = [queries_per_group * head_size, head_size, head_size]
    parts = mint.split(mixed.reshape(s, b, groups, sum(sizes)), sizes, dim=-1)
    query, key, value = (part.reshape(s, b, -1, head_size).contiguous() for part in parts)
    if rotary is not None:
        query, key = (apply_rotary(part, *rotary, fused) for part in (query, key))
    return query, key, value
