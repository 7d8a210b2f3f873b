"""Base of all parallel cells: parameters that know their place in the whole model, and their initialisation.

A parameter is created with the right local shape and a description (`Parameter.sharding`, `.initializer`, ...). When
the outermost cell has been constructed, every parameter gets its values by its *global* name: the same weights in every
layout, and no rank ever holds a whole tensor.
"""

import functools

from mindspore import Parameter, nn, ops

from mindspeed_ms.core import rng, storage
from mindspeed_ms.core.device import dtype_name, initialize_device, to_dtype
from mindspeed_ms.layout.sharding import ParameterSharding

_construction_depth = 0


class ParallelCell(nn.Cell):
    """`nn.Cell` whose parameters are initialised once its outermost constructor returns.

    Class attribute `names_are_global`: True when the names inside the cell are those of the state dictionary, as in a
    whole model (or a stage of it). Building blocks say False: used outside of a model, each gets a number, so that two
    equal layers do not start with equal weights. The numbers restart when the random states are seeded.
    """

    names_are_global = True

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            cls.__init__ = _initializing(cls.__init__)


def _initializing(constructor):
    """`constructor`, followed by the initialisation of the parameters when it is the outermost one."""

    @functools.wraps(constructor)
    def construct_and_initialize(self, *args, **kwargs):
        global _construction_depth
        if _construction_depth == 0:
            initialize_device()
        _construction_depth += 1
        try:
            constructor(self, *args, **kwargs)
        finally:
            _construction_depth -= 1
        if _construction_depth == 0:
            initialize_parameters(self)

    return construct_and_initialize


def create_parameter(
    sharding,
    dtype,
    initializer,
    *,
    tensor_model_parallel=False,
    sequence_parallel=False,
    shared_embedding=False,
    is_expert=False,
    grouping=None,
    shared_with=None,
    keep_master_weight=False,
    draw_dtype=None,
):
    """A Parameter of `sharding.local_shape`, to be filled by `initialize_parameters`.

    Args:
        sharding (ParameterSharding): the whole parameter and the part that this rank holds.
        dtype: MindSpore dtype or its name.
        initializer (Initializer): how it starts.
        tensor_model_parallel (bool): cut over the tensor-parallel group; False when all its ranks hold the same.
        sequence_parallel (bool): its gradient is summed over the tensor-parallel group (sequence parallelism).
        shared_embedding (bool): one of the two copies of a tied word embedding.
        is_expert (bool): belongs to an expert.
        grouping (Optional[str]): "qkv", "gate_up", "vocab" or None, see `layout.ParameterDescription`.
        shared_with (Optional[tuple[str, str]]): for the copy of a tied parameter the end of its own name and what stands
            there in the original's; both are then drawn alike.
        draw_dtype: dtype that the initial values are rounded to before they get the parameter's; default none.
        keep_master_weight (bool): also keep the whole initial tensor as `parameter.master_weight` (tests).
    """
    parameter = Parameter(ops.zeros(tuple(sharding.local_shape), to_dtype(dtype)))
    parameter.sharding = sharding
    parameter.initializer = initializer
    parameter.tensor_model_parallel = tensor_model_parallel
    parameter.sequence_parallel = sequence_parallel
    parameter.shared_embedding = shared_embedding
    parameter.is_expert = is_expert
    parameter.grouping = grouping
    parameter.shared_with = shared_with
    parameter.keep_master_weight = keep_master_weight
    parameter.draw_dtype = draw_dtype
    parameter.is_initialized = False
    return parameter


def initialize_parameters(cell):
    """Give every parameter of `cell` that was not filled yet its initial values, by its global name.

    The seed is that of `set_seed` / `model_parallel_manual_seed`; 0 when there was none.
    """
    prefix = ""
    for name, parameter in cell.parameters_and_names():
        if getattr(parameter, "is_initialized", True):
            continue
        if not cell.names_are_global and not prefix:
            prefix = _numbered_prefix(type(cell).__name__)
        parameter.name = name
        _fill(prefix + name, parameter)


def _numbered_prefix(class_name):
    counts = rng.get_rng_tracker().initialized_names
    number = counts.get(class_name, 0)
    counts[class_name] = number + 1
    return f"{class_name}.{number}."


def _fill(name, parameter):
    if parameter.shared_with is not None:
        own, original = parameter.shared_with
        name = name.removesuffix(own) + original
    storage.set_data(parameter, _initial_values(name, parameter, parameter.sharding))
    if parameter.keep_master_weight:
        whole = ParameterSharding.replicated(parameter.sharding.global_shape)
        parameter.master_weight = _initial_values(name, parameter, whole)
    parameter.is_initialized = True


def _initial_values(name, parameter, sharding):
    initializer = parameter.initializer
    seed, dtype = rng.get_rng_tracker().initial_seed, dtype_name(parameter.dtype)
    draw_dtype = dtype_name(parameter.draw_dtype or dtype)
    values = rng.initial_values(name, sharding, initializer.kind, initializer.value, seed, draw_dtype)
    return values if draw_dtype == dtype else values.astype(parameter.dtype)
