"""float64 numpy references of the operators."""

import math

import numpy as np


def erf(x):
    """Error function, elementwise."""
    return np.vectorize(math.erf)(x)


def sigmoid(x):
    """Logistic function."""
    return 1 / (1 + np.exp(-x))


def clamped_swiglu(x, limit=7.0, alpha=1.702):
    """gpt-oss's SwiGLU."""
    gate, up = np.split(x, 2, -1)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate * sigmoid(alpha * gate) * (up + 1)


def activation(name):
    """Activation of that name."""

    def swiglu(x):
        gate, up = np.split(x, 2, -1)
        return gate * sigmoid(gate) * up

    return {
        "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "gelu_erf": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
        "silu": lambda x: x * sigmoid(x),
        "relu": lambda x: np.maximum(x, 0),
        "squared_relu": lambda x: np.maximum(x, 0) ** 2,
        "swiglu": swiglu,
        "clamped_swiglu": clamped_swiglu,
    }[name]


def layer_norm(x, gamma, beta, eps=1e-5):
    """LayerNorm over the last dimension."""
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * gamma + beta


def rms_norm(x, weight, eps=1e-6):
    """RMSNorm over the last dimension."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rotary(t, cos, sin, interleaved=False):
    """Rotary embedding of t [s, b, n, d]."""
    rot = cos.shape[-1]
    x, rest = t[..., :rot], t[..., rot:]
    if interleaved:
        turned = np.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    else:
        turned = np.concatenate([-x[..., rot // 2 :], x[..., : rot // 2]], -1)
    return np.concatenate([x * cos + turned * sin, rest], -1)


def band(queries, keys, lower, upper):
    """True where key j is outside i + lower <= j <= i + upper."""
    distance = np.arange(keys)[None, :] - np.arange(queries)[:, None]
    return (distance < lower) | (distance > upper)


def softmax(scores, blocked):
    """Softmax over the last dimension; rows without a visible key are zero."""
    scores = np.where(blocked, -np.inf, scores)
    largest = scores.max(-1, keepdims=True)
    e = np.where(blocked, 0.0, np.exp(scores - np.where(np.isfinite(largest), largest, 0.0)))
    total = e.sum(-1, keepdims=True)
    return e / np.where(total > 0, total, 1.0)


def _probabilities(scores, blocked, sinks):
    """Softmax of scores [b, n, sq, sk] beside one more score of each head, `sinks` [n] or None; and the share of that."""
    if sinks is None:
        return softmax(scores, blocked), None
    column = np.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
    blocked = np.broadcast_to(blocked, scores.shape)
    p = softmax(np.concatenate([scores, column], -1), np.concatenate([blocked, np.zeros_like(column, bool)], -1))
    return p[..., :-1], p[..., -1]


def attention(query, key, value, blocked, scale, keep=None, sinks=None):
    """Attention of query [sq, b, n, d], key [sk, b, groups, d], value [sk, b, groups, dv] -> [sq, b, n * dv]; keep [b, n, sq,
    sk] is scaled; sinks [n].
    """
    repeat = query.shape[2] // key.shape[2]
    key, value = np.repeat(key, repeat, 2), np.repeat(value, repeat, 2)
    p, _ = _probabilities(np.einsum("ibnd,jbnd->bnij", query, key) * scale, blocked, sinks)
    p = p if keep is None else p * keep
    out = np.einsum("bnij,jbnd->ibnd", p, value)
    return out.reshape(*out.shape[:2], -1)


def attention_gradients(query, key, value, blocked, scale, output_grad, keep=None, sinks=None):
    """Gradients of `attention`, with `sinks` theirs as well."""
    groups, repeat = key.shape[2], query.shape[2] // key.shape[2]
    wide_key, wide_value = np.repeat(key, repeat, 2), np.repeat(value, repeat, 2)
    p, sunk = _probabilities(np.einsum("ibnd,jbnd->bnij", query, wide_key) * scale, blocked, sinks)
    keep = np.ones_like(p) if keep is None else keep
    g = output_grad.reshape(*query.shape[:3], value.shape[3])
    value_grad = np.einsum("bnij,ibnd->jbnd", p * keep, g)
    dp = np.einsum("ibnd,jbnd->bnij", g, wide_value) * keep
    mean = (p * dp).sum(-1, keepdims=True)
    ds = p * (dp - mean) * scale
    query_grad = np.einsum("bnij,jbnd->ibnd", ds, wide_key)
    key_grad = np.einsum("bnij,ibnd->jbnd", ds, query)
    shape = (*key.shape[:2], groups, repeat, -1)
    grads = query_grad, key_grad.reshape(shape).sum(3), value_grad.reshape(shape).sum(3)
    return grads if sinks is None else (*grads, -(sunk * mean[..., 0]).sum((0, 2)))
