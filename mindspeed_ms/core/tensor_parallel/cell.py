"""ParallelCell: base class of parallel layers; creation and initialisation of parameters.

Three steps: build, transform (adapters, wrappers), `initialize_parameters(model)`. A parameter is created from its
`ParameterDescription` and has no values until the last step, which draws them by its *global* name: the same weights in
every layout, and no rank ever holds a whole tensor. `with deferred_initialization():` keeps the first two steps apart
from the last; without it the outermost constructor ends with the last.
"""

import functools
from contextlib import contextmanager
from dataclasses import replace

from mindspore import Parameter, nn, ops

from mindspeed_ms.core import rng, storage
from mindspeed_ms.core.device import dtype_name, initialize_device, to_dtype
from mindspeed_ms.core.released_parameter import UnfilledParameter, mark_unfilled
from mindspeed_ms.layout.parameter_description import ParameterDescription
from mindspeed_ms.layout.sharding import Initializer, ParameterSharding

_construction_depth = 0
# field of ParameterDescription -> attribute of a Parameter
_PUBLIC_ATTRIBUTES = {
    "sharding": "sharding",
    "tensor_parallel": "tensor_model_parallel",
    "sequence_parallel": "sequence_parallel",
    "shared": "shared_embedding",
    "expert": "is_expert",
    "grouping": "grouping",
    "trainable": "requires_grad",
}


class ParallelCell(nn.Cell):
    """`nn.Cell` that initialises its parameters when its outermost constructor returns.

    Class attribute `names_are_global`: True when the names inside the cell are those of the state dictionary, as in a
    whole model (or a stage of it). Building blocks set False: constructed alone, outside of a model, each gets a number,
    so that two equal layers do not start with equal weights. The numbers restart when the random states are seeded.
    """

    names_are_global = True

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            cls.__init__ = _initializing(cls.__init__)

    def create_parameters(self, descriptions):
        """Create a Parameter from each ParameterDescription, as an attribute of its name."""
        for description in descriptions:
            setattr(self, description.name, create_parameter(description))


def _initializing(constructor):
    """Wrap a constructor: the outermost one initialises the parameters at its end."""

    @functools.wraps(constructor)
    def construct_and_initialize(self, *args, **kwargs):
        is_outermost = _construction_depth == 0
        with deferred_initialization():
            constructor(self, *args, **kwargs)
        if is_outermost:
            initialize_parameters(self, "" if self.names_are_global else _numbered_prefix(self))

    return construct_and_initialize


@contextmanager
def deferred_initialization():
    """Context manager: constructors leave parameters without values, for a later `initialize_parameters`."""
    global _construction_depth
    if _construction_depth == 0:
        initialize_device()
    _construction_depth += 1
    try:
        yield
    finally:
        _construction_depth -= 1


def create_parameter(description):
    """Create a Parameter of the described local shape without values; `initialize_parameters` fills it.

    Args:
        description (ParameterDescription): name, sharding, dtype, initializer, flags. It is kept as
            `parameter.description`, see `set_description`.
    """
    parameter = Parameter(
        ops.zeros(tuple(description.sharding.local_shape), to_dtype(description.dtype)),
        name=description.name,
        requires_grad=description.trainable,
    )
    set_description(parameter, description)
    parameter.keep_master_weight = False
    mark_unfilled(parameter)
    return parameter


def set_description(parameter, description):
    """Describe a Parameter: its `description`, and Megatron's public attributes with the same values."""
    parameter.description = description
    for field, attribute in _PUBLIC_ATTRIBUTES.items():
        setattr(parameter, attribute, getattr(description, field))


def description_of(parameter, shape=None):
    """The ParameterDescription of a Parameter, with the values that a user gave Megatron's public attributes.

    Args:
        parameter (Parameter): one of a user's own cell needs no description; its name in the description is then empty,
            relative to the parameter.
        shape (Optional[tuple[int]]): of the whole parameter, where it is released (ZeRO-3).
    """
    description = getattr(parameter, "description", None)
    if description is None:
        sharding = ParameterSharding.replicated(tuple(parameter.shape if shape is None else shape))
        description = ParameterDescription("", sharding, dtype_name(parameter.dtype), Initializer.zeros())
    given = {field: getattr(parameter, name) for field, name in _PUBLIC_ATTRIBUTES.items() if hasattr(parameter, name)}
    changed = {field: value for field, value in given.items() if value != getattr(description, field)}
    return replace(description, **changed) if changed else description


def place_globally(cell, name, local_name):
    """Give the parameters of `cell`, also later ones of transforms, global names that differ from the local ones.

    Args:
        cell (Cell): such as one expert.
        name (str): of the cell in the whole model ("local_experts.5"), relative like `local_name`.
        local_name (str): of the cell in its owner on this rank ("local_experts.1").
    """
    cell.placement = name, local_name
    _name_globally(cell)


def _name_globally(cell):
    """Prefix the parameter names of a placed cell with its global placement; skip names already prefixed."""
    for path, parameter in cell.parameters_and_names():
        description = getattr(parameter, "description", None)
        if description is not None and path.endswith(description.local_name):
            between = path.removesuffix(description.local_name).rstrip(".")
            parameter.description = (description.under(between) if between else description).under(*cell.placement)


def global_name(name, parameter):
    """Global key of a parameter that its outermost cell calls `name`; of a tied copy the original's."""
    return description_of(parameter).original_name(name)


def initialize_parameters(cell, prefix="", values=None):
    """Fill every parameter of `cell` that has no values, by its global name.

    The seed is that of `set_seed` / `model_parallel_manual_seed`; 0 when there was none.

    Args:
        cell (Cell): the outermost one; the names inside it are the keys.
        prefix (str): put in front of the names.
        values (Callable): `(name, parameter) -> Tensor`; None: `initial_values`.
    """
    for _, part in reversed(list(cell.cells_and_names())):
        if hasattr(part, "placement"):
            _name_globally(part)
    for name, parameter in cell.parameters_and_names():
        if isinstance(parameter, UnfilledParameter):
            parameter.name = name
            storage.set_data(parameter, (values or initial_values)(prefix + name, parameter))
            if parameter.keep_master_weight:
                whole = ParameterSharding.replicated(parameter.sharding.global_shape)
                parameter.master_weight = initial_values(prefix + name, parameter, whole)


def initial_values(name, parameter, sharding=None):
    """Initial values of a parameter under the name `name`: of its own part, or of `sharding`."""
    description = parameter.description
    initializer, dtype = description.initializer, description.dtype
    draw_dtype = dtype_name(description.draw_dtype or dtype)
    values = rng.initial_values(
        description.original_name(name),
        sharding or description.sharding,
        initializer.kind,
        initializer.value,
        rng.get_rng_tracker().initial_seed,
        draw_dtype,
    )
    return values if draw_dtype == dtype else values.astype(to_dtype(dtype))


def allocate_parameters(cell):
    """`initialize_parameters` with zeros, for a model whose values come from elsewhere: drawing them takes seconds."""
    initialize_parameters(cell, values=lambda name, parameter: _zeros(parameter))


def _zeros(parameter):
    return storage.zeros(tuple(parameter.sharding.local_shape), to_dtype(parameter.description.dtype))


def _numbered_prefix(cell):
    """Prefix with a number for a building block constructed alone; only blocks with parameters to fill are counted."""
    if not any(isinstance(parameter, UnfilledParameter) for parameter in cell.get_parameters()):
        return ""
    class_name = type(cell).__name__
    counts = rng.get_rng_tracker().initialized_names
    number = counts.get(class_name, 0)
    counts[class_name] = number + 1
    return f"{class_name}.{number}."
