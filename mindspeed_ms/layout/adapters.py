"""Adapters (such as LoRA) in the description: parameters that they add to linears, and the frozen rest of the model."""

import re
from dataclasses import dataclass, replace
from itertools import groupby

from mindspeed_ms.layout.describers.registry import describer


@dataclass(frozen=True)
class Adapter:
    """Adapter of one kind with its settings.

    Attributes:
        kind (str): kind of the "adapter" describer.
        targets (tuple[str]): regular expressions; cells whose whole global name matches one get the adapter.
        rank (int): rank of the added matrices.
        alpha (float): see `scale`.
        dropout (float): dropout of the adapter's input.
        is_rank_stabilized (bool): rsLoRA, see `scale`.
    """

    kind: str
    targets: tuple[str, ...]
    rank: int
    alpha: float
    dropout: float = 0.0
    is_rank_stabilized: bool = False

    @property
    def scale(self):
        """What the added product is multiplied by: alpha / rank, of rsLoRA alpha / sqrt(rank)."""
        return self.alpha / (self.rank**0.5 if self.is_rank_stabilized else self.rank)

    def fits(self, cell):
        """Whether the cell of this global name is a target."""
        return any(re.fullmatch(pattern, cell) for pattern in self.targets)


def adapt(model, rank, descriptions):
    """Descriptions of the model with its adapters: what they add to their targets is trained, the base is frozen.

    Of several adapters of one kind that fit a cell the first counts: special settings come before general ones.

    Args:
        model (ModelDescription): read: `adapters`.
        rank (RankParts): parts that the rank holds.
        descriptions (list[ParameterDescription]): of the model without adapters, in module order.

    Returns:
        list[ParameterDescription]: in module order.
    """
    if not model.adapters:
        return descriptions
    result = []
    for cell, own in groupby(descriptions, lambda one: one.name.rpartition(".")[0]):
        own = list(own)
        result += [replace(one, trainable=one.trainable and is_trained_beside(one.name)) for one in own]
        chosen = adapters_of(model, cell)
        for weight in (one for one in own if one.name == f"{cell}.weight"):
            part = rank.expert_tensor if weight.expert else rank.tensor
            for adapter in chosen:
                added = describer("adapter", adapter.kind)(weight, part, adapter)
                result += [_beside(weight, cell, one) for one in added]
    return result


def is_trained_beside(name):
    """Whether a parameter of the base (by its global name) is trained beside adapters: the head of a reward model, which
    starts anew."""
    return name.startswith("reward_head.")


def adapters_of(model, cell):
    """Adapters that the cell of this global name gets: list[Adapter], one of each kind."""
    return list({adapter.kind: adapter for adapter in reversed(model.adapters) if adapter.fits(cell)}.values())


def _beside(weight, cell, added):
    """The description of an added parameter in the cell of `weight`."""
    placed = added.under(cell, weight.local_name.rpartition(".")[0])
    return replace(placed, expert=weight.expert, layer=weight.layer, chunk=weight.chunk)
