"""Ascend forms of attention to a part of the keys: the fused operator in half precisions, products in float32."""

import mindspore as ms
from mindspore import Tensor, mint, ops

from mindspeed_ms.core import autograd
from mindspeed_ms.ops import checks

_LOWEST = -3.0e38
_HIDDEN_SCORE = -1.0e38  # a finite score whose exponential is 0 beside any real one
_HALVES = (ms.float16, ms.bfloat16)


def _turned(t):
    """[s, b, n, d] to [b, n, s, d], and back from [b, n, s, d] to [s, b, n, d] by `_turned_back`."""
    return mint.permute(t, (1, 2, 0, 3))


def _turned_back(t):
    return mint.permute(t, (2, 0, 1, 3))


class _Block:
    """Rectangle of queries and keys outside of which nothing is visible, and what is hidden inside (bool, or None)."""

    def __init__(self, query, key, value, first_keys, stop_keys, mask):
        checks.check_partial_attention(query, key, value, first_keys, stop_keys, mask)
        self.shape = query.shape
        queries, keys = checks.visible_block(first_keys, stop_keys)
        self.is_empty = queries is None
        if self.is_empty:
            return
        self.queries, self.keys = queries, keys
        count, width = queries[1] - queries[0], keys[1] - keys[0]
        firsts, stops = (part[:, queries[0] : queries[1]] - keys[0] for part in (first_keys, stop_keys))
        self.hidden = None
        if (firsts > 0).any() or (stops < width).any():
            columns = mint.arange(width).reshape((1, 1, 1, width))
            limits = [Tensor(part, ms.int64).reshape((len(part), 1, count, 1)) for part in (firsts, stops)]
            self.hidden = mint.logical_or(columns < limits[0], columns >= limits[1])
        if mask is not None:
            mask = mask.reshape((-1, 1, *mask.shape[-2:])).astype(ms.bool_)
            mask = mint.narrow(mint.narrow(mask, 2, queries[0], count), 3, keys[0], width)
            self.hidden = mask if self.hidden is None else mint.logical_or(self.hidden, mask)

    def of_queries(self, t, axis=0):
        """Part of a tensor that belongs to the block's queries."""
        return mint.narrow(t, axis, self.queries[0], self.queries[1] - self.queries[0])

    def of_keys(self, t):
        """Part of a tensor [sk, ...] that belongs to the block's keys."""
        return mint.narrow(t, 0, self.keys[0], self.keys[1] - self.keys[0])


def _grown(part, span, length, axis=0, fill=0.0):
    """`part` of a tensor whose other rows, outside `span` of `length`, hold one number."""
    pieces = []
    for count in (span[0], length - span[1]):
        shape = list(part.shape)
        shape[axis] = count
        pieces.append(mint.full_like(mint.zeros(tuple(shape), dtype=part.dtype), fill))
    return mint.cat((pieces[0], part, pieces[1]), axis)


def _fused_options(heads, scale):
    return {"head_num": heads, "keep_prob": 1.0, "scale_value": scale, "input_layout": "BNSD"}


def _mask_of(block, batch, heads):
    if block.hidden is None:
        return None
    count, width = block.queries[1] - block.queries[0], block.keys[1] - block.keys[0]
    return mint.broadcast_to(block.hidden, (batch, 1, count, width)).astype(ms.uint8)


def _is_fused(query, value):
    return query.dtype in _HALVES and value.shape[3] == query.shape[3] and not query.shape[3] % 16 and query.shape[3] <= 512


