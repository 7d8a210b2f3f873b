"""Stand-ins for operators without a CPU kernel.

`COMPUTED` work like the operator, by other operators of MindSpore or one numpy function. `SHAPED` give zeros in the documented
shape and dtype: an emulation of a fused kernel would only be compared with another kernel of ours and prove nothing.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor


def _embedding(input, weight, *_):
    return ms.ops.gather(weight, input, 0)


def _scatter_add(input, dim, index, src):
    return ms.ops.tensor_scatter_elements(input, index, src, dim, "add")


def _rand(*size, generator=None, dtype=None):
    return Tensor(np.random.default_rng(generator.initial_seed()).random(size, np.float32))


def _topk(input, k, dim=-1, largest=True, sorted=True):
    values, indices = ms.ops.topk(input, k, dim)
    return values, indices.astype(ms.int64)


COMPUTED = {
    "mint.nn.functional.embedding": _embedding,
    "mint.scatter_add": _scatter_add,
    "mint.rand": _rand,
    "mint.arange": lambda end: Tensor(np.arange(end)),
    "mint.triu": lambda input, diagonal=0: Tensor(np.triu(input.asnumpy(), diagonal)),
    "mint.index_select": lambda input, dim, index: ms.ops.gather(input, index, dim),
    "mint.topk": _topk,
    "mint.scatter": lambda input, dim, index, src: ms.ops.tensor_scatter_elements(input, index, src, dim),
    "mint.index_add": lambda input, dim, index, source: ms.ops.index_add(input, index, source, dim),
    "mint.logsumexp": lambda input, dim: ms.ops.logsumexp(input, dim),
    "mint.stack": lambda tensors, dim=0: ms.ops.stack(tensors, dim),
    "mint.zeros_like": lambda input, *, dtype=None: ms.ops.zeros_like(input),
    "mint.full_like": lambda input, fill_value, *, dtype=None: ms.ops.full(input.shape, fill_value, dtype=input.dtype),
}


def _zeros(shape, dtype=ms.float32):
    return Tensor(np.zeros(shape, np.float32)).astype(dtype)


def _like(tensor, *_, **__):
    return _zeros(tensor.shape, tensor.dtype)


def _rms_norm(x, *_):
    return _like(x), _zeros((*x.shape[:-1], 1))


def _swiglu(input, dim=-1):
    shape = list(input.shape)
    shape[dim] //= 2
    return _zeros(shape, input.dtype)


def _flash_primitive(**arguments):
    query, layout = arguments["query"], arguments["input_layout"]
    batch, sequence = {"BSH": (0, 1), "SBH": (1, 0), "BNSD": (0, 2), "BSND": (0, 1)}[layout]
    statistic = _zeros((query.shape[batch], arguments["head_num"], query.shape[sequence], 8))
    return statistic, statistic, Tensor(0.0), _like(query)


def _flash_gradient(**arguments):
    return (*(_like(arguments[name]) for name in ("query", "key", "value")), None)


def _grouped_matmul(x, weight, **_):
    return (_zeros((x[0].shape[0], weight[0].shape[2]), x[0].dtype),)


SHAPED = {
    "ops.auto_generate.grouped_matmul_v4": _grouped_matmul,
    "ops.auto_generate.grouped_matmul_add_": lambda x, weight, group_list, out: out,
    "mint.nn.functional.layer_norm": _like,
    "mint.nn.functional.gelu": _like,
    "ops.rms_norm": _rms_norm,
    "ops.swiglu": _swiglu,
    "ops.rotary_position_embedding": _like,
    "ops.flash_attention_score": _like,
    "ops.operations.nn_ops.FlashAttentionScore": _flash_primitive,
    "ops.auto_generate.FlashAttentionScoreGrad": _flash_gradient,
}
