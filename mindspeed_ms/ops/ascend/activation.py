"""Ascend forms of activations."""

from mindspore import mint, ops

from mindspeed_ms.ops import checks

_ACTIVATIONS = {
    "gelu_tanh": lambda x: mint.nn.functional.gelu(x, approximate="tanh"),
    "gelu_erf": lambda x: mint.nn.functional.gelu(x, approximate="none"),
    "silu": lambda x: mint.nn.functional.silu(x),
    "relu": lambda x: mint.nn.functional.relu(x),
    "squared_relu": lambda x: mint.square(mint.nn.functional.relu(x)),
    "swiglu": lambda x: ops.swiglu(x, -1),
}


def bias_activation(x, bias, name, fused=True, limit=7.0, alpha=1.702):
    """See `ops.bias_activation`."""
    checks.check_bias_activation(x, bias, name)
    x = x if bias is None else x + bias
    if name == "swiglu" and not fused:
        gate, up = mint.split(x, x.shape[-1] // 2, dim=-1)
        return mint.nn.functional.silu(gate) * up
    if name == "clamped_swiglu":
        gate, up = mint.split(x, x.shape[-1] // 2, dim=-1)
        gate, up = mint.clamp(gate, max=limit), mint.clamp(up, min=-limit, max=limit)
        return gate * mint.sigmoid(gate * alpha) * (up + 1.0)
    return _ACTIVATIONS[name](x)
