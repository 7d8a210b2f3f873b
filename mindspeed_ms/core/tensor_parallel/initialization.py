"""Initializers: conversion of all accepted forms to `layout.Initializer`."""

from mindspore.common import initializer as mindspore_initializer

from mindspeed_ms.layout.sharding import Initializer

DEFAULT_STD = 0.01


def to_initializer(method, std=None):
    """Convert `method` to an `Initializer`.

    Args:
        method: an `Initializer`, "normal" (with `std`), "zeros", "ones", a number, or MindSpore's `Zero`, `One`,
            `Constant`, `Normal` (class or object).
        std (Optional[float]): standard deviation of "normal"; default 0.01, as MindSpore's `Normal`.

    Raises:
        ValueError: anything else, since its values would depend on the layout.
    """
    std = DEFAULT_STD if std is None else std
    if isinstance(method, Initializer):
        return method
    if isinstance(method, (int, float)) and not isinstance(method, bool):
        return Initializer.constant(method)
    if isinstance(method, str):
        names = {"normal": Initializer.normal(std), "zeros": Initializer.zeros(), "ones": Initializer.ones()}
        names.update(zero=names["zeros"], one=names["ones"])
        if method.lower() in names:
            return names[method.lower()]
    converted = _from_mindspore(method, std)
    if converted is None:
        raise ValueError(
            f"init_method {method!r} is not supported: choose 'normal', 'zeros', 'ones', a number, "
            "mindspeed_ms.layout.parameters.Initializer, or MindSpore's Zero, One, Constant or Normal."
        )
    return converted


def _from_mindspore(method, std):
    if isinstance(method, type) and issubclass(method, mindspore_initializer.Initializer):
        method = method(std) if method is mindspore_initializer.Normal else method()
    if isinstance(method, mindspore_initializer.Zero):
        return Initializer.zeros()
    if isinstance(method, mindspore_initializer.One):
        return Initializer.ones()
    if isinstance(method, mindspore_initializer.Constant):
        return Initializer.constant(method.value)
    if isinstance(method, mindspore_initializer.Normal) and not method.mean:
        return Initializer.normal(method.sigma)
    return None


def init_method_normal(sigma):
    """Normal distribution with mean 0 and standard deviation `sigma`. Source: Megatron's `init_method_normal`."""
    return Initializer.normal(sigma)


def scaled_init_method_normal(sigma, num_layers, multiplier=2.0):
    """Normal with sigma / sqrt(2 * layers), for projections that end a sublayer. Source: Megatron."""
    return Initializer.normal(sigma / (multiplier * num_layers) ** 0.5)
