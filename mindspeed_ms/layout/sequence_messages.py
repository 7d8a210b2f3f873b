"""Bytes that context parallelism sends for the attention of a layer."""

from dataclasses import dataclass
from math import lcm

GRADIENT_BYTES = 4
"""Gradients of keys and values travel in float32, whatever the keys are."""


@dataclass(frozen=True)
class AttentionMessages:
    """Bytes that one rank sends for one layer's attention.

    Attributes:
        forward, backward (int): in one forward and one backward.
    """

    forward: int
    backward: int


def attention_messages(cut, length, batch, heads, groups, head_size, value_size=None, item_bytes=4):
    """AttentionMessages of a SequenceCut.

    Ulysses: of queries, keys, values and output, (u - 1) / u of each; of keys and values also what repeats them where there are
    fewer groups than ranks. Ring: keys and values of a rank's group (r - 1) times in each direction, and their gradients r
    times back to where they belong.

    Args:
        cut (SequenceCut): the cut.
        length, batch (int): s and b of whole sequences.
        heads, groups (int): of queries and of keys, per tensor-parallel rank.
        head_size, value_size (int): elements of a query or key, and of a value (default: the same).
        item_bytes (int): bytes of an element.
    """
    value_size = head_size if value_size is None else value_size
    u, r = cut.ulysses, cut.ring
    repeated = lcm(groups, u) if u > 1 else groups
    per_token = heads * (head_size + value_size) + repeated * (head_size + value_size)
    exchanged = length // cut.size * batch * per_token * item_bytes * (u - 1) // u
    elements = length // r * batch * (repeated // u) * (head_size + value_size)
    passed = (r - 1) * elements * item_bytes
    returned = r * elements * GRADIENT_BYTES if r > 1 else 0
    return AttentionMessages(exchanged + passed, exchanged + passed + returned)
