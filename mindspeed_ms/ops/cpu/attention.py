"""Attention, rotary embedding and the layout changes around them."""

import numpy as np

from mindspeed_ms.core import storage
from mindspeed_ms.core.autograd import Function
from mindspeed_ms.ops import attention_checks as checks
from mindspeed_ms.ops.cpu import threads
from mindspeed_ms.ops.cpu.arrays import bits_of, bytes_of, empty, float32_of, new_like, tensor_of, tensor_of_bits
from mindspeed_ms.ops.cpu.blas import sgemm_address
from mindspeed_ms.ops.cpu.kernels import attention as kernels
from mindspeed_ms.ops.cpu.kernels import movement
from mindspeed_ms.ops.cpu.kernels import softmax as softmax_kernels

_NO_MASK = np.zeros((1, 1, 1), np.uint8)
_NO_KEEP = np.zeros((1, 1, 1, 1), np.uint8)


class _Rotary(Function):
    @staticmethod
    def forward(ctx, t, cos, sin, interleaved):
        ctx.angles, ctx.interleaved = (_angles_of(cos), _angles_of(sin)), interleaved
        return _rotate(t, *ctx.angles, interleaved, False)

    @staticmethod
    def backward(ctx, output_grad):
        return _rotate(output_grad, *ctx.angles, ctx.interleaved, True), None, None, None


def _angles_of(table):
    """[s, b or 1, rot] of cos or sin [s, b or 1, 1, rot]."""
    array = float32_of(table)
    return array.reshape(array.shape[0], array.shape[1], array.shape[3])


def _rotate(t, cos, sin, interleaved, backward):
    values = float32_of(t)
    output = empty(values.shape)
    kernel = movement.rotary_interleaved if interleaved else movement.rotary_halves
    threads.run(kernel, values.shape[0] * values.shape[1], values.size, values, cos, sin, backward, output)
    return tensor_of(output, t.dtype)


def apply_rotary(t, cos, sin, interleaved=False, fused=True):
    """See `ops.apply_rotary`."""
    del fused
    if (
        t.ndim != 4
        or cos.ndim != 4
        or cos.shape != sin.shape
        or cos.shape[0] != t.shape[0]
        or cos.shape[2] != 1
        or cos.shape[1] not in (1, t.shape[1])
        or cos.shape[3] > t.shape[3]
        or cos.shape[3] % 2
    ):
        raise ValueError(
            f"apply_rotary got t {t.shape}, cos {cos.shape}, sin {sin.shape}: expected [s, b, n, d] and twice "
            "[s, b or 1, 1, rot] with an even rot of at most d."
        )
    return _Rotary.apply(t, cos, sin, bool(interleaved))


class _SplitQueryKeyValue(Function):
    @staticmethod
    def forward(ctx, mixed, groups, queries_per_group, head_size):
        source = bits_of(mixed)
        s, b = mixed.shape[:2]
        parts = [
            new_like(source, (s * b, groups, queries_per_group * head_size)),
            new_like(source, (s * b, groups, head_size)),
            new_like(source, (s * b, groups, head_size)),
        ]
        threads.run(movement.split_query_key_value, s * b, source.size, source.reshape(s * b, groups, -1), *parts)
        ctx.shape = mixed.shape
        return tuple(tensor_of_bits(part.reshape(s, b, -1, head_size), mixed.dtype) for part in parts)

    @staticmethod
    def backward(ctx, query_grad, key_grad, value_grad):
        query, key, value = bits_of(query_grad), bits_of(key_grad), bits_of(value_grad)
        s, b, groups, size = key.shape
        mixed = new_like(query, ctx.shape)
        threads.run(
            movement.join_query_key_value,
            s * b,
            mixed.size,
            query.reshape(s * b, groups, -1),
            key.reshape(s * b, groups, size),
            value.reshape(s * b, groups, size),
            mixed.reshape(s * b, groups, -1),
        )
        return tensor_of_bits(mixed, query_grad.dtype), None, None, None


