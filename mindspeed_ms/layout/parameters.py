"""Parameters of a model on each rank, with global names and shards, from the ModelDescription alone.

`describe_parameters(model, coordinates)` composes the registered describers of `layout.describers`. Checkpoint tools,
conversion, `config check` and the planner read it; they build no model.
"""

from dataclasses import replace
from math import prod

from mindspeed_ms.layout import describers as _all_describers  # noqa: F401  (registers them)
from mindspeed_ms.layout.adapters import adapt
from mindspeed_ms.layout.describers.gpt import WORD_EMBEDDINGS, describe_embedding_copy
from mindspeed_ms.layout.describers.registry import RankParts, describer
from mindspeed_ms.layout.divisibility import check_model
from mindspeed_ms.layout.parameter_description import ParameterDescription
from mindspeed_ms.layout.ranks import Coordinates
from mindspeed_ms.layout.sharding import FlatSlice, Initializer, ParameterSharding, join, uncovered

__all__ = [
    "WORD_EMBEDDINGS",
    "FlatSlice",
    "Initializer",
    "ParameterDescription",
    "ParameterSharding",
    "count_active_parameters",
    "count_parameters",
    "describe_parameters",
    "describe_whole_model",
    "join",
    "uncovered",
]


def describe_parameters(model, coordinates=None, rank=None):
    """ParameterDescriptions of one rank, in module order.

    Args:
        model (ModelDescription): the model and its cut.
        coordinates (Coordinates | WorldLayout | None): place of the rank; a WorldLayout together with `rank`.
            None is the first rank.
        rank (Optional[int]): global rank, with a WorldLayout.

    Returns:
        list[ParameterDescription]

    Raises:
        LayoutError: a size that its parallel size does not divide, or layers that do not fit the stages.
    """
    if coordinates is None:
        coordinates = Coordinates()
    elif rank is not None:
        coordinates = coordinates.coordinates(rank)
    check_model(model)
    return _describe(model, RankParts.of(model, coordinates), model.stages, coordinates.pp)


def describe_whole_model(model):
    """ParameterDescriptions of the whole model on a single rank, in module order: list."""
    check_model(model)
    return _describe(model, RankParts.whole(model), model.whole_stages, 0)


def _describe(model, rank, stages, stage):
    """ParameterDescriptions of all chunks of a stage."""
    embedding, layer_of, head = (describer(part, model.architecture) for part in ("embedding", "layer", "head"))
    descriptions = []
    for chunk in range(stages.vpp):
        found = embedding(model, rank) if stages.has_embedding(stage, chunk) else []
        if model.mtp_num_layers and stages.has_head(stage, chunk) and not found:
            found = describe_embedding_copy(model, rank)
        for layer in stages.layers(stage, chunk):
            found += [replace(one, layer=layer) for one in layer_of(model, rank, layer)]
        found += head(model, rank) if stages.has_head(stage, chunk) else []
        descriptions += [replace(one, chunk=chunk) for one in found]
    return adapt(model, rank, descriptions)


def count_parameters(model):
    """Number of trained parameters of the whole model; a tied embedding counts once."""
    return sum(prod(one.sharding.global_shape) for one in describe_whole_model(model) if one.trainable)


def count_active_parameters(model):
    """Number of trained parameters that one token's forward uses: of the experts, those that it goes to."""
    trained = [one for one in describe_whole_model(model) if one.trainable]
    experts = sum(prod(one.sharding.global_shape) for one in trained if one.expert)
    others = sum(prod(one.sharding.global_shape) for one in trained if not one.expert)
    return others + experts * model.moe_router_topk // model.num_experts if experts else others
