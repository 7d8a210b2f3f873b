"""Feed: new tokens of one sequence for ModelRunner.forward."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Feed:
    """New tokens of one sequence.

    Attributes:
        slot (int): cache slot of the sequence.
        start (int): position of the first new token; the positions before are in the slot.
        ids (sequence[int]): the tokens, at least one.
        wants (str): "last": the logits after the last token; "none": only the cache is filled.
    """

    slot: int
    start: int
    ids: Sequence[int]
    wants: str = "last"
