"""Routing of a mixture of experts: probabilities and the experts of each token from the router's logits.

Source: Megatron core, `moe_utils.topk_softmax_with_capacity`, `group_limited_topk`, `sinkhorn` and the router. Tokens are
`[t, ...]`, experts the last dimension; a routing map is a float32 Tensor of ones where a token goes to an expert.
"""

from dataclasses import dataclass, replace

import mindspore as ms
import numpy as np
from mindspore import Tensor

from mindspeed_ms import ops
from mindspeed_ms.core import autograd, parallel_state, storage
from mindspeed_ms.core.expert_parallel.capacity import expert_capacity, padded_to_capacity, within_capacity

_TINY = 1e-20
_SINKHORN_TOLERANCE, _SINKHORN_EPSILON = 1e-4, 1e-8


@dataclass(frozen=True)
class Routing:
    """Experts of each token.

    Attributes:
        probs (Tensor): `[t, experts]`, 0 where a token does not go to an expert; differentiable.
        sent (Tensor): routing map of what is sent to the experts: without dropped tokens, with padding.
        kept (Tensor): the same without padding: the tokens that the balance counts.
        chosen (Tensor): routing map before anything was dropped.
    """

    probs: Tensor
    sent: Tensor
    kept: Tensor
    chosen: Tensor

    def with_probs(self, probs):
        """The same with other probabilities."""
        return replace(self, probs=probs)


def route(logits, settings, expert_bias=None, training=False):
    """`Routing` of the router's logits.

    Args:
        logits (Tensor): float32 `[t, experts]`.
        settings (MoEConfig): score function, top-k, groups, capacity, balance type.
        expert_bias (Optional[Tensor]): float32 `[experts]`, added to sigmoid scores for the choice alone.
        training (bool): "sinkhorn" balances the choice in training only.
    """
    if settings.moe_router_load_balancing_type == "sinkhorn":
        gates, indices = _sinkhorn(logits, settings.moe_router_topk, training)
    else:
        gates, indices = _chosen(logits, settings, expert_bias)
    experts = logits.shape[-1]
    probs = ops.scatter_columns(gates, indices, experts)
    with autograd.no_grad():
        chosen = ops.scatter_columns(_ones(indices.shape), indices, experts)
    if settings.moe_expert_capacity_factor is None:
        return Routing(probs, chosen, chosen, chosen)
    return _dropped(probs, chosen, settings)


def _ones(shape):
    return storage.from_array(np.ones(tuple(shape), np.float32))


def _chosen(logits, settings, expert_bias):
    """(gates, indices), each `[t, k]`: probabilities of the chosen experts, and which they are."""
    topk = settings.moe_router_topk
    if settings.moe_router_score_function == "sigmoid":
        scores = ops.sigmoid(logits)
        indices = _top_experts(scores, settings, expert_bias)
        gates = ops.gather_columns(scores, indices)
        if topk > 1:
            gates = normalized(gates)
    elif settings.moe_router_pre_softmax:
        scores = ops.softmax(logits)
        indices = _top_experts(scores, settings)
        gates = ops.gather_columns(scores, indices)
        if settings.norm_topk_prob:
            gates = normalized(gates)
    else:
        indices = _top_experts(logits, settings)
        gates = ops.softmax(ops.gather_columns(logits, indices))
    if settings.moe_router_topk_scaling_factor:
        gates = gates * settings.moe_router_topk_scaling_factor
    return gates, indices


def normalized(scores):
    """Scores of each token, divided by their sum."""
    return scores / (_row_sums(scores) + _TINY)


def _row_sums(scores):
    """Sums over the last dimension, kept as one column: `[t, n]` -> `[t, 1]`."""
    return ops.matmul(scores, _ones((scores.shape[-1], 1)))


@autograd.no_grad()
def _top_experts(scores, settings, expert_bias=None):
    """The k experts of each token with the largest scores, int32 `[t, k]`; with groups, of the best groups only.

    A group's score is the sum of its `moe_router_group_score_topk` largest scores, by default k / (chosen groups).
    """
    if expert_bias is not None:
        scores = ops.add_bias(scores, expert_bias)
    topk, groups, chosen_groups = (settings.moe_router_topk, settings.moe_router_num_groups, settings.moe_router_group_topk)
    if not chosen_groups:
        return ops.top_k(scores, topk)[1]
    tokens, experts = scores.shape
    scored = settings.moe_router_group_score_topk or topk // chosen_groups
    best = ops.top_k(scores.reshape((tokens * groups, experts // groups)), scored)[0]
    group_scores = _row_sums(best).reshape((tokens, groups))
    indices = ops.top_k(group_scores, chosen_groups)[1]
    is_in = ops.scatter_columns(_ones(indices.shape), indices, groups).reshape((tokens * groups, 1))
    excluded = (1.0 - is_in) * float(np.finfo(np.float32).max)
    masked = scores.reshape((tokens * groups, experts // groups)) * is_in - excluded
    return ops.top_k(masked.reshape((tokens, experts)), topk)[1]


def _sinkhorn(logits, topk, training):
    scores = ops.sigmoid(logits) if topk == 1 else ops.softmax(logits)
    with autograd.no_grad():
        balanced = _balanced(logits) if training else autograd.detach(scores)
        indices = ops.top_k(balanced, topk)[1]
    return ops.gather_columns(scores, indices), indices


def _balanced(logits):
    """This rank's rows of `sinkhorn` over the tokens of whole sequences."""
    group = parallel_state.get_tensor_and_context_parallel_group()
    balanced = sinkhorn(group.all_gather(autograd.detach(logits)).asnumpy())
    return _map(balanced[group.rank * logits.shape[0] :][: logits.shape[0]])


def sinkhorn(cost):
    """Sinkhorn's balance of `exp(cost)`, float32 `[tokens, experts]`: rows and columns with equal sums."""
    cost = np.exp(np.asarray(cost, np.float32))
    rows, columns = cost.shape
    per_row, per_column = np.ones(rows, np.float32), np.ones(columns, np.float32)
    error = np.inf
    while error > _SINKHORN_TOLERANCE:
        per_row = np.float32(1 / rows) / ((per_column * cost).sum(axis=1) + np.float32(_SINKHORN_EPSILON))
        before = per_column
        per_column = np.float32(1 / columns) / ((per_row[:, None] * cost).sum(axis=0) + np.float32(_SINKHORN_EPSILON))
        error = np.abs(before - per_column).mean()
    return per_column * cost * per_row[:, None]


def _dropped(probs, chosen, settings):
    """`Routing` within the capacity of the experts, which counts the tokens of whole sequences in every layout."""
    group = parallel_state.get_tensor_and_context_parallel_group()
    with autograd.no_grad():
        pairs = ops.cat((autograd.detach(probs), chosen), dim=1)
        values = group.all_gather(pairs).asnumpy()
    tokens, experts = len(values), probs.shape[1]
    capacity = expert_capacity(tokens, settings.moe_router_topk, experts, settings.moe_expert_capacity_factor)
    is_chosen = values[:, experts:] != 0
    kept = within_capacity(values[:, :experts], is_chosen, capacity, settings.moe_token_drop_policy)
    sent = padded_to_capacity(kept, capacity) if settings.moe_pad_expert_input_to_capacity else kept
    own = slice(group.rank * probs.shape[0], (group.rank + 1) * probs.shape[0])
    kept_here = _map(kept[own])
    return Routing(probs * kept_here, kept_here if sent is kept else _map(sent[own]), kept_here, chosen)


def _map(array):
    """float32 Tensor of an array."""
    return Tensor(np.ascontiguousarray(array, np.float32), ms.float32)
