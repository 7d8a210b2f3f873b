"""Parameters without values: released (ZeRO-3) or not yet initialised. Use of their values raises an error that names them.

Operators accept tensors without elements, and a sum over nothing is 0: a use at the wrong time would give a wrong number
and no error. So the parameter changes its class, MindSpore's operators ask the class (`__fallback__`) before they compute,
and what reads values without an operator is overridden.
"""

import functools

from mindspore import Parameter, Tensor

# `mindspore.save_checkpoint` reads a parameter through its class but asks for `offload_file_path` first
_READING = ("asnumpy", "clone", "copy", "get_bytes", "numpy", "offload_file_path", "to_dlpack", "tolist", "value", "_data_ptr")
_WRITING = ("assign_value", "set_", "set_data")
_SPECIAL = ("__deepcopy__", "__getitem__", "__reduce_ex__", "__setitem__")
_READING_PROPERTIES = ("H", "mH", "mT", "T")
_REFLECTED = tuple(f"__r{name}__" for name in ("add", "floordiv", "matmul", "mod", "mul", "pow", "sub", "truediv"))


class ReleasedParameterError(RuntimeError):
    """Error: the values of a parameter were used while this rank does not hold them."""


class UnfilledParameterError(RuntimeError):
    """Error: the values of a parameter were used before `initialize_parameters`."""


class _WithoutValues:
    """Mixin of a Parameter without values; every use of the values raises an error."""

    def __fallback__(self, *_args, **_kwargs):
        self._refuse()

    def __repr__(self):
        return f"Parameter (name={self.name}, dtype={self.dtype}, {self.state})"

    __str__ = __repr__

    def _refuse(self, *_args, **_kwargs):
        raise self.error(f"parameter {self.name!r} {self.reason}")


class ReleasedParameter(_WithoutValues):
    """Released (ZeRO-3) parameter: its memory was freed."""

    state, error = "released", ReleasedParameterError
    reason = (
        "was used where it is not held in full: with zero_level z3 a layer's parameters are there only in its own forward and "
        "backward. Use it inside its layer's construct, read it inside `with model.whole_parameters():` on all data-parallel "
        "ranks, or use zero_level z2."
    )


class UnfilledParameter(_WithoutValues):
    """Parameter without initial values; `initialize_parameters` will fill it."""

    state, error = "not initialised", UnfilledParameterError
    reason = (
        "has no values yet: they are drawn when the whole model is built. Call "
        "core.tensor_parallel.initialize_parameters(cell) on the outermost cell before they are read or copied; "
        "`parameter.set_data(tensor)` and `mindspore.load_param_into_net` give it own values at any time."
    )

    def set_data(self, data, slice_shape=False):
        """Give the parameter values of the user's, which initialisation keeps.

        Raises:
            ValueError: the values are not those of this rank's part.
        """
        if isinstance(data, Tensor) and tuple(data.shape) != tuple(self.shape):
            raise ValueError(
                f"parameter {self.name!r} was given values of shape {tuple(data.shape)}: expected {tuple(self.shape)}, this "
                f"rank's part of {tuple(self.sharding.global_shape)}."
            )
        mark_held(self)
        return self.set_data(data, slice_shape)

    assign_value = set_data

    def _set(self, tensor):
        self.set_data(tensor)

    # itself, which refuses uses: `mindspore.load_param_into_net` compares shape and dtype of it
    data = property(lambda self: self, _set)


for _name in (*_READING, *_SPECIAL, *_REFLECTED):
    setattr(_WithoutValues, _name, _WithoutValues._refuse)
for _name in _WRITING:
    setattr(ReleasedParameter, _name, _WithoutValues._refuse)
for _name in _READING_PROPERTIES:
    setattr(_WithoutValues, _name, property(_WithoutValues._refuse))
ReleasedParameter.data = property(_WithoutValues._refuse)


@functools.cache
def _class_without_values(state, kind):
    return type(state.__name__, (state, kind), {"held_class": kind})


def _mark(parameter, state):
    if not isinstance(parameter, Parameter):
        raise TypeError(f"expected a Parameter, got a {type(parameter).__name__}: only parameters can be without values.")
    mark_held(parameter)
    parameter.__class__ = _class_without_values(state, type(parameter))


def mark_released(parameter):
    """Mark a parameter as released: every use of its values raises ReleasedParameterError."""
    _mark(parameter, ReleasedParameter)


def mark_unfilled(parameter):
    """Mark a parameter as unfilled: use of its values raises an error until `storage.set_data` or `parameter.set_data`."""
    _mark(parameter, UnfilledParameter)


def mark_held(parameter):
    """Mark a parameter as held: its values may be used again."""
    if isinstance(parameter, _WithoutValues):
        parameter.__class__ = parameter.held_class
