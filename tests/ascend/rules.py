"""What the documentation of the Ascend operators asks of their arguments."""

import mindspore as ms
import numpy as np

FLOATS = (ms.float32, ms.float16, ms.bfloat16)
HALVES = (ms.float16, ms.bfloat16)


def check(path, arguments):
    """Assert the documented conditions of the operator `path`, if there are any beyond its signature."""
    rule = _RULES.get(path)
    if rule is not None:
        rule(arguments)


def _rms_norm(a):
    assert a["x"].dtype in FLOATS and a["gamma"].dtype == a["x"].dtype
    assert isinstance(a["epsilon"], float) and 0 < a["epsilon"] <= 1
    assert a["gamma"].ndim <= a["x"].ndim


def _layer_norm(a):
    assert tuple(a["normalized_shape"]) == tuple(a["input"].shape[-len(a["normalized_shape"]) :])
    assert a["weight"].dtype == a["bias"].dtype == a["input"].dtype
    assert isinstance(a["eps"], float)


def _swiglu(a):
    assert a["input"].dtype in FLOATS and isinstance(a["dim"], int) and a["input"].shape[a["dim"]] % 2 == 0


def _linear(a):
    assert a["weight"].ndim == 2 and a["weight"].dtype == a["input"].dtype
    assert a["bias"] is None or a["bias"].dtype == a["input"].dtype


def _matmul(a):
    assert a["input"].dtype == a["other"].dtype and a["input"].dtype in FLOATS


def _embedding(a):
    assert a["input"].dtype in (ms.int32, ms.int64) and a["weight"].ndim == 2
    ids = a["input"].asnumpy()
    assert ids.min() >= 0 and ids.max() < a["weight"].shape[0], "invalid ids are undefined behaviour"


def _index_select(a):
    assert a["index"].dtype in (ms.int32, ms.int64) and a["index"].ndim == 1


def _gather(a):
    assert a["index"].dtype in (ms.int32, ms.int64) and a["index"].ndim == a["input"].ndim


def _scatter_add(a):
    assert a["index"].dtype in (ms.int32, ms.int64)
    assert a["index"].ndim == a["input"].ndim == a["src"].ndim and a["src"].dtype == a["input"].dtype


def _rotary(a):
    x, cos, sin, mode = a["x"], a["cos"], a["sin"], a["mode"]
    assert x.ndim == cos.ndim == 4 and cos.shape == sin.shape
    assert x.dtype in FLOATS and cos.dtype == sin.dtype == x.dtype
    assert x.shape[3] % 2 == 0 and x.shape[3] < 896 and cos.shape[3] == x.shape[3]
    first, second, third = x.shape[:3]
    shared = ((1, 1, third), (1, second, 1), (first, 1, 1))  # x as BNSD, BSND, SBND
    wider = ((first, 1, third), (first, second, 1), (first, second, third))
    assert mode in (0, 1) and tuple(cos.shape[:3]) in (shared if mode == 1 else shared + wider), "undocumented layout"


_PLACES = {"BSH": (0, 1, None), "SBH": (1, 0, None), "BNSD": (0, 2, 1), "BSND": (0, 1, 2)}


