"""What the operators without a CPU kernel compute, in numpy, for the comparison with the CPU forms."""

import mindspore as ms
import numpy as np
from mindspore import Tensor

from tests.ops import references


def _array(t):
    return t.asnumpy().astype(np.float64)


def _like(array, t):
    return Tensor(array.astype(np.float32)).astype(t.dtype)


def _layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    return _like(references.layer_norm(_array(input), _array(weight), _array(bias), eps), input)


def _rms_norm(x, gamma, epsilon=1e-6):
    values = _array(x)
    inverse = 1 / np.sqrt((values**2).mean(-1, keepdims=True) + epsilon)
    return _like(values * inverse * _array(gamma), x), Tensor(inverse.astype(np.float32))


def _gelu(input, *, approximate="none"):
    name = {"none": "gelu_erf", "tanh": "gelu_tanh"}[approximate]
    return _like(references.activation(name)(_array(input)), input)


def _swiglu(input, dim=-1):
    return _like(references.activation("swiglu")(np.moveaxis(_array(input), dim, -1)), input)


def _rotary(x, cos, sin, mode=0):
    return _like(references.rotary(_array(x), _array(cos), _array(sin), bool(mode)), x)


def _embedding(input, weight, *_):
    return _like(_array(weight)[input.asnumpy()], weight)


def _scatter_add(input, dim, index, src):
    result = _array(input)
    places = list(np.ogrid[tuple(slice(0, n) for n in index.shape)])
    places[dim] = index.asnumpy()
    np.add.at(result, tuple(places), _array(src))
    return _like(result, input)


def _rand(*size, generator=None, dtype=None):
    return Tensor(np.random.default_rng(generator.initial_seed()).random(size, np.float32))


def _heads(t, layout, heads):
    """[s, b, n, d] of `t` in `layout`."""
    a = _array(t)
    if layout == "BNSD":
        return a.transpose(2, 0, 1, 3)
    if layout == "BSND":
        return a.transpose(1, 0, 2, 3)
    a = a if layout == "SBH" else a.transpose(1, 0, 2)
    return a.reshape(*a.shape[:2], heads, -1)


def _in_layout(output, layout, heads):
    if layout == "SBH":
        return output
    if layout == "BSH":
        return output.transpose(1, 0, 2)
    output = output.reshape(*output.shape[:2], heads, -1)
    return output.transpose((1, 2, 0, 3) if layout == "BNSD" else (1, 0, 2, 3))


def _flash(query, key, value, head_num, drop_mask, attn_mask, keep_prob, scale, pre_tokens, next_tokens, layout, sparse_mode):
    size = query.shape[-1] // head_num if query.ndim == 3 else query.shape[-1]
    groups = {"BNSD": 1, "BSND": 2}.get(layout)
    groups = key.shape[2] // size if groups is None else key.shape[groups]
    q, k, v = _heads(query, layout, head_num), _heads(key, layout, groups), _heads(value, layout, groups)
    queries, keys = q.shape[0], k.shape[0]
    everything = queries + keys
    shift = keys - queries
    mask = False if attn_mask is None or sparse_mode > 1 else attn_mask.asnumpy().astype(bool)
    lower, upper = {
        2: (-everything, 0),
        3: (-everything, shift),
        4: (shift - pre_tokens, shift + next_tokens),
        1: (-everything, everything),
    }.get(sparse_mode, (-pre_tokens, next_tokens))
    if sparse_mode == 0 and attn_mask is None:
        lower, upper = -everything, everything
    keep = None
    if drop_mask is not None:
        bits = np.unpackbits(drop_mask.asnumpy()[..., None], axis=-1, bitorder="little")
        keep = bits.reshape(*drop_mask.shape[:-1], keys) / keep_prob
    output = references.attention(q, k, v, references.band(queries, keys, lower, upper) | mask, scale, keep)
    return _like(_in_layout(output, layout, head_num), query)


def _flash_attention_score(
    query,
    key,
    value,
    head_num,
    real_shift=None,
    drop_mask=None,
    padding_mask=None,
    attn_mask=None,
    prefix=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    keep_prob=1.0,
    scalar_value=1.0,
    pre_tokens=2147483647,
    next_tokens=2147483647,
    inner_precise=0,
    input_layout="BSH",
    sparse_mode=0,
):
    return _flash(
        query,
        key,
        value,
        head_num,
        drop_mask,
        attn_mask,
        keep_prob,
        scalar_value,
        pre_tokens,
        next_tokens,
        input_layout,
        sparse_mode,
    )


def _flash_primitive(**a):
    output = _flash(
        a["query"],
        a["key"],
        a["value"],
        a["head_num"],
        a["drop_mask"],
        a["attn_mask"],
        a["keep_prob"],
        a["scale_value"],
        a["pre_tokens"],
        a["next_tokens"],
        a["input_layout"],
        a["sparse_mode"],
    )
    statistic = Tensor(np.zeros((1, 1, 1, 8), np.float32))
    return statistic, statistic, Tensor(0.0), output


OPERATORS = {
    "mint.nn.functional.layer_norm": _layer_norm,
    "mint.nn.functional.gelu": _gelu,
    "mint.nn.functional.embedding": _embedding,
    "mint.scatter_add": _scatter_add,
    "mint.rand": _rand,
    "mint.arange": lambda end: Tensor(np.arange(end)),
    "mint.triu": lambda input, diagonal=0: Tensor(np.triu(input.asnumpy(), diagonal)),
    "mint.zeros_like": lambda input, *, dtype=None: ms.ops.zeros_like(input),
    "mint.full_like": lambda input, fill_value, *, dtype=None: ms.ops.full(input.shape, fill_value, dtype=input.dtype),
    "ops.rms_norm": _rms_norm,
    "ops.swiglu": _swiglu,
    "ops.rotary_position_embedding": _rotary,
    "ops.flash_attention_score": _flash_attention_score,
    "ops.operations.nn_ops.FlashAttentionScore": _flash_primitive,
}
