"""Tensors of a family's model: each as a slice of one of ours. Reading and writing follow the same list."""

import re
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.layout.parameters import describe_whole_model
from mindspeed_ms.layout.sharding import ParameterSharding

_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")


@dataclass(frozen=True)
class TensorPart:
    """Tensor of a family's model.

    Attributes:
        name (str): theirs.
        key (str): our tensor, of which it is a part.
        grouping (Optional[str]): of ours.
        sharding (ParameterSharding): which part.
        transposed (bool): stored with the last two axes swapped.
        slot (Optional[int]): of a tensor that holds all experts, along a first axis: which one.
        slots (int): how many.
        alternating (bool): stored with rows of gate and up alternating.
        is_copy (bool): a copy of what another part holds, which a layer of multi-token prediction has.
    """

    name: str
    key: str
    grouping: str | None
    sharding: ParameterSharding
    transposed: bool
    slot: int | None = None
    slots: int = 1
    alternating: bool = False
    is_copy: bool = False

    @property
    def shape(self):
        """Their shape, of the one expert in a tensor of all."""
        shape = self.sharding.local_shape
        return shape[::-1] if self.transposed else shape

    @property
    def stored_shape(self):
        """Shape of their whole tensor."""
        return self.shape if self.slot is None else (self.slots, *self.shape)

    def as_stored(self, values):
        """Our local tensor (array) in the order of their file."""
        if self.alternating:
            values = np.stack(np.split(values, 2), axis=1).reshape(values.shape)
        return np.ascontiguousarray(values.swapaxes(-1, -2) if self.transposed else values)

    def as_ours(self, values):
        """Inverse of `as_stored`."""
        values = values.swapaxes(-1, -2) if self.transposed else values
        if self.alternating:
            values = np.concatenate([values[0::2], values[1::2]])
        return np.ascontiguousarray(values)

    @property
    def numel(self):
        """Number of elements."""
        return prod(self.sharding.local_shape)


def tensor_parts(family, model):
    """TensorParts of a model in the order of our parameters: list.

    Args:
        family (Family): names.
        model (ModelDescription): the whole model; its parallel layout does not matter.

    Raises:
        CheckpointError: the family has no tensor for one of our parameters.
    """
    weights = {weight.ours: weight for weight in family.weights}
    parts, unknown = [], []
    for described in describe_whole_model(model):
        try:
            parts += _parts_of(weights, model, described)
        except KeyError:
            unknown.append(described.name)
    if unknown:
        raise CheckpointError(
            f"{family.name} models have no {', '.join(unknown[:3])}{' ...' if len(unknown) > 3 else ''}: the model is of "
            "another family, or has settings that this one does not know."
        )
    return parts + _copies(family, model, parts)


def _copies(family, model, parts):
    """Parts that each layer of multi-token prediction has once more."""
    first = model.stages.num_layers
    return [
        replace(part, name=family.further_copies[part.key].format(layer=layer), is_copy=True)
        for layer in range(first, first + (model.mtp_num_layers or 0))
        for part in parts
        if part.key in family.further_copies
    ]


def _parts_of(weights, model, described):
    """TensorParts of one of our parameters. KeyError: the family has no such tensor."""
    indices = {}

    def take(kind, match):
        indices[kind] = int(match[0])
        return f"{{{kind}}}"

    key, sharding = described.name, ParameterSharding.replicated(described.sharding.global_shape)
    pattern = _EXPERT.sub(lambda match: take("expert", match), _LAYER.sub(lambda match: take("layer", match), key))
    if key.startswith("mtp."):  # they are stored behind the model's own layers, whose names their inner layers have
        indices["layer"] += model.stages.num_layers
        pattern = pattern.replace("mtp.layers.{layer}.transformer_layer.", "language_model.encoder.layers.{layer}.")
    weight = weights[pattern]
    ranges = _ranges(weight, model, described)
    whole = ranges == [((0, sharding.global_shape[0]),)]
    parts = [
        TensorPart(
            name.format(**indices),
            key,
            described.grouping,
            sharding if whole else ParameterSharding(sharding.global_shape, 0, one),
            weight.transposed and len(sharding.global_shape) > 1,
        )
        for name, one in zip(weight.theirs, ranges)
    ]
    if not weight.stacked:
        return parts
    stack = {"slot": indices["expert"], "slots": model.num_experts, "alternating": weight.alternating}
    return [replace(part, **stack) for part in parts]


def _ranges(weight, model, described):
    """Ranges of rows of our tensor, one tuple per tensor of theirs."""
    size = described.sharding.global_shape[0]
    if described.grouping == "qkv":
        kinds = qkv_ranges(model)
        return [sum(kinds, ())] if len(weight.theirs) == 1 else list(kinds)
    if described.grouping == "gate_up" and len(weight.theirs) == 2:
        return [((0, size // 2),), ((size // 2, size),)]
    return [((0, size),)]


def qkv_ranges(model):
    """Rows of query, key and value in our qkv weight, `[q heads.., k, v]` per key-value head: three tuples of ranges."""
    width, heads = model.head_dim, model.num_attention_heads // model.query_groups
    queries, keys, values = [], [], []
    for group in range(model.query_groups):
        first = group * (heads + 2) * width
        queries.append((first, first + heads * width))
        keys.append((first + heads * width, first + (heads + 1) * width))
        values.append((first + (heads + 1) * width, first + (heads + 2) * width))
    return tuple(queries), tuple(keys), tuple(values)
