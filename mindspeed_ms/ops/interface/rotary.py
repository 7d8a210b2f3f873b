"""Rotary position embedding, and the split of the fused qkv linear's output."""

from mindspeed_ms.ops.forms import operator


@operator
def apply_rotary(t, cos, sin, interleaved=False, fused=True):
    """Rotate pairs of the first `rot` elements of each head by its position's angle; differentiable in `t`.

    Args:
        t (Tensor): [s, b, n, d].
        cos (Tensor), sin (Tensor): float32 [s, 1, 1, rot] or [s, b, 1, rot], rot <= d even; elements past rot
            pass through.
        interleaved: pairs are (0, 1), (2, 3), ... instead of (0, rot/2), (1, rot/2 + 1), ...
        fused: on Ascend, the one operator instead of products and a sum; on CPU there is one kernel for both.

    Returns:
        Tensor like `t`; computed in float32.
    """


@operator
def split_query_key_value(mixed, groups, queries_per_group, head_size, rotary=None, fused=True):
    """Split the output of the fused qkv linear, laid out per group as [q ... q, k, v]; differentiable.

    Args:
        mixed (Tensor): [s, b, groups * (queries_per_group + 2) * head_size].
        rotary (Optional[tuple]): (cos, sin, interleaved) of `apply_rotary`, which query and key then pass through.
        fused: as of `apply_rotary`.

    Returns:
        query [s, b, groups * queries_per_group, head_size], key and value [s, b, groups, head_size], each contiguous.
    """


@operator
def rotary_position_embedding(x, cos, sin, mode):
    """Rotate the whole last dimension of a four-dimensional tensor; see `npu_rotary_position_embedding`."""
