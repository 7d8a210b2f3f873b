"""Ascend forms of LayerNorm and RMSNorm; the operators keep their statistics in float32."""

import mindspore as ms
from mindspore import mint, ops


def _one_dtype(x, *parameters):
    """Operands in one dtype, as the operators require: float32 if any parameter is float32."""
    dtype = x.dtype if all(p.dtype == x.dtype for p in parameters) else ms.float32
    return [t if t.dtype == dtype else t.astype(dtype) for t in (x, *parameters)]


def layer_norm(x, gamma, beta, eps=1e-5):
    """See `ops.layer_norm`."""
    values, scale, shift = _one_dtype(x, gamma, beta)
    return mint.nn.functional.layer_norm(values, (x.shape[-1],), scale, shift, float(eps)).astype(x.dtype)


def rms_norm(x, weight, eps=1e-6):
    """See `ops.rms_norm`."""
    return rms_norm_with_inverse(x, weight, eps)[0]


def add_rms_norm(x, bias, residual, weight, eps=1e-6):
    """See `ops.add_rms_norm`."""
    total = residual + (x if bias is None else x + bias).astype(residual.dtype)
    return total, rms_norm(total, weight, eps)


def rms_norm_with_inverse(x, weight, eps=1e-6):
    """`rms_norm` and the inverse root mean square [..., 1], float32."""
    values, scale = _one_dtype(x, weight)
    y, inverse = ops.rms_norm(values, scale, float(eps))
    return y.astype(x.dtype), inverse
