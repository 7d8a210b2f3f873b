"""CPU forms of upstream's public operators: fused attention in any layout, rotary embedding of any layout."""

import numpy as np

from mindspeed_ms.core import storage
from mindspeed_ms.ops import attention_checks as checks
from mindspeed_ms.ops.cpu.arrays import float32_of
from mindspeed_ms.ops.cpu.attention import apply_rotary, attention_with_statistics

_ASCEND_ONLY = ("pse", "padding_mask", "prefix", "actual_seq_qlen", "actual_seq_kvlen")


def rotary_position_embedding(x, cos, sin, mode):
    """See `ops.npu_rotary_position_embedding`: every vector becomes a token with its own angles."""
    tables = []
    for table in (cos, sin):
        wide = np.ascontiguousarray(np.broadcast_to(float32_of(table), x.shape))
        tables.append(storage.from_array(wide.reshape(-1, 1, 1, x.shape[-1])))
    return apply_rotary(x.reshape(-1, 1, 1, x.shape[-1]), *tables, bool(mode)).reshape(x.shape)


def _to_heads(t, layout, heads):
    """[s, b, n, d] of a tensor in `layout`."""
    if layout == "BNSD":
        return t.transpose(2, 0, 1, 3)
    if layout == "BSND":
        return t.transpose(1, 0, 2, 3)
    t = t if layout == "SBH" else t.transpose(1, 0, 2)
    return t.reshape(t.shape[0], t.shape[1], heads, -1)


def _from_heads(output, layout, heads):
    """[s, b, n * d] in `layout`."""
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
    output, maximum, total = attention_with_statistics(
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
