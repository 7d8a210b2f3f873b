"""Ascend forms of attention: the fused operator, and core attention from products and a softmax."""

import functools

import mindspore as ms
from mindspore import mint, ops

from mindspeed_ms.core import autograd
from mindspeed_ms.ops import checks

_LOWEST = -3.0e38
_COMPRESSED_MASK_SIZE = 2048


def _blocked(mask, queries, keys, lower, upper):
    """Mask of hidden keys: bool Tensor broadcastable to [b, n, sq, sk], True = hidden; None if no key is hidden."""
    blocked = None
    if lower > -queries or upper < keys - 1:
        distance = mint.unsqueeze(mint.arange(keys), 0) - mint.unsqueeze(mint.arange(queries), 1)
        blocked = mint.logical_or(distance < lower, distance > upper)
    if mask is None:
        return blocked
    mask = mask.astype(ms.bool_)
    return mask if blocked is None else mint.logical_or(mask, blocked)


def _softmax(scores, blocked):
    if blocked is None:
        return mint.nn.functional.softmax(scores, -1)
    lowest = _LOWEST if scores.dtype != ms.float16 else -60000.0
    probabilities = mint.nn.functional.softmax(mint.where(blocked, mint.full_like(scores, lowest), scores), -1)
    return mint.where(blocked, mint.zeros_like(probabilities), probabilities)


def _softmax_with_sinks(scores, blocked, sinks):
    """`_softmax` of scores [b, n, sq, sk] beside one more score of each head, whose share is left out."""
    batch, heads, queries, keys = scores.shape
    column = mint.broadcast_to(sinks.astype(scores.dtype).reshape(1, heads, 1, 1), (batch, heads, queries, 1))
    if blocked is not None:
        blocked = mint.broadcast_to(blocked, (*blocked.shape[:-2], queries, keys))
        blocked = mint.cat((blocked, mint.zeros((*blocked.shape[:-1], 1), dtype=ms.bool_)), -1)
    return mint.narrow(_softmax(mint.cat((scores, column), -1), blocked), -1, 0, keys)


def scaled_masked_softmax(scores, mask=None, scale=1.0, causal=False, pre_tokens=None, next_tokens=None):
    """See `ops.scaled_masked_softmax`."""
    batch, _, queries, keys = scores.shape
    checks.check_mask(mask, batch, queries, keys)
    blocked = _blocked(mask, queries, keys, *checks.visible_band(queries, keys, causal, pre_tokens, next_tokens))
    return _softmax(scores.astype(ms.float32) * scale, blocked).astype(scores.dtype)


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
    """See `ops.core_attention`."""
    checks.check_heads(query, key, value, sinks)
    queries, batch, heads, size = query.shape
    keys, groups = key.shape[0], key.shape[2]
    checks.check_mask(mask, batch, queries, keys)
    checks.check_core_dropout(dropout_p, dropout_mask)
    # the query heads of a group become rows of one product, so keys and values are not repeated
    q = mint.permute(query, (1, 2, 0, 3)).reshape(batch, groups, -1, size)
    scores = mint.matmul(q, mint.permute(key, (1, 2, 3, 0))) * checks.default_scale(scale, size)
    scores = scores.reshape(batch, heads, queries, keys)
    scores = scores.astype(ms.float32) if softmax_in_fp32 else scores
    blocked = _blocked(mask, queries, keys, *checks.visible_band(queries, keys, causal, pre_tokens, next_tokens))
    scores = scores if softmax_scale == 1.0 else scores * softmax_scale
    probabilities = (_softmax(scores, blocked) if sinks is None else _softmax_with_sinks(scores, blocked, sinks)).astype(
        value.dtype
    )
    if dropout_p > 0:
        probabilities = probabilities * dropout_mask.astype(value.dtype) * (1.0 / (1.0 - dropout_p))
    output = mint.matmul(probabilities.reshape(batch, groups, -1, keys), mint.permute(value, (1, 2, 0, 3)))
    return mint.permute(output.reshape(batch, heads, queries, -1), (2, 0, 1, 3)).reshape(queries, batch, -1)


def _to_layout(t, layout):
    """Convert [s, b, n, d] to the layout of the fused operator."""
    s, b, n, d = t.shape
    if layout == "SBH":
        return t.reshape(s, b, n * d)
    if layout == "BSH":
        return mint.transpose(t, 0, 1).reshape(b, s, n * d)
    return mint.permute(t, (1, 2, 0, 3)) if layout == "BNSD" else mint.transpose(t, 0, 1)


def _from_layout(output, layout):
    """Convert the fused operator's output to [s, b, n * d]."""
    if layout == "SBH":
        return output
    if layout == "BSH":
        return mint.transpose(output, 0, 1)
    output = mint.permute(output, (2, 0, 1, 3) if layout == "BNSD" else (1, 0, 2, 3))
    return output.reshape(*output.shape[:2], -1)


@functools.cache
def _compressed_mask():
    """Lower triangle (1 = hidden) from which the operator builds its masks in sparse modes 2 to 4."""
    with autograd.no_grad():
        return mint.triu(mint.ones((_COMPRESSED_MASK_SIZE, _COMPRESSED_MASK_SIZE), dtype=ms.uint8), diagonal=1)


@autograd.no_grad()
def _keep_mask(shape, keep_prob, seed):
    """Keep mask of dropout, bool [b, n, sq, sk]."""
    generator = ms.Generator()
    generator.manual_seed(int(seed))
    return mint.rand(*shape, generator=generator) < keep_prob


