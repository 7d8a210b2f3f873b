"""Registry of describers by model part and kind.

A describer is a function `(model, rank, ...) -> list[ParameterDescription]` with names relative to its part:

    part        kind                      called with
    embedding   model.architecture        (model, rank)
    layer       model.architecture        (model, rank, layer)
    head        model.architecture        (model, rank)
    attention   model.attention_type      (model, rank)
    mlp         "dense" or "experts"      (model, rank)
    adapter     of model.adapters         (weight, part, adapter): description and LayerPart of the weight of a targeted
                                          cell, settings; names relative to the cell
"""

from dataclasses import dataclass

from mindspeed_ms.layout.errors import LayoutError
from mindspeed_ms.layout.layer_parameters import LayerPart

PARTS = ("embedding", "layer", "head", "attention", "mlp", "adapter")
_DESCRIBERS = {part: {} for part in PARTS}


def register_describer(part, kind):
    """Decorator: register a describer of `part` for the kind `kind`."""

    def decorate(function):
        if _DESCRIBERS[part].setdefault(kind, function) is not function:
            raise ValueError(f"{part} '{kind}' has a describer already: choose another kind.")
        return function

    return decorate


def kinds(part):
    """Registered kinds of `part`."""
    return tuple(_DESCRIBERS[part])


def describer(part, kind):
    """Registered function of `part` and `kind`. LayoutError if there is none."""
    if kind not in _DESCRIBERS[part]:
        raise LayoutError(f"{part} '{kind}' is unknown, choose one of {list(_DESCRIBERS[part])}.")
    return _DESCRIBERS[part][kind]


@dataclass(frozen=True)
class RankParts:
    """Model parts that one rank holds.

    Attributes:
        tensor (LayerPart): of layers cut over the tensor-parallel group.
        expert_tensor (LayerPart): of experts, cut over the expert-tensor-parallel group.
        experts (range): global ids of the experts.
        is_pipelined (bool): the model has several stages: a tied head is a copy on the last one.
    """

    tensor: LayerPart
    expert_tensor: LayerPart
    experts: range
    is_pipelined: bool

    @classmethod
    def of(cls, model, at):
        """Model parts of the rank at the Coordinates `at`."""
        parallel, dtype = model.parallel, model.params_dtype
        count = model.num_experts // parallel.expert_model_parallel_size
        return cls(
            LayerPart(at.tp, parallel.tensor_model_parallel_size, dtype, parallel.cuts_sequence),
            LayerPart(at.expert_tp, parallel.expert_tensor_size, dtype, parallel.expert_tensor_size > 1),
            range(at.ep * count, (at.ep + 1) * count),
            model.stages.pp > 1,
        )

    @classmethod
    def whole(cls, model):
        """All parts of the model, as held by a single rank."""
        part = LayerPart(0, 1, model.params_dtype, model.parallel.cuts_sequence)
        return cls(part, part, range(model.num_experts), False)


def placed(prefix, descriptions):
    """Descriptions with their names inside the part `prefix`."""
    return [description.under(prefix) for description in descriptions]


def describe_linear(rank, name, linear):
    """A Linear at `name`."""
    return placed(name, linear.describe(rank.expert_tensor if linear.expert else rank.tensor))
