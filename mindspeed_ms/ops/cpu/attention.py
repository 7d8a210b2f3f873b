"""CPU forms of attention: one kernel for core and flash attention, and the masked softmax."""

import numpy as np

from mindspeed_ms.core import storage
from mindspeed_ms.core.autograd import Function
from mindspeed_ms.ops import checks
from mindspeed_ms.ops.cpu import threads
from mindspeed_ms.ops.cpu.arrays import bytes_of, empty, float32_of, tensor_of
from mindspeed_ms.ops.cpu.blas import sgemm_address
from mindspeed_ms.ops.cpu.kernels import attention as kernels
from mindspeed_ms.ops.cpu.kernels import softmax as softmax_kernels

_NO_MASK = np.zeros((1, 1, 1), np.uint8)
_NO_KEEP = np.zeros((1, 1, 1, 1), np.uint8)
_NO_SINKS = np.zeros(1, np.float32)
_ASCEND_ONLY = ("pse", "padding_mask", "prefix", "actual_seq_qlen", "actual_seq_kvlen")


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
    """Mask as a uint8 array [b or 1, sq, sk]."""
    if mask is None:
        return _NO_MASK
    return bytes_of(mask).reshape(-1, *mask.shape[-2:])


def scaled_masked_softmax(scores, mask=None, scale=1.0, causal=False, pre_tokens=None, next_tokens=None):
    """See `ops.scaled_masked_softmax`."""
    batch, _, queries, keys = scores.shape
    checks.check_mask(mask, batch, queries, keys)
    return _ScaledMaskedSoftmax.apply(scores, mask, scale, *checks.visible_band(queries, keys, causal, pre_tokens, next_tokens))


class _Attention(Function):
    """Autograd Function of core and flash attention: walking blocks is faster on a CPU than a whole score matrix, and exact.

    `sinks`: Tensor [n] or None.

    `options`: scale, lower, upper, mask array, whether it counts, dropout mode, keep array, seed, keep probability.
    Returns the output and, if asked, the maximum and inverse sum of each query's softmax, float32 [b, n, sq].
    """

    @staticmethod
    def forward(ctx, query, key, value, sinks, options, with_statistics):
        q, k, v = float32_of(query), float32_of(key), float32_of(value)
        queries, batch, heads, _ = q.shape
        size = v.shape[3]
        output = empty((queries, batch, heads, size))
        statistics = empty((batch, heads, queries)), empty((batch, heads, queries))
        tasks = batch * heads * -(-queries // kernels.QUERY_BLOCK)
        threads.run(
            kernels.attention_forward,
            tasks,
            _attention_work(q, k),
            sgemm_address(),
            q,
            k,
            v,
            *options,
            sinks is not None,
            _NO_SINKS if sinks is None else float32_of(sinks),
            output,
            *statistics,
        )
        result = tensor_of(output.reshape(queries, batch, heads * size), query.dtype)
        ctx.save_for_backward(query, key, value, result)
        ctx.statistics, ctx.options = statistics, options
        # a parameter may be released before the backward: its few values are kept
        ctx.sinks = None if sinks is None else (float32_of(sinks).copy(), sinks.dtype)
        ctx.set_materialize_grads(False)
        return (result, *map(storage.from_array, statistics)) if with_statistics else result

    @staticmethod
    def backward(ctx, output_grad, *_):
        if output_grad is None:
            return (None,) * 6
        query, key, value, output = ctx.saved_tensors
        q, k, v = float32_of(query), float32_of(key), float32_of(value)
        grads = empty(q.shape), empty(k.shape), empty(v.shape)
        shape = (*q.shape[:3], v.shape[3])
        o, g = float32_of(output).reshape(shape), float32_of(output_grad).reshape(shape)
        threads.run(
            kernels.attention_backward,
            k.shape[1] * k.shape[2],
            2 * _attention_work(q, k),
            sgemm_address(),
            g,
            q,
            k,
            v,
            o,
            *ctx.statistics,
            *ctx.options,
            *grads,
        )
        sink_grad = None
        if ctx.sinks is not None:
            sink_grad = tensor_of(_sink_grad(ctx.sinks[0], o, g, *ctx.statistics), ctx.sinks[1])
        return (*(tensor_of(grad, query.dtype) for grad in grads), sink_grad, None, None)


def _sink_grad(sinks, output, output_grad, maximum, inverse_sum):
    """Gradient of the sinks [n]: what a sink takes of a query's softmax, which its value of zero makes a loss of."""
    share = np.exp(sinks[:, None] - maximum) * inverse_sum  # [b, n, sq]
    mean = np.einsum("sbnd,sbnd->bns", output, output_grad)
    return -(share * mean).sum(axis=(0, 2), dtype=np.float64).astype(np.float32)


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
    sinks=None,
):
    """See `ops.core_attention`; the softmax is always float32 here."""
    checks.check_heads(query, key, value, sinks)
    queries, batch, heads, size = query.shape
    keys = key.shape[0]
    checks.check_mask(mask, batch, queries, keys)
    checks.check_core_dropout(dropout_p, dropout_mask)
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
    return _Attention.apply(query, key, value, sinks, options, False)


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
    """See `ops.flash_attention`."""
    checks.check_flash_arguments(mask, sparse_mode, input_layout, keep_prob, dropout_seed)
    checks.check_heads(query, key, value, sinks)
    options = _flash_options(query, key, mask, scale, pre_tokens, next_tokens, sparse_mode, keep_prob, dropout_seed)
    return _Attention.apply(query, key, value, sinks, options, False)