def split_query_key_value(mixed, groups, queries_per_group, head_size):
    """See `ops.split_query_key_value`."""
    width = groups * (queries_per_group + 2) * head_size
    if mixed.ndim != 3 or mixed.shape[2] != width:
        raise ValueError(
            f"split_query_key_value got {mixed.shape}: expected [s, b, {width}] for {groups} groups of "
            f"{queries_per_group} queries, a key and a value of size {head_size}."
        )
    return _SplitQueryKeyValue.apply(mixed, groups, queries_per_group, head_size)


class _ScaledMaskedSoftmax(Function):
    @staticmethod
    def forward(ctx, scores, mask, scale, lower, upper):
        values = float32_of(scores)
        heads, queries, keys = scores.shape[1:]
        output = empty(scores.shape)
        threads.run(
            softmax_kernels.softmax_forward,
            values.size // keys,
            2 * values.size,
            values.reshape(-1, keys),
            heads,
            queries,
            _mask_array(mask),
            mask is not None,
            float(scale),
            lower,
            upper,
            output.reshape(-1, keys),
        )
        result = tensor_of(output, scores.dtype)
        ctx.save_for_backward(result)
        ctx.arguments = float(scale), lower, upper
        return result

    @staticmethod
    def backward(ctx, output_grad):
        (probabilities,) = ctx.saved_tensors
        queries, keys = probabilities.shape[-2:]
        result = empty(probabilities.shape)
        threads.run(
            softmax_kernels.softmax_backward,
            result.size // keys,
            2 * result.size,
            float32_of(output_grad).reshape(-1, keys),
            float32_of(probabilities).reshape(-1, keys),
            queries,
            *ctx.arguments,
            result.reshape(-1, keys),
        )
        return tensor_of(result, probabilities.dtype), None, None, None, None


def _mask_array(mask):
    """uint8 [b or 1, sq, sk]."""
    if mask is None:
        return _NO_MASK
    return bytes_of(mask).reshape(-1, *mask.shape[-2:])


def scaled_masked_softmax(scores, mask=None, scale=1.0, causal=False, pre_tokens=None, next_tokens=None):
    """See `ops.scaled_masked_softmax`."""
    batch, _, queries, keys = scores.shape
    checks.check_mask(mask, batch, queries, keys)
    return _ScaledMaskedSoftmax.apply(scores, mask, scale, *checks.visible_band(queries, keys, causal, pre_tokens, next_tokens))