def _repeated(t, heads):
    """Keys or values [b, groups, s, d], repeated for `heads` query heads, float32."""
    batch, groups, length, size = t.shape
    t = mint.broadcast_to(
        t.astype(ms.float32).reshape((batch, groups, 1, length, size)), (batch, groups, heads // groups, length, size)
    )
    return t.reshape((batch, heads, length, size))


def _scores(query, key, scale, hidden):
    scores = mint.matmul(query.astype(ms.float32), mint.permute(_repeated(key, query.shape[1]), (0, 1, 3, 2))) * scale
    return scores if hidden is None else mint.where(hidden, mint.full_like(scores, _HIDDEN_SCORE), scores)


def _of_block(block, query, key, value, scale):
    """(output, maximum, total) of the block's queries; [b, n, s, dv] and [b, n, s, 1]."""
    heads = query.shape[1]
    if _is_fused(query, value):
        operator = ops.operations.nn_ops.FlashAttentionScore(**_fused_options(heads, scale))
        mask = _mask_of(block, query.shape[0], heads)
        maximum, total, _, output = operator(query, key, value, None, None, None, mask)
        output, maximum, total = output.astype(ms.float32), mint.narrow(maximum, 3, 0, 1), mint.narrow(total, 3, 0, 1)
    else:
        scores = _scores(query, key, scale, block.hidden)
        maximum = mint.max(scores, -1, True)[0]
        exponentials = mint.exp(scores - maximum)
        total = mint.sum(exponentials, dim=-1, keepdim=True)
        output = mint.matmul(exponentials / total, _repeated(value, heads))
    if block.hidden is None:
        return output, maximum, total
    sees_nothing = mint.sum(mint.logical_not(block.hidden).astype(ms.int32), dim=-1, keepdim=True) == 0
    sees_nothing = mint.broadcast_to(sees_nothing, maximum.shape)
    return (
        mint.where(sees_nothing, mint.zeros_like(output), output),
        mint.where(sees_nothing, mint.full_like(maximum, _LOWEST), maximum),
        mint.where(sees_nothing, mint.zeros_like(total), total),
    )


def _merged(before, part):
    """Merge (output, maximum, total) of two sets of keys; [b, n, s, dv] and [b, n, s, 1]."""
    largest = mint.maximum(before[1], part[1])
    old, new = before[2] * mint.exp(before[1] - largest), part[2] * mint.exp(part[1] - largest)
    total = old + new
    divisor = mint.where(total == 0, mint.full_like(total, 1.0), total)
    return before[0] * (old / divisor) + part[0] * (new / divisor), largest, total


@autograd.no_grad()
def attention_with_statistics(query, key, value, first_keys, stop_keys, mask=None, scale=None, before=None):
    """See `ops.attention_with_statistics`."""
    block = _Block(query, key, value, first_keys, stop_keys, mask)
    queries, batch, heads, size = query.shape
    if block.is_empty:
        if before is not None:
            return before
        statistic = mint.zeros((batch, heads, queries), dtype=ms.float32)
        output = mint.zeros((queries, batch, heads, value.shape[3]), dtype=ms.float32)
        return output, mint.full_like(statistic, _LOWEST), statistic
    parts = (_turned(t) for t in (block.of_queries(query), block.of_keys(key), block.of_keys(value)))
    output, maximum, total = _of_block(block, *parts, checks.default_scale(scale, size))
    span = block.queries
    output = _grown(output, span, queries, 2)
    maximum = _grown(maximum, span, queries, 2, _LOWEST)
    total = _grown(total, span, queries, 2)
    if before is not None:
        output, maximum, total = _merged(
            (_turned(before[0]), mint.unsqueeze(before[1], 3), mint.unsqueeze(before[2], 3)), (output, maximum, total)
        )
    return _turned_back(output), maximum.reshape(maximum.shape[:3]), total.reshape(total.shape[:3])


def _gradients_of_block(block, output_grad, query, key, value, output, maximum, total, scale):
    """Gradients of the block's queries, keys and values, [b, n, s, d]."""
    batch, heads, count, _ = query.shape
    empty = total == 0
    maximum = mint.where(empty, mint.zeros_like(maximum), maximum)
    total = mint.where(empty, mint.full_like(total, 1.0), total)
    if _is_fused(query, value):
        operator = ops.auto_generate.FlashAttentionScoreGrad(**_fused_options(heads, scale))
        statistics = (mint.broadcast_to(t, (batch, heads, count, 8)) for t in (maximum, total))
        dtype = query.dtype
        mask = _mask_of(block, batch, heads)
        grads = operator(
            query, key, value, output_grad.astype(dtype), None, None, None, mask, *statistics, None, output.astype(dtype)
        )
        return tuple(grad.astype(ms.float32) for grad in grads[:3])
    probabilities = mint.exp(_scores(query, key, scale, block.hidden) - maximum) / total
    groups, per_group = key.shape[1], heads // key.shape[1]
    output_grad = output_grad.astype(ms.float32)
    mean = mint.sum(output_grad * output, dim=-1, keepdim=True)
    grads = mint.matmul(output_grad, mint.permute(_repeated(value, heads), (0, 1, 3, 2)))
    grads = probabilities * (grads - mean) * scale
    query_grad = mint.matmul(grads, _repeated(key, heads))
    key_grad = mint.matmul(mint.permute(grads, (0, 1, 3, 2)), query.astype(ms.float32))
    value_grad = mint.matmul(mint.permute(probabilities, (0, 1, 3, 2)), output_grad)

    def over_groups(t):
        return mint.sum(t.reshape((batch, groups, per_group, *t.shape[2:])), dim=2)

    return query_grad, over_groups(key_grad), over_groups(value_grad)


@autograd.no_grad()
def attention_with_statistics_gradient(
    output_grad, query, key, value, output, maximum, total, first_keys, stop_keys, mask=None, scale=None, before=None
):
    """See `ops.attention_with_statistics_gradient`."""
    block = _Block(query, key, value, first_keys, stop_keys, mask)
    if block.is_empty:
        return before or tuple(mint.zeros(t.shape, dtype=ms.float32) for t in (query, key, value))
    grads = _gradients_of_block(
        block,
        *(
            _turned(t)
            for t in (block.of_queries(output_grad), block.of_queries(query), block.of_keys(key), block.of_keys(value))
        ),
        _turned(block.of_queries(output)),
        *(mint.unsqueeze(block.of_queries(t, 2), 3) for t in (maximum, total)),
        checks.default_scale(scale, query.shape[3]),
    )
    spans = (block.queries, block.keys, block.keys)
    grads = tuple(_grown(_turned_back(g), span, t.shape[0]) for g, span, t in zip(grads, spans, (query, key, value)))
    return grads if before is None else tuple(old + new for old, new in zip(before, grads))
