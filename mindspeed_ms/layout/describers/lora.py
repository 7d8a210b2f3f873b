"""Describer of low-rank adapters (LoRA): `lora_a [rank, in]` and `lora_b [out, rank]` beside the weight of a linear."""

from mindspeed_ms.layout.describers.registry import register_describer
from mindspeed_ms.layout.parameter_description import ParameterDescription
from mindspeed_ms.layout.sharding import Initializer, ParameterSharding

LORA_NAMES = ("lora_a", "lora_b")


def is_lora(key):
    """Whether a key of the state dictionary is of a low-rank adapter."""
    return key.rpartition(".")[2] in LORA_NAMES


def is_linear(weight):
    """Whether a ParameterDescription is the weight of a column- or row-parallel linear of a layer, not of an expert."""
    is_matrix = len(weight.sharding.global_shape) == 2 and weight.sharding.axis is not None
    return is_matrix and weight.tensor_parallel and weight.grouping != "vocab" and not weight.expert


@register_describer("adapter", "lora")
def describe_lora(weight, part, adapter):
    """Parameters of an adapter; none for a weight that is no linear's.

    A starts normal with the variance of PEFT's uniform values, 1 / (3 * in), B with zeros. Of a column-parallel linear A is
    replicated and B cut like the weight's rows; of a row-parallel one A is cut like its columns and B replicated.
    """
    if not is_linear(weight):
        return []
    (rows, columns), axis, ranges = weight.sharding.global_shape, weight.sharding.axis, weight.sharding.ranges
    cuts = [ParameterSharding.replicated(shape) for shape in ((adapter.rank, columns), (rows, adapter.rank))]
    cuts[1 - axis] = ParameterSharding(cuts[1 - axis].global_shape, axis, ranges)
    initializers = Initializer.normal((3 * columns) ** -0.5), Initializer.zeros()
    return [
        ParameterDescription(
            name,
            sharding,
            part.dtype,
            initializer,
            tensor_parallel=sharding.axis is not None,
            sequence_parallel=sharding.axis is None and part.sequence_parallel,
            grouping=weight.grouping if name == "lora_b" else None,
        )
        for name, sharding, initializer in zip(LORA_NAMES, cuts, initializers)
    ]