def _flash(a):
    query, key, value = a["query"], a["key"], a["value"]
    assert query.dtype in HALVES and key.dtype == value.dtype == query.dtype and key.shape == value.shape
    layout, heads = a["input_layout"], a["head_num"]
    batch_place, sequence_place, head_place = _PLACES[layout]
    assert query.ndim == key.ndim == (3 if head_place is None else 4)
    batch, queries, keys = query.shape[batch_place], query.shape[sequence_place], key.shape[sequence_place]
    assert key.shape[batch_place] == batch and isinstance(heads, int)
    if head_place is None:
        assert query.shape[2] % heads == 0
        size = query.shape[2] // heads
        assert key.shape[2] % size == 0
    else:
        size = query.shape[3]
        assert query.shape[head_place] == heads and heads % key.shape[head_place] == 0 and key.shape[3] == size
    assert size % 16 == 0 and size <= 512
    scale = a["scalar_value"] if "scalar_value" in a else a["scale_value"]
    assert isinstance(scale, float) and isinstance(a["keep_prob"], float) and 0 < a["keep_prob"] <= 1
    assert all(isinstance(a[name], int) for name in ("pre_tokens", "next_tokens", "sparse_mode"))
    if a["keep_prob"] == 1.0:
        assert a["drop_mask"] is None
    else:
        assert a["drop_mask"].dtype == ms.uint8 and tuple(a["drop_mask"].shape) == (batch, heads, queries, keys // 8)
    _flash_mask(a["attn_mask"], a["sparse_mode"], batch, heads, queries, keys)


def _flash_mask(mask, sparse_mode, batch, heads, queries, keys):
    if sparse_mode in (2, 3, 4):
        assert tuple(mask.shape) == (2048, 2048)
        array = mask.asnumpy()
        assert array[0, 0] == 0 and array[0, 1] == 1 and array[1, 0] == 0 and array.sum() == 2048 * 2047 // 2
    elif mask is not None:
        assert tuple(mask.shape) in ((batch, heads, queries, keys), (batch, 1, queries, keys), (queries, keys))
    assert mask is None or mask.dtype in (ms.bool_, ms.uint8)
    assert sparse_mode != 1 or mask is not None


def _flash_gradient(a):
    _flash({**a, "attn_mask": a["atten_mask"]})
    assert a["dy"].dtype == a["attention_in"].dtype == a["query"].dtype
    assert a["dy"].shape == a["attention_in"].shape == a["query"].shape
    statistic = (a["query"].shape[0], a["head_num"], a["query"].shape[2], 8)
    for name in ("softmax_max", "softmax_sum"):
        assert a[name].dtype == ms.float32 and tuple(a[name].shape) == statistic


def _grouped_matmul(a):
    (x,), (weight,) = a["x"], a["weight"]
    assert a["split_item"] == 3 and a["group_type"] == 0 and a["group_list_type"] == 0
    assert x.ndim == 2 and weight.ndim == 3 and x.shape[1] == weight.shape[1] and x.shape[0] > 0
    assert x.dtype == weight.dtype and x.dtype in FLOATS
    _groups(a["group_list"], weight.shape[0], x.shape[0])
    assert all(
        a[name] is None for name in ("bias", "scale", "offset", "antiquant_scale", "antiquant_offset", "pre_token_scale")
    )


def _groups(group_list, experts, rows):
    ends = group_list.asnumpy()
    assert group_list.dtype == ms.int64 and ends.shape == (experts,)
    assert (np.diff(ends, prepend=0) >= 0).all() and ends[-1] == rows


def _grouped_matmul_add(a):
    x, weight, out = a["x"], a["weight"], a["out"]
    assert x.dtype == weight.dtype and x.dtype in HALVES and out.dtype == ms.float32
    assert x.shape[0] == weight.shape[0] and out.shape[1:] == (x.shape[1], weight.shape[1])
    _groups(a["group_list"], out.shape[0], x.shape[0])


def _index_add(a):
    input, dim, index, source = a["args"]  # the operator's Python signature names nothing
    assert index.dtype == ms.int32 and index.shape == source.shape[:1] and dim == 0
    assert source.dtype == input.dtype and source.shape[1:] == input.shape[1:]


def _scatter(a):
    assert a["index"].dtype in (ms.int32, ms.int64)
    assert a["index"].ndim == a["input"].ndim and a["src"].shape == a["index"].shape and a["src"].dtype == a["input"].dtype


_RULES = {
    "ops.auto_generate.grouped_matmul_v4": _grouped_matmul,
    "ops.auto_generate.grouped_matmul_add_": _grouped_matmul_add,
    "mint.index_add": _index_add,
    "mint.scatter": _scatter,
    "ops.rms_norm": _rms_norm,
    "mint.nn.functional.layer_norm": _layer_norm,
    "ops.swiglu": _swiglu,
    "mint.nn.functional.linear": _linear,
    "mint.matmul": _matmul,
    "mint.nn.functional.embedding": _embedding,
    "mint.gather": _gather,
    "mint.scatter_add": _scatter_add,
    "ops.rotary_position_embedding": _rotary,
    "ops.flash_attention_score": _flash,
    "mint.index_select": _index_select,
    "ops.operations.nn_ops.FlashAttentionScore": _flash,
    "ops.auto_generate.FlashAttentionScoreGrad": _flash_gradient,
}