class _Attention(Function):
    """Both kinds of attention: on a CPU walking blocks is faster than a whole matrix of scores, and exact as well.

    `options`: scale, lower, upper, mask array, whether it counts, dropout mode, keep array, seed, keep probability.
    Returns the output and, if asked, the maximum and inverse sum of each query's softmax, float32 [b, n, sq].
    """

    @staticmethod
    def forward(ctx, query, key, value, options, with_statistics):
        q, k, v = float32_of(query), float32_of(key), float32_of(value)
        queries, batch, heads, size = q.shape
        output = empty(q.shape)
        statistics = empty((batch, heads, queries)), empty((batch, heads, queries))
        tasks = batch * heads * -(-queries // kernels.QUERY_BLOCK)
        threads.run(
            kernels.attention_forward, tasks, _attention_work(q, k), sgemm_address(), q, k, v, *options, output, *statistics
        )
        result = tensor_of(output.reshape(queries, batch, heads * size), query.dtype)
        ctx.save_for_backward(query, key, value, result)
        ctx.statistics, ctx.options = statistics, options
        ctx.set_materialize_grads(False)
        return (result, *map(storage.from_array, statistics)) if with_statistics else result

    @staticmethod
    def backward(ctx, output_grad, *_):
        if output_grad is None:
            return None, None, None, None, None
        query, key, value, output = ctx.saved_tensors
        q, k, v = float32_of(query), float32_of(key), float32_of(value)
        grads = empty(q.shape), empty(k.shape), empty(v.shape)
        threads.run(
            kernels.attention_backward,
            k.shape[1] * k.shape[2],
            2 * _attention_work(q, k),
            sgemm_address(),
            float32_of(output_grad).reshape(q.shape),
            q,
            k,
            v,
            float32_of(output).reshape(q.shape),
            *ctx.statistics,
            *ctx.options,
            *grads,
        )
        return (*(tensor_of(grad, query.dtype) for grad in grads), None, None)


def _attention_work(q, k):
    return q.shape[1] * q.shape[2] * q.shape[0] * k.shape[0] * 4


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
):
    """See `ops.core_attention`; the softmax is always float32 here."""
    checks.check_heads(query, key, value)
    queries, batch, heads, size = query.shape
    keys = key.shape[0]
    checks.check_mask(mask, batch, queries, keys)
    if not 0 <= dropout_p < 1 or (dropout_p > 0 and dropout_mask is None):
        raise ValueError(
            f"core_attention got dropout_p={dropout_p} and dropout_mask "
            f"{'None' if dropout_mask is None else dropout_mask.shape}: expected 0 <= dropout_p < 1, with a mask."
        )
    keep, mode = _NO_KEEP, kernels.DROPOUT_NONE
    if dropout_p > 0:
        if dropout_mask.shape != (batch, heads, queries, keys):
            raise ValueError(
                f"core_attention got a dropout mask of shape {dropout_mask.shape}: expected {(batch, heads, queries, keys)}."
            )
        keep, mode = bytes_of(dropout_mask), kernels.DROPOUT_MASK
    lower, upper = checks.visible_band(queries, keys, causal, pre_tokens, next_tokens)
    options = (
        checks.default_scale(scale, size) * float(softmax_scale),
        lower,
        upper,
        _mask_array(mask),
        mask is not None,
        mode,
        keep,
        0,
        1.0 - dropout_p,
    )
    return _Attention.apply(query, key, value, options, False)


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
):
    """See `ops.flash_attention`."""
    checks.check_flash_arguments(mask, sparse_mode, input_layout, keep_prob, dropout_seed)
    options = _flash_options(query, key, value, mask, scale, pre_tokens, next_tokens, sparse_mode, keep_prob, dropout_seed)
    return _Attention.apply(query, key, value, options, False)


def attention_with_statistics(query, key, value, mask, scale, pre_tokens, next_tokens, sparse_mode, keep_prob, dropout_seed):
    """`flash_attention`, and the maximum and the sum of exponentials of each query's softmax, float32 [b, n, sq, 8]."""
    options = _flash_options(query, key, value, mask, scale, pre_tokens, next_tokens, sparse_mode, keep_prob, dropout_seed)
    output, maximum, inverse_sum = _Attention.apply(query, key, value, options, True)
    with np.errstate(divide="ignore"):
        total = 1 / storage.read_array(inverse_sum)
    return output, _eightfold(storage.read_array(maximum)), _eightfold(np.where(np.isfinite(total), total, 0))


def _eightfold(statistic):
    """The fused operator's layout repeats each number eight times."""
    return storage.from_array(np.repeat(statistic[..., None], 8, -1).astype(np.float32))


def _flash_options(query, key, value, mask, scale, pre_tokens, next_tokens, sparse_mode, keep_prob, dropout_seed):
    checks.check_heads(query, key, value)
    queries, batch, _, size = query.shape
    keys = key.shape[0]
    lower, upper, masked = checks.sparse_band(sparse_mode, mask is not None, queries, keys, pre_tokens, next_tokens)
    if masked:
        checks.check_mask(mask, batch, queries, keys)
    mode = kernels.DROPOUT_SEED if keep_prob < 1 else kernels.DROPOUT_NONE
    seed = int(dropout_seed) & 0x7FFFFFFFFFFFFFFF if keep_prob < 1 else 0
    return (
        checks.default_scale(scale, size),
        lower,
        upper,
        _mask_array(mask if masked else None),
        masked,
        mode,
        _NO_KEEP,
        seed,
        float(keep_prob),
    )
