"""Operators of upstream's public API (`npu_*`), on the forms of this package, so that they also run on CPU."""

from mindspeed_ms.core.rng import get_rng_tracker
from mindspeed_ms.ops.interface.attention import fusion_attention
from mindspeed_ms.ops.interface.normalization import rms_norm_with_inverse
from mindspeed_ms.ops.interface.rotary import rotary_position_embedding


def npu_rms_norm(x, gamma, epsilon=1e-6):
    """RMSNorm over the last dimension with its statistics.

    Args:
        x (Tensor): [..., hidden]; gamma (Tensor): [hidden].

    Returns:
        y like `x`, and the inverse root mean square, float32 [..., 1].
    """
    return rms_norm_with_inverse(x, gamma, epsilon)


def npu_rotary_position_embedding(x, cos, sin, mode=0):
    """Rotate all of the last dimension of x (BNSD, BSND or SBND) by cos and sin, which broadcast to it.

    Args:
        mode: 0 pairs the halves of the last dimension, 1 pairs neighbours.

    Raises:
        ValueError: another mode, or shapes that do not broadcast.
    """
    if mode not in (0, 1):
        raise ValueError(f"npu_rotary_position_embedding got mode={mode!r}: expected 0 (halves) or 1 (interleaved).")
    fits = all(
        table.ndim == 4
        and table.shape[-1] == x.shape[-1]
        and all(n in (1, m) for n, m in zip(table.shape, x.shape, strict=True))
        for table in (cos, sin)
    )
    if x.ndim != 4 or not fits or x.shape[-1] % 2:
        raise ValueError(
            f"npu_rotary_position_embedding got x {x.shape}, cos {cos.shape}, sin {sin.shape}: expected four "
            "dimensions, an even last one, and tables that broadcast to x."
        )
    return rotary_position_embedding(x, cos, sin, mode)


def npu_fusion_attention(
    query,
    key,
    value,
    head_num,
    input_layout,
    *,
    pse=None,
    padding_mask=None,
    atten_mask=None,
    scale=1.0,
    keep_prob=1.0,
    pre_tokens=2147483647,
    next_tokens=2147483647,
    inner_precise=0,
    prefix=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    sparse_mode=0,
    gen_mask_parallel=True,
    sync=False,
    pse_type=1,
    q_start_idx=None,
    kv_start_idx=None,
):
    """Fused attention in the caller's layout.

    Args:
        query, key, value (Tensor): in `input_layout` "BSH", "SBH", "BNSD" or "BSND" (Ascend also "TND").
        head_num: number of query heads.
        atten_mask (Tensor): bool or uint8, True = blocked.
        pse, padding_mask, prefix, actual_seq_qlen, actual_seq_kvlen: passed to the operator on Ascend, refused on CPU.
        gen_mask_parallel, sync: accepted; they change nothing.

    Returns:
        The output like `query`, and the maximum and the sum of exponentials of each query's softmax, float32 [b, n, sq,
        8].

    Raises:
        ValueError: unknown layout, or an argument that this device does not support.
    """
    if pse_type != 1 or q_start_idx is not None or kv_start_idx is not None:
        raise ValueError(
            f"npu_fusion_attention got pse_type={pse_type}, q_start_idx={q_start_idx}, kv_start_idx={kv_start_idx}: "
            "positions generated inside the operator are not supported; pass pse itself with pse_type=1."
        )
    seed = get_rng_tracker().current.draw_seed() if keep_prob < 1 else None
    arguments = {
        "pse": pse,
        "padding_mask": padding_mask,
        "atten_mask": atten_mask,
        "scale": float(scale),
        "keep_prob": float(keep_prob),
        "pre_tokens": pre_tokens,
        "next_tokens": next_tokens,
        "inner_precise": inner_precise,
        "prefix": prefix,
        "actual_seq_qlen": actual_seq_qlen,
        "actual_seq_kvlen": actual_seq_kvlen,
        "sparse_mode": sparse_mode,
    }
    return fusion_attention(query, key, value, head_num, input_layout, arguments, seed)
