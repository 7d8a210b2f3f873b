"""Dropout and residual additions."""


def _check(p, keep_mask):
    if not 0 <= p < 1:
        raise ValueError(f"dropout got p={p}: expected 0 <= p < 1.")
    if p > 0 and keep_mask is None:
        raise ValueError(f"dropout got p={p} without a keep mask: draw one from core.rng.")


def dropout(x, p, keep_mask):
    """See `ops.dropout`."""
    _check(p, keep_mask)
    return x if p == 0 else x * keep_mask.astype(x.dtype) * (1.0 / (1.0 - p))


def bias_dropout_add(x, bias, residual, p=0.0, keep_mask=None):
    """See `ops.bias_dropout_add`."""
    value = dropout(x if bias is None else x + bias, p, keep_mask)
    return residual + (value if value.dtype == residual.dtype else value.astype(residual.dtype))
