"""Vocabulary-parallel cross entropy: the vocabulary is cut over the tensor-parallel group. Source: Megatron core."""

from mindspore import nn

from mindspeed_ms import ops
from mindspeed_ms.core import parallel_state
from mindspeed_ms.core.autograd import Function
from mindspeed_ms.core.tensor_parallel.utils import check_integer


class _VocabParallelCrossEntropy(Function):
    """Autograd Function: loss per token; keeps logits, their maximum and the sum of exponentials for the backward."""

    @staticmethod
    def forward(ctx, logits, target, label_smoothing, group, overwrite_logits):
        vocab = logits.shape[-1]
        start, stop = group.rank * vocab, (group.rank + 1) * vocab
        maximum = ops.cross_entropy_local_max(logits)
        if group.size > 1:
            maximum = group.all_reduce(maximum, op="max")
        sums = ops.cross_entropy_local_sums(logits, maximum, target, start, stop, label_smoothing)
        sum_exp, target_logit, sum_logits = sum_over_group(sums, group)
        loss = ops.cross_entropy_loss(sum_exp, target_logit, sum_logits, label_smoothing, vocab * group.size)
        ctx.save_for_backward(logits, maximum, sum_exp, target)
        ctx.span = (start, stop)
        ctx.label_smoothing = label_smoothing
        ctx.global_vocab = vocab * group.size
        ctx.overwrite_logits = overwrite_logits
        ctx.is_overwritten = False
        return loss

    @staticmethod
    def backward(ctx, grad_output):
        if ctx.is_overwritten:
            raise RuntimeError("the logits were overwritten by the first backward: a second one needs overwrite_logits=False.")
        ctx.is_overwritten = ctx.overwrite_logits
        logits, maximum, sum_exp, target = ctx.saved_tensors
        grad = ops.cross_entropy_gradient(
            logits,
            maximum,
            sum_exp,
            target,
            *ctx.span,
            grad_output,
            ctx.label_smoothing,
            ctx.global_vocab,
            in_place=ctx.overwrite_logits,
        )
        return grad, None, None, None, None


def sum_over_group(sums, group):
    """Sum the three local sums (the last may be None) over the ranks, in one message."""
    if group.size == 1:
        return sums
    present = [part for part in sums if part is not None]
    totals = group.all_reduce(ops.cat([part.reshape((1, *part.shape)) for part in present]))
    return tuple(totals[index] for index in range(len(present))) + (None,) * (len(sums) - len(present))


def vocab_parallel_cross_entropy(vocab_parallel_logits, target, label_smoothing=0.0, group=None, overwrite_logits=False):
    """Vocabulary-parallel cross entropy of each token.

    Args:
        vocab_parallel_logits (Tensor): `[..., v / tp]`, this rank's part of the vocabulary.
        target (Tensor): integer ids `[...]` of the whole vocabulary.
        label_smoothing (float): share of the target that is spread over the whole vocabulary, 0 <= x < 1.
        group (Optional[ProcessGroup]): default the tensor-parallel group.
        overwrite_logits (bool): let the backward write the gradient over the logits; only if they are not read later.

    Returns:
        Tensor: float32 `[...]`.

    Raises:
        ValueError: shapes that do not fit, a target that holds no integers, or a label smoothing outside the range.
    """
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing must be at least 0 and below 1, but got {label_smoothing}.")
    if tuple(vocab_parallel_logits.shape[:-1]) != tuple(target.shape):
        raise ValueError(
            f"logits of shape {tuple(vocab_parallel_logits.shape)} need a target of shape "
            f"{tuple(vocab_parallel_logits.shape[:-1])}, but got {tuple(target.shape)}."
        )
    check_integer("targets", target)
    group = parallel_state.get_tensor_model_parallel_group() if group is None else group
    return _VocabParallelCrossEntropy.apply(vocab_parallel_logits, target, label_smoothing, group, overwrite_logits)


class VocabParallelCrossEntropy(nn.Cell):
    """`vocab_parallel_cross_entropy` as a Cell; calls keep no state in it, so several backwards may be pending.

    Args:
        args, kwargs: none but `overwrite_logits` (see the function); others are refused.

    Inputs: `vocab_parallel_logits [..., v / tp]`, `target [...]`, `label_smoothing` 0.0. Output: float32 `[...]`.
    """

    def __init__(self, *args, overwrite_logits=False, **kwargs):
        super().__init__()
        if args or kwargs:
            raise ValueError(
                f"VocabParallelCrossEntropy takes no {list(args) or sorted(kwargs)}; label_smoothing goes with a call."
            )
        self.overwrite_logits = overwrite_logits

    def construct(self, vocab_parallel_logits, target, label_smoothing=0.0):
        """See the class."""
        return vocab_parallel_cross_entropy(
            vocab_parallel_logits, target, label_smoothing, overwrite_logits=self.overwrite_logits
        )
