"""Ulysses: ranks exchange parts of the sequence for heads; each attends to the whole sequence with some of the heads."""

from math import lcm

from mindspore import mint

from mindspeed_ms import ops
from mindspeed_ms.core.autograd import Function


def heads_per_rank(heads, ranks):
    """(number of heads of a rank after the exchange, how often each head is repeated before it).

    Groups of keys that are fewer than the ranks, or no multiple of them, are repeated as often as needed.
    """
    repeated = lcm(heads, ranks)
    return repeated // ranks, repeated // heads


def _to_heads(tensor, group):
    """`[s / u, b, n, d]` to `[s, b, n / u, d]`."""
    count, repeats = heads_per_rank(tensor.shape[2], group.size)
    if repeats == 1:
        parts = [mint.narrow(tensor, 2, rank * count, count) for rank in range(group.size)]
        return group.all_to_all(ops.cat(parts, dim=0))
    heads = [mint.narrow(tensor, 2, number // repeats, 1) for number in range(count * group.size)]
    parts = [ops.cat(heads[rank * count : (rank + 1) * count], dim=2) for rank in range(group.size)]
    return group.all_to_all(ops.cat(parts, dim=0))


def _to_sequence(tensor, group, heads):
    """`[s, b, n / u, d]` to `[s / u, b, n, d]`; repeated heads are summed to `heads`."""
    arrived = group.all_to_all(tensor)
    length = arrived.shape[0] // group.size
    parts = [mint.narrow(arrived, 0, rank * length, length) for rank in range(group.size)]
    joined = ops.cat(parts, dim=2)
    repeats = joined.shape[2] // heads
    if repeats == 1:
        return joined
    split = joined.reshape((*joined.shape[:2], heads, repeats, joined.shape[3]))
    total = mint.select(split, 3, 0)
    for number in range(1, repeats):
        total = total + mint.select(split, 3, number)
    return total.contiguous()


class _SequenceForHeads(Function):
    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group, ctx.heads = group, tensor.shape[2]
        return _to_heads(tensor, group)

    @staticmethod
    def backward(ctx, grad):
        return _to_sequence(grad, ctx.group, ctx.heads), None


class _HeadsForSequence(Function):
    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return _to_sequence(tensor, group, tensor.shape[2] * group.size)

    @staticmethod
    def backward(ctx, grad):
        return _to_heads(grad, ctx.group), None


def sequence_for_heads(tensor, group):
    """All-to-all `[s / u, b, n, d]` to `[s, b, n / u, d]` over the `u` ranks of `group`; differentiable."""
    return tensor if group.size == 1 else _SequenceForHeads.apply(tensor, group)


def heads_for_sequence(tensor, group):
    """All-to-all `[s, b, n / u, d]` to `[s / u, b, n, d]` over the `u` ranks of `group`; differentiable."""
    return tensor if group.size == 1 else _HeadsForSequence.apply(tensor, group)
