"""Token dispatchers: tokens travel to the ranks of their experts and back. Source: Megatron core, `token_dispatcher.py`.

A dispatcher is a function `(tokens, routing) -> Dispatched`. Ranks of the expert-tensor group hold parts of the same experts:
each of them works on the tokens of all, and their partial results are summed on the way back.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from mindspore import Tensor, mint

from mindspeed_ms import ops
from mindspeed_ms.core import autograd, parallel_state, storage
from mindspeed_ms.core.tensor_parallel.mappings import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

_DISPATCHERS = {}


@dataclass(frozen=True)
class Dispatched:
    """Tokens at their experts.

    Attributes:
        tokens (Tensor): `[rows, h]`, sorted by the local experts.
        counts (ndarray): rows of each local expert.
        combine (Callable): `(output [rows, h]) -> [tokens, h]`: the experts' outputs, weighted by their probabilities and
            summed, at the ranks that the tokens came from.
    """

    tokens: Tensor
    counts: np.ndarray
    combine: Callable


def register_dispatcher(*names):
    """Decorator: the dispatcher of these values of `moe_token_dispatcher_type`."""

    def decorate(function):
        _DISPATCHERS.update(dict.fromkeys(names, function))
        return function

    return decorate


def dispatcher(name):
    """The dispatcher of a `moe_token_dispatcher_type`. ValueError for one that does not exist here."""
    if name not in _DISPATCHERS:
        raise ValueError(f"moe_token_dispatcher_type '{name}' is not available, choose one of {list(_DISPATCHERS)}.")
    return _DISPATCHERS[name]


# alltoall_seq routes whole sequences on each rank, for the same numbers
@register_dispatcher("alltoall", "alltoall_seq")
def exchange_tokens(tokens, routing):
    """Each token goes to the ranks of its experts only: all-to-all over the expert-parallel group.

    Args:
        tokens (Tensor): `[t, h]`.
        routing (Routing): of these tokens.
    """
    order, counts = ops.expert_order(routing.sent)
    rows = ops.permute(tokens, order)
    probs = ops.permute_probs(routing.probs, order, counts)
    plan = _ExchangePlan.of(counts)

    def combine(output):
        return ops.unpermute(plan.back(output), order, tokens.shape[0], ops.cast(probs, output.dtype))

    return Dispatched(plan.there(rows), plan.counts, combine)


@dataclass(frozen=True)
class _ExchangePlan:
    """Sizes of an exchange of rows sorted by expert.

    Attributes:
        sent, received (list[int]): rows for and from each rank of the expert-parallel group.
        gathered (list[int]): rows of each rank of the expert-tensor group after the exchange.
        order (Optional[Tensor]): order of the arrived rows by local expert; None if they are sorted already.
        counts (ndarray): rows of each local expert.
    """

    sent: list
    received: list
    gathered: list
    order: Tensor | None
    counts: np.ndarray

    @classmethod
    def of(cls, counts):
        """The plan for `counts`, this rank's rows for each expert of the model."""
        ep, tp = parallel_state.get_expert_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()
        sent = counts.reshape(ep.size, -1)
        if ep.size * tp.size == 1:
            return cls([int(counts.sum())], [int(counts.sum())], [int(counts.sum())], None, counts)
        # arrived [tp, ep, local experts]: rows from each rank of the two groups
        everyone = _gathered(np.concatenate([[tp.rank, ep.rank], counts]))
        arrived = np.zeros((tp.size, ep.size, sent.shape[1]), np.int64)
        for tp_rank, ep_rank, *of_experts in everyone.tolist():
            arrived[tp_rank, ep_rank] = np.reshape(of_experts, sent.shape)[ep.rank]
        chunks = arrived.reshape(-1, sent.shape[1])
        return cls(
            sent.sum(axis=1).tolist(),
            arrived[tp.rank].sum(axis=1).tolist(),
            arrived.sum(axis=(1, 2)).tolist(),
            _order_of_chunks(chunks) if len(chunks) > 1 and sent.shape[1] > 1 else None,
            chunks.sum(axis=0),
        )

    def there(self, rows):
        """Rows of this rank's tokens -> rows of its experts."""
        ep, tp = parallel_state.get_expert_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()
        rows = all_to_all(ep, rows, self.received, self.sent)
        rows = gather_from_sequence_parallel_region(rows, group=tp, output_split_sizes=self.gathered)
        return rows if self.order is None else ops.permute(rows, self.order)

    def back(self, rows):
        """The way back of `there`; partial results of the expert-tensor group are summed."""
        ep, tp = parallel_state.get_expert_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()
        if self.order is not None:
            rows = ops.unpermute(rows, self.order, rows.shape[0])
        rows = reduce_scatter_to_sequence_parallel_region(rows, group=tp, input_split_sizes=self.gathered)
        return all_to_all(ep, rows, self.sent, self.received)


def _gathered(values):
    """int64 values of every rank of the expert-tensor and expert-parallel group: `[ranks, n]`."""
    group = parallel_state.get_expert_tensor_and_model_parallel_group()
    return np.asarray(group.all_gather(values.astype(np.int64))).reshape(group.size, -1)


def _order_of_chunks(chunks):
    """Order by expert of rows that lie as chunks `[source, expert]`, sources first: Tensor `[rows]`."""
    ends = chunks.cumsum().reshape(chunks.shape)
    starts = ends - chunks
    order = [
        np.arange(starts[source, expert], ends[source, expert])
        for expert in range(chunks.shape[1])
        for source in range(chunks.shape[0])
    ]
    return storage.from_array(np.concatenate(order).astype(np.int32))


@register_dispatcher("allgather")
def gather_tokens(tokens, routing):
    """Every rank of the expert groups gathers all tokens and keeps those of its experts.

    Args: as `exchange_tokens`; each rank has the same number of tokens.
    """
    group = parallel_state.get_expert_tensor_and_model_parallel_group()
    ep = parallel_state.get_expert_model_parallel_group()
    with autograd.no_grad():
        sent = group.all_gather(routing.sent)
    probs = gather_from_sequence_parallel_region(routing.probs, group=group)
    gathered = gather_from_sequence_parallel_region(tokens, group=group)
    local = sent.shape[1] // ep.size
    order, counts = ops.expert_order(mint.narrow(sent, 1, ep.rank * local, local).contiguous())
    probs = ops.permute_probs(mint.narrow(probs, 1, ep.rank * local, local).contiguous(), order, counts)

    def combine(output):
        summed = ops.unpermute(output, order, gathered.shape[0], ops.cast(probs, output.dtype))
        return reduce_scatter_to_sequence_parallel_region(summed, group=group)

    return Dispatched(ops.permute(gathered, order), counts, combine)
