"""Released (ZeRO-3) parameters: any use of their values raises an error that names the parameter.

Operators accept tensors without elements, and a sum over nothing is 0: a use at the wrong time would give a wrong number
and no error. So the parameter changes its class, MindSpore's operators ask the class (`__fallback__`) before they compute,
and what reads values without an operator is overridden.
"""

import functools

from mindspore import Parameter

_READING = ("asnumpy", "clone", "copy", "numpy", "value", "_data_ptr", "__deepcopy__", "__reduce_ex__")
_READING_PROPERTIES = ("data", "H", "mH", "mT", "T")
_REFLECTED = tuple(f"__r{name}__" for name in ("add", "floordiv", "matmul", "mod", "mul", "pow", "sub", "truediv"))


class ReleasedParameterError(RuntimeError):
    """The values of a parameter were used while this rank does not hold them."""


class ReleasedParameter:
    """Mixin of a released parameter: refuses every use of its values; see the module."""

    def __fallback__(self, *_args, **_kwargs):
        self._refuse()

    def __repr__(self):
        return f"Parameter (name={self.name}, dtype={self.dtype}, released)"

    __str__ = __repr__

    def _refuse(self, *_args, **_kwargs):
        raise ReleasedParameterError(
            f"parameter {self.name!r} was used where it is not held in full: with zero_level z3 a layer's parameters are there "
            "only in its own forward and backward. Use it inside its layer's construct, read it inside `with "
            "model.whole_parameters():` on all data-parallel ranks, or use zero_level z2."
        )


for _name in (*_READING, *_REFLECTED):
    setattr(ReleasedParameter, _name, ReleasedParameter._refuse)
for _name in _READING_PROPERTIES:
    setattr(ReleasedParameter, _name, property(ReleasedParameter._refuse))


@functools.cache
def _released_class(kind):
    return type("ReleasedParameter", (ReleasedParameter, kind), {"held_class": kind})


def mark_released(parameter):
    """Mark a parameter as released: every use of its values raises."""
    if not isinstance(parameter, Parameter):
        raise TypeError(f"expected a Parameter, got a {type(parameter).__name__}: only parameters can be released.")
    if not isinstance(parameter, ReleasedParameter):
        parameter.__class__ = _released_class(type(parameter))


def mark_held(parameter):
    """Mark a parameter as held: its values may be used."""
    if isinstance(parameter, ReleasedParameter):
        parameter.__class__ = parameter.held_class
