"""Attention: fused (flash), unfused (core), and its masked softmax."""

from mindspeed_ms.ops.forms import operator

UNLIMITED_TOKENS = 2147483647
"""`pre_tokens` / `next_tokens` that limit nothing."""


@operator
def scaled_masked_softmax(scores, mask=None, scale=1.0, causal=False, pre_tokens=None, next_tokens=None):
    """Softmax over the last dimension of `scores * scale` with masked positions at probability 0; differentiable.

    Args:
        scores (Tensor): [b, n, sq, sk].
        mask (Tensor): bool or uint8 [b, 1, sq, sk], [1, 1, sq, sk] or [sq, sk], True = blocked; or None.
        causal: key j is visible to query i only if j - (sk - sq) <= i.
        pre_tokens, next_tokens: key j is visible to query i only if i - pre_tokens <= j <= i + next_tokens (None: no
            limit).

    Returns:
        Tensor like `scores`, computed in float32. A row with no visible key is all zero.
    """


@operator
def core_attention(
    query,
    key,
    value,
    mask=None,
    scale=None,
    causal=False,
    dropout_p=0.0,
    dropout_mask=None,
    softmax_in_fp32=True,
    softmax_scale=1.0,
    pre_tokens=None,
    next_tokens=None,
    sinks=None,
):
    """Plain attention; differentiable in query, key, value and sinks.

    scores = query . key * scale; probabilities = softmax(scores * softmax_scale) with masks;
    output = dropout(probabilities) . value. On Ascend the [b, n, sq, sk] matrices are in memory; the CPU form computes
    the same block by block.

    Args:
        query (Tensor): [sq, b, n, d]; key (Tensor): [sk, b, groups, d]; value (Tensor): [sk, b, groups, dv]; n is a
            multiple of groups, query head h uses group h // (n / groups).
        mask, causal, pre_tokens, next_tokens: as in `scaled_masked_softmax`.
        scale: None means 1 / sqrt(d).
        dropout_p: probability of dropping; needs `dropout_mask`.
        dropout_mask (Tensor): bool or uint8 [b, n, sq, sk], True = keep, from `core.rng`.
        softmax_in_fp32: half-precision inputs: take the softmax of float32 scores (CPU always does).
        softmax_scale: the layer number under query-key layer scaling, which keeps half-precision scores in range.
        sinks (Tensor): [n], one more score of each head, without scale, that takes part in its softmaxes and has no value;
            or None.

    Returns:
        Tensor [sq, b, n * dv], dtype of `query`.

    Raises:
        ValueError: shapes that do not fit, or `dropout_p` > 0 without a mask.
    """


@operator
def flash_attention(
    query,
    key,
    value,
    mask=None,
    scale=None,
    pre_tokens=UNLIMITED_TOKENS,
    next_tokens=UNLIMITED_TOKENS,
    sparse_mode=0,
    input_layout="SBH",
    keep_prob=1.0,
    dropout_seed=None,
    sinks=None,
):
    """Attention that never holds an [sq, sk] matrix per head; differentiable in query, key, value and sinks.

    CPU: blocks with an online softmax, recomputed in the backward. Ascend: `flash_attention_score` (half precisions), of
    keys and values of one width (the narrower one is padded); with sinks plain attention.

    Args:
        query, key, value, sinks (Tensor): as in `core_attention`, whatever `input_layout` says.
        mask (Tensor): bool or uint8, True = blocked: [b, 1, sq, sk], [1, 1, sq, sk] or [sq, sk] in sparse modes 0 and
            1; ignored in modes 2 to 4, where the mode itself is the mask.
        scale: None means 1 / sqrt(d).
        pre_tokens, next_tokens: key j is visible to query i only if i - pre_tokens <= j <= i + next_tokens, in sparse
            mode 0 with a mask, and in mode 4 with i counted from the lower right corner (i + sk - sq).
        sparse_mode: 0 mask and band, 1 mask only, 2 causal from the upper left, 3 causal from the lower right, 4 band.
        input_layout: layout in which the Ascend operator is called: "SBH", "BNSD", "BSH" or "BSND".
        keep_prob: 1 - dropout probability; below 1 needs `dropout_seed`.
        dropout_seed (int): seed of this call's dropout pattern, drawn from `core.rng`.

    Returns:
        Tensor [sq, b, n * dv], dtype of `query`.

    Raises:
        ValueError: unknown layout or sparse mode, shapes that do not fit, mode 1 without a mask, dropout without a
            seed.
    """


@operator
def fusion_attention(query, key, value, head_num, input_layout, arguments, dropout_seed):
    """Fused attention in the caller's layout, with its softmax statistics; see `npu_fusion_attention`.

    Args:
        arguments (dict): further arguments of `npu_fusion_attention` by name.
        dropout_seed (int): None without dropout.
    """
