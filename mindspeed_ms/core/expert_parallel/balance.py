"""Balance of a mixture of experts: auxiliary losses, z-loss, and the expert bias that needs no loss.

Source: Megatron core, `switch_load_balancing_loss_func`, `sequence_load_balancing_loss_func`, `z_loss_func`,
`get_updated_expert_bias`. Tokens of a sequence may be spread over the tensor- and context-parallel group.
"""

import numpy as np
from mindspore import Tensor, mint

from mindspeed_ms import ops
from mindspeed_ms.core import autograd, parallel_state, storage
from mindspeed_ms.core.expert_parallel.routing import normalized


def balance_scores(logits, score_function, topk):
    """Score of every expert for the balance, rows with sum 1: softmax, or sigmoid over its sum (itself for top-1)."""
    if score_function == "softmax":
        return ops.softmax(logits)
    scores = ops.sigmoid(logits)
    return normalized(scores) if topk > 1 else scores


def balance_loss(scores, routing_map, topk, coefficient, sequences=None):
    """Load balancing loss of this rank's tokens.

    `experts / (k t^2) * sum over experts of (sum of scores) * (tokens)`, times `coefficient`, with t tokens of the whole
    micro-batch; with `sequences` the same for each sequence alone, averaged over them. Over the ranks that share the
    sequences the losses and their gradients are parts of a sum.

    Args:
        scores (Tensor): `[t, experts]`, see `balance_scores`; t = positions x sequences, sequences fastest.
        routing_map (Tensor): float32 `[t, experts]`.
        topk (int): experts per token.
        coefficient (float): weight of the loss.
        sequences (Optional[int]): number of sequences for seq_aux_loss; None: tokens are counted over all of them.

    Returns:
        (Tensor, Tensor): this rank's part of the loss, differentiable in `scores`, and the whole loss without a gradient,
        divided by `coefficient`.
    """
    group = parallel_state.get_tensor_and_context_parallel_group()
    experts = scores.shape[-1]
    columns = experts * (sequences or 1)
    scores = scores.reshape((-1, columns))
    with autograd.no_grad():
        tokens = ops.bias_grad(routing_map.reshape((-1, columns)))
        sums = ops.bias_grad(autograd.detach(scores))
        both = group.all_reduce(ops.cat((tokens, sums))) if group.size > 1 else ops.cat((tokens, sums))
        tokens, sums = mint.narrow(both, 0, 0, columns), mint.narrow(both, 0, columns, columns)
        length = scores.shape[0] * group.size
        factor = experts / (topk * float(length) ** 2) / (sequences or 1)
        whole = ops.total(sums * tokens) * factor
        weights = tokens * (factor * coefficient)
    return ops.total(scores * weights), whole


def z_loss(logits):
    """Mean of the squared log-sum-exp of each token's logits, differentiable: the sum over the ranks that share the
    sequences is the mean over all of their tokens."""
    sums = ops.log_sum_exp(logits)
    group = parallel_state.get_tensor_and_context_parallel_group()
    return ops.total(sums * sums) * (1.0 / (sums.size * group.size))


def update_expert_biases(routers, rate):
    """Move the expert bias of each router one step of `rate` towards equal loads, and count from zero again.

    Counts are summed over all ranks that saw other tokens: data, context and tensor parallel.

    Args:
        routers (list): cells with `expert_bias` (Parameter `[experts]`) and `tokens_of_experts` (ndarray `[experts]`).
        rate (float): size of a step.
    """
    if not routers:
        return
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    counts = np.stack([router.tokens_of_experts for router in routers])
    if group.size > 1:
        counts = np.asarray(group.all_gather(counts)).reshape(group.size, *counts.shape).sum(axis=0)
    for router, count in zip(routers, counts):
        step = np.sign(count.mean() - count) * rate
        bias = router.expert_bias.asnumpy() + step.astype(np.float32)
        storage.write(router.expert_bias, Tensor(bias.astype(np.float32)))
        router.tokens_of_experts = np.zeros_like(router.tokens_of_experts)
