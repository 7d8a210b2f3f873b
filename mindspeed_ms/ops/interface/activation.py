"""Activations, alone and fused with the bias before them."""

from mindspeed_ms.ops.forms import operator


@operator
def bias_activation(x, bias, name, fused=True, limit=7.0, alpha=1.702):
    """Activation with bias, `activation(x + bias)`; differentiable, keeps only `x` for the backward.

    Args:
        x (Tensor): [..., n].
        bias (Tensor): [n] in the dtype of `x`, or None.
        name (str): one of ACTIVATION_NAMES.
        fused: on Ascend, the swiglu operator instead of silu and a product; on CPU there is one kernel for both.

        limit, alpha: of "clamped_swiglu", which is gate * sigmoid(alpha * gate) * (up + 1) of x = [gate; up], with the gate
            at most `limit` and up within +-`limit`.

    Returns:
        Tensor [..., n], for "swiglu" and "clamped_swiglu" [..., n / 2], dtype of `x`; computed in float32.

    Raises:
        ValueError: unknown name.
    """


def swiglu(x, dim=-1):
    """SwiGLU `silu(gate) * up` of x = [gate; up] along the last dimension: [..., 2n] -> [..., n].

    Raises:
        ValueError: `dim` is not the last dimension.
    """
    if dim not in (-1, x.ndim - 1):
        raise ValueError(f"swiglu got dim={dim} for a tensor of {x.ndim} dimensions: only the last one is supported.")
    return bias_activation(x, None, "swiglu")


def gelu(x, approximate="tanh"):
    """Gaussian error linear unit; `approximate` is "tanh" (Megatron's default) or "none" (by erf)."""
    if approximate not in ("tanh", "none"):
        raise ValueError(f"gelu got approximate={approximate!r}: expected 'tanh' or 'none'.")
    return bias_activation(x, None, "gelu_tanh" if approximate == "tanh" else "gelu_erf")


def silu(x):
    """SiLU activation `x * sigmoid(x)`."""
    return bias_activation(x, None, "silu")


def relu(x):
    """ReLU activation `max(x, 0)`."""
    return bias_activation(x, None, "relu")


def squared_relu(x):
    """Squared ReLU activation `max(x, 0)^2`."""
    return bias_activation(x, None, "squared_relu")
