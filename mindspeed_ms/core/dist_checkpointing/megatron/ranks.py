"""Parameters of the file of one model-parallel rank, under core names and in Megatron's order."""

from dataclasses import dataclass

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.megatron import names
from mindspeed_ms.layout.parameter_description import ParameterDescription
from mindspeed_ms.layout.parameters import describe_parameters
from mindspeed_ms.layout.ranks import WorldLayout, world_unit_of


@dataclass(frozen=True)
class FileParameter:
    """Parameter in a file.

    Attributes:
        core (str): name in its chunk, layers by their index there.
        key (str): our key; for a tied copy that of the word embeddings.
        description (ParameterDescription): shape, cut and flags on this rank.
    """

    core: str
    key: str
    description: ParameterDescription

    @property
    def chunk(self):
        """Virtual pipeline chunk."""
        return self.description.chunk

    @property
    def sharding(self):
        """ParameterSharding on this rank."""
        return self.description.sharding

    @property
    def file_shape(self):
        """Shape in a file: experts of one tensor have two axes, [h, experts * ffn] and [experts * ffn, h]."""
        shape = self.sharding.local_shape
        if len(shape) != 3:
            return shape
        experts, rows, columns = shape
        return (rows, experts * columns) if self.core.endswith("weight1") else (experts * rows, columns)

    @property
    def is_copy(self):
        """Whether it is the last stage's copy of the word embeddings."""
        return self.description.shared_with is not None

    @property
    def is_expert(self):
        """Whether it belongs to the optimizer of experts (with expert parallelism)."""
        return self.description.expert


def file_places(model):
    """{(tensor, pipeline, expert): Coordinates} of the ranks that write a file: the first one with each place."""
    parallel = model.parallel
    world = WorldLayout.from_description(parallel, world_unit_of(parallel))
    places = {}
    for rank in range(world.world_size):
        at = world.coordinates(rank)
        places.setdefault((at.tp, at.pp, at.ep if parallel.expert_model_parallel_size > 1 else 0), at)
    return places


def parameters_of(model, at, style=names.CORE, experts=names.ENGINE_GROUPED):
    """FileParameters of the file of the rank at `at` (Coordinates), by chunk and in Megatron's order.

    Raises:
        CheckpointError: a parameter that Megatron's models do not have.
    """
    stages = model.stages
    result = []
    for description in describe_parameters(model, at):
        index = None
        if description.layer is not None:
            index = stages.layer_slots(at.pp, description.chunk).index(description.layer)
        try:
            core = names.core_name_of(description.local_name, index)
        except KeyError:
            raise CheckpointError(f"{description.name} is no parameter of a model of Megatron.") from None
        result.append(FileParameter(core, description.shared_with or description.name, description))
    return sorted(result, key=lambda one: (one.chunk, *names.module_order(one.core, style, experts)))
