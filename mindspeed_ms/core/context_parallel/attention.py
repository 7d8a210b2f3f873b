"""Attention over a sequence that is cut over ranks: Ulysses, ring, or both, by the sizes of their groups."""

from mindspore import mint

from mindspeed_ms.core import parallel_state
from mindspeed_ms.core.context_parallel.ring import RingMask, ring_attention
from mindspeed_ms.core.context_parallel.ulysses import heads_for_sequence, sequence_for_heads
from mindspeed_ms.core.context_parallel.visible_keys import VisibleKeys, band


def context_parallel_attention(query, key, value, mask=None, lower=None, upper=None, scale=None, sinks=None):
    """Attention of this rank's part of the sequences to all of them; differentiable in query, key, value and sinks.

    The ranks of a Ulysses group exchange their parts of the sequence for heads, then the ring passes keys and values around;
    either group may have one rank. Without context parallelism it is attention in blocks, with masks of packed documents that
    need no `[s, s]` matrix.

    Args:
        query (Tensor): `[s / cp, b, n, d]`; key, value: `[s / cp, b, groups, d or dv]`, with n / ulysses degree an integer.
        mask (Optional[VisibleKeys or Tensor]): see `VisibleKeys`; None hides nothing.
        lower, upper (Optional[int]): the query at position i sees positions i + lower to i + upper; None: no limit.
        scale (Optional[float]): of the scores; None: 1 / sqrt(d).
        sinks (Optional[Tensor]): `[n]`, one more score of each head without a value.

    Returns:
        Tensor `[s / cp, b, n * dv]`, dtype of `query`.
    """
    ulysses, ring = parallel_state.get_ulysses_group(), parallel_state.get_ring_group()
    length = query.shape[0] * ulysses.size * ring.size
    lower, upper = -length if lower is None else lower, length if upper is None else upper
    mask = VisibleKeys.of(mask)
    limits = band(lower, upper, length) if mask is None else mask.within(lower, upper, length)
    query, key, value = (sequence_for_heads(t, ulysses) for t in (query, key, value))
    if sinks is not None and ulysses.size > 1:
        count = sinks.shape[0] // ulysses.size
        sinks = mint.narrow(sinks, 0, ulysses.rank * count, count)
    ring_mask = RingMask(*limits, None if mask is None else mask.rows, length)
    output = heads_for_sequence(ring_attention(query, key, value, ring_mask, scale, ring, sinks), ulysses)
    return output.reshape((*output.shape[:2], -1))