@autograd.no_grad()
def _drop_mask(shape, keep_prob, seed):
    """Keep bits of dropout, [b, n, sq, sk / 8] as uint8."""
    if shape[-1] % 8:
        raise ValueError(f"flash_attention with dropout got {shape[-1]} keys: the operator needs a multiple of 8.")
    keep = _keep_mask(shape, keep_prob, seed).astype(ms.int32)
    weights = ms.Tensor([1, 2, 4, 8, 16, 32, 64, 128], ms.int32)
    return mint.sum(keep.reshape(*shape[:-1], shape[-1] // 8, 8) * weights, dim=-1).astype(ms.uint8)


def flash_attention(
    query,
    key,
    value,
    mask=None,
    scale=None,
    pre_tokens=2147483647,
    next_tokens=2147483647,
    sparse_mode=0,
    input_layout="SBH",
    keep_prob=1.0,
    dropout_seed=None,
    sinks=None,
):
    """See `ops.flash_attention`.

    Raises:
        ValueError: also for float32 inputs, which the operator does not take.
    """
    checks.check_heads(query, key, value, sinks)
    checks.check_flash_arguments(mask, sparse_mode, input_layout, keep_prob, dropout_seed)
    if sinks is not None:
        band = checks.sparse_band(sparse_mode, mask is not None, query.shape[0], key.shape[0], pre_tokens, next_tokens)
        return _plain_with_sinks(query, key, value, mask, scale, *band, keep_prob, dropout_seed, sinks)
    if query.dtype not in (ms.float16, ms.bfloat16):
        raise ValueError(
            f"flash_attention got {query.dtype}: flash_attention_score works on float16 and bfloat16 only. Set "
            "compute_dtype to one of them, or use_flash_attention to False."
        )
    scale, value_size = checks.default_scale(scale, query.shape[3]), value.shape[3]
    width = max(query.shape[3], value_size)
    query, key, value = (_widened(t, width) for t in (query, key, value))
    queries, batch, heads, size = query.shape
    keys = key.shape[0]
    if size % 16 or size > 512:
        raise ValueError(
            f"flash_attention got a head size of {size}: flash_attention_score needs a multiple of 16 up to "
            "512. Change kv_channels, or set use_flash_attention to False."
        )
    if sparse_mode >= 2:
        mask = _compressed_mask()
    elif mask is not None:
        checks.check_mask(mask, batch, queries, keys)
        if sparse_mode == 0 and pre_tokens < keys:  # the operator only leaves out whole blocks outside of the band
            mask = _blocked(mask, queries, keys, *checks.visible_band(queries, keys, False, pre_tokens, None))
        mask = mask.reshape(queries, keys) if mask.size == queries * keys else mask
    drop_mask = _drop_mask((batch, heads, queries, keys), keep_prob, dropout_seed) if keep_prob < 1 else None
    output = ops.flash_attention_score(
        _to_layout(query, input_layout),
        _to_layout(key, input_layout),
        _to_layout(value, input_layout),
        heads,
        drop_mask=drop_mask,
        attn_mask=mask,
        keep_prob=float(keep_prob),
        scalar_value=scale,
        pre_tokens=int(pre_tokens),
        next_tokens=int(next_tokens),
        input_layout=input_layout,
        sparse_mode=sparse_mode,
    )
    output = _from_layout(output, input_layout)
    if value_size == size:
        return output
    return mint.narrow(output.reshape(queries, batch, heads, size), -1, 0, value_size).reshape(queries, batch, -1)


def _plain_with_sinks(query, key, value, mask, scale, lower, upper, masked, keep_prob, dropout_seed, sinks):
    """`flash_attention` with sinks, which flash_attention_score does not have, as plain attention."""
    keep = None
    if keep_prob < 1:
        keep = _keep_mask((query.shape[1], query.shape[2], query.shape[0], key.shape[0]), keep_prob, dropout_seed)
    return core_attention(
        query,
        key,
        value,
        mask if masked else None,
        scale=scale,
        dropout_p=1.0 - keep_prob,
        dropout_mask=keep,
        pre_tokens=-lower,
        next_tokens=upper,
        sinks=sinks,
    )


def _widened(t, width):
    """[s, b, n, d] with zeros up to the width: neither scores nor the first elements of the output change."""
    if t.shape[-1] == width:
        return t
    return mint.cat((t, mint.zeros((*t.shape[:-1], width - t.shape[-1]), dtype=t.dtype)), -1)


def fusion_attention(query, key, value, head_num, input_layout, arguments, dropout_seed):
    """Fused attention in the caller's layout with its softmax statistics. See `ops.npu_fusion_attention`."""
    shape = query.shape
    places = {"BSH": (0, 1), "SBH": (1, 0), "BNSD": (0, 2), "BSND": (0, 1)}
    drop_mask = None
    if arguments["keep_prob"] < 1:
        if input_layout not in places:
            raise ValueError(
                f"npu_fusion_attention got keep_prob={arguments['keep_prob']} with input_layout={input_layout!r}: "
                f"dropout is supported for {', '.join(places)}."
            )
        batch, sequence = places[input_layout]
        bits = (shape[batch], head_num, shape[sequence], key.shape[sequence])
        drop_mask = _drop_mask(bits, arguments["keep_prob"], dropout_seed)
    operator = ops.operations.nn_ops.FlashAttentionScore(
        head_num=head_num,
        keep_prob=arguments["keep_prob"],
        scale_value=arguments["scale"],
        pre_tokens=arguments["pre_tokens"],
        next_tokens=arguments["next_tokens"],
        inner_precise=arguments["inner_precise"],
        input_layout=input_layout,
        sparse_mode=arguments["sparse_mode"],
    )
    maximum, total, _, output = operator(
        query,
        key,
        value,
        arguments["pse"],
        drop_mask,
        arguments["padding_mask"],
        arguments["atten_mask"],
        arguments["prefix"],
        arguments["actual_seq_qlen"],
        arguments["actual_seq_kvlen"],
    )
    return output, maximum, total
