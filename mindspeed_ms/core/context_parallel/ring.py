"""Ring attention: keys and values go round the ranks of a group while each attends to the part that it holds at the moment.

Forward: in step k a rank holds the part of the rank k places before it, passes it on and merges its share of the softmax by the
statistics of both. Backward: the parts go round once more, each with its gradients, to which every rank adds. In both
directions the next part travels while the present one is computed with.
"""

import numpy as np
from mindspore import dtype, mint

from mindspeed_ms import ops
from mindspeed_ms.core import storage
from mindspeed_ms.core.autograd import Function
from mindspeed_ms.core.comm import P2P
from mindspeed_ms.core.context_parallel.cutting import current_cut
from mindspeed_ms.core.context_parallel.visible_keys import columns


class _Travel:
    """Tensors on their way: sent to the next rank of the ring, received from the one before."""

    def __init__(self, group, tensors):
        following, before = (group.ranks[(group.rank + step) % group.size] for step in (1, -1))
        messages = [P2P.send(tensor, following) for tensor in tensors]
        messages += [P2P.recv(tensor.shape, tensor.dtype, before) for tensor in tensors]
        self._count = len(tensors)
        self._handle = group.batch_isend_irecv(messages)

    def arrive(self):
        """The tensors that were received (tuple)."""
        return tuple(self._handle.wait()[self._count :])


class RingMask:
    """What the queries of this rank see of each part of the keys.

    Args:
        first, stop (ndarray): int32 `[b or 1, queries]`, positions in the whole sequence.
        rows (Optional[Tensor]): `[b or 1, 1, queries, s]`, hidden besides.
        length (int): s.
    """

    def __init__(self, first, stop, rows, length):
        self.first, self.stop, self.rows, self.length = first, stop, rows, length

    def of_part(self, ring_rank):
        """(first, stop, mask) for the keys of a rank of the ring, in places of its part."""
        spans = current_cut().ring_spans(ring_rank, self.length)
        places = []
        for positions in (self.first, self.stop):
            # keys of the part before a position: the visible ones are neighbours in it, as they are in the sequence
            before = sum(np.clip(positions - start, 0, stop - start) for start, stop in spans)
            places.append(np.ascontiguousarray(before, np.int32))
        return *places, None if self.rows is None else columns(self.rows, spans)


class _RingAttention(Function):
    """Autograd Function; keeps query, key, value of this rank, the output and the statistics of the whole softmax."""

    @staticmethod
    def forward(ctx, query, key, value, sinks, mask, scale, group):
        part, result = (key, value), _with_sinks(query, value, sinks)
        for step in range(group.size):
            travel = _Travel(group, part) if step + 1 < group.size else None
            visible = mask.of_part((group.rank - step) % group.size)
            result = ops.attention_with_statistics(query, *part, *visible, scale=scale, before=result)
            if travel is not None:
                part = travel.arrive()
        output = ops.cast(result[0], query.dtype)
        ctx.save_for_backward(query, key, value, output, *result[1:], *(() if sinks is None else (sinks,)))
        ctx.mask, ctx.scale, ctx.group, ctx.has_sinks = mask, scale, group, sinks is not None
        return output

    @staticmethod
    def backward(ctx, output_grad):
        query, key, value, output, maximum, total, *sinks = ctx.saved_tensors
        group, part = ctx.group, (key, value)
        query_grad, gradients = None, None
        for step in range(group.size):
            travel = _Travel(group, part) if step + 1 < group.size else None
            visible = ctx.mask.of_part((group.rank - step) % group.size)
            before = None
            if query_grad is not None:
                before = query_grad, *(storage.zeros(t.shape, dtype.float32) for t in part)
            query_grad, *own = ops.attention_with_statistics_gradient(
                output_grad, query, *part, output, maximum, total, *visible, scale=ctx.scale, before=before
            )
            if step:
                own = [received + new for received, new in zip(gradients.arrive(), own)]
            if group.size > 1:
                gradients = _Travel(group, own)
            if travel is not None:
                part = travel.arrive()
        own = gradients.arrive() if group.size > 1 else own
        sinks_grad = _sinks_gradient(output_grad, output, maximum, total, *sinks) if sinks else None
        grads = (ops.cast(grad, t.dtype) for grad, t in zip((query_grad, *own), (query, key, value)))
        return *grads, sinks_grad, None, None, None


def _with_sinks(query, value, sinks):
    """Result of attending to the sinks alone, one score of each head that has no value; None without sinks."""
    if sinks is None:
        return None
    queries, batch, heads, _ = query.shape
    shape = batch, heads, queries
    scores = mint.broadcast_to(ops.cast(sinks, dtype.float32).reshape(1, heads, 1), shape).contiguous()
    return storage.zeros((queries, batch, heads, value.shape[3]), dtype.float32), scores, mint.ones(shape, dtype=dtype.float32)


def _sinks_gradient(output_grad, output, maximum, total, sinks):
    """Gradient of the sinks: less their probability times the mean gradient of each query's probabilities."""
    grad, out, scores = (ops.cast(t, dtype.float32) for t in (output_grad, output, sinks))
    mean = mint.permute((grad * out).sum(-1), (1, 2, 0))
    probability = mint.exp(scores.reshape(1, -1, 1) - maximum) / total
    return ops.cast(-(probability * mean).sum((0, 2)), sinks.dtype)


def ring_attention(query, key, value, mask, scale, group, sinks=None):
    """Attention of the queries of this rank's part to the keys of all parts; differentiable in query, key, value and sinks.

    Args:
        query (Tensor): `[s / ring, b, n, d]`; key, value: `[s / ring, b, groups, d or dv]`.
        mask (RingMask): what each query sees.
        scale (Optional[float]): of the scores; None: 1 / sqrt(d).
        group (ProcessGroup): the ring; of one rank: attention to the own part, which is everything.
        sinks (Optional[Tensor]): `[n]`, one more score of each head without a value.

    Returns:
        Tensor `[s / ring, b, n, dv]`, dtype of `query`.
    """
    return _RingAttention.apply(query, key, value, sinks, mask, scale, group)
