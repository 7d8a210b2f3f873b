"""Ascend forms of dropout and residual additions."""

from mindspeed_ms.ops import checks


def dropout(x, p, keep_mask):
    """See `ops.dropout`."""
    checks.check_dropout(p, keep_mask, x)
    return x if p == 0 else x * keep_mask.astype(x.dtype) * (1.0 / (1.0 - p))


def bias_dropout_add(x, bias, residual, p=0.0, keep_mask=None):
    """See `ops.bias_dropout_add`."""
    checks.check_residual(x, residual)
    value = dropout(x if bias is None else x + bias, p, keep_mask)
    return residual + (value if value.dtype == residual.dtype else value.astype(residual.dtype))