def _attention_with_statistics(query, key, value, mask, scale, pre_tokens, next_tokens, sparse_mode, keep_prob, dropout_seed):
    """`flash_attention` with the maximum and the sum of exponentials of each query's softmax, float32 [b, n, sq, 8]."""
    checks.check_heads(query, key, value)
    options = _flash_options(query, key, mask, scale, pre_tokens, next_tokens, sparse_mode, keep_prob, dropout_seed)
    output, maximum, inverse_sum = _Attention.apply(query, key, value, None, options, True)
    with np.errstate(divide="ignore"):
        total = 1 / storage.read_array(inverse_sum)
    return output, _eightfold(storage.read_array(maximum)), _eightfold(np.where(np.isfinite(total), total, 0))


def _eightfold(statistic):
    """Statistic repeated eight times, as in the fused operator's layout."""
    return storage.from_array(np.repeat(statistic[..., None], 8, -1).astype(np.float32))


def _flash_options(query, key, mask, scale, pre_tokens, next_tokens, sparse_mode, keep_prob, dropout_seed):
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


def _to_heads(t, layout, heads):
    """Convert a tensor in `layout` to [s, b, n, d]."""
    if layout == "BNSD":
        return t.transpose(2, 0, 1, 3)
    if layout == "BSND":
        return t.transpose(1, 0, 2, 3)
    t = t if layout == "SBH" else t.transpose(1, 0, 2)
    return t.reshape(t.shape[0], t.shape[1], heads, -1)


def _from_heads(output, layout, heads):
    """Convert [s, b, n * d] to `layout`."""
    if layout == "SBH":
        return output
    if layout == "BSH":
        return output.transpose(1, 0, 2)
    s, b, width = output.shape
    return output.reshape(s, b, heads, width // heads).transpose(*((1, 2, 0, 3) if layout == "BNSD" else (1, 0, 2, 3)))


def fusion_attention(query, key, value, head_num, input_layout, arguments, dropout_seed):
    """See `ops.npu_fusion_attention`."""
    for name in _ASCEND_ONLY:
        if arguments[name] is not None:
            raise ValueError(f"npu_fusion_attention got {name}: it is supported on Ascend only.")
    mask, sparse_mode, keep_prob = arguments["atten_mask"], arguments["sparse_mode"], arguments["keep_prob"]
    checks.check_flash_arguments(mask, sparse_mode, input_layout, keep_prob, dropout_seed)
    if input_layout in ("SBH", "BSH"):
        size = query.shape[2] // head_num
        groups = key.shape[2] // size
    else:
        groups = key.shape[1 if input_layout == "BNSD" else 2]
    heads = [_to_heads(t, input_layout, n) for t, n in ((query, head_num), (key, groups), (value, groups))]
    output, maximum, total = _attention_with_statistics(
        *heads,
        mask,
        arguments["scale"],
        arguments["pre_tokens"],
        arguments["next_tokens"],
        sparse_mode,
        keep_prob,
        dropout_seed,
    )
    return _from_heads(output, input_layout, head_num), maximum, total
