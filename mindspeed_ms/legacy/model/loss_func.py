"""LossWithMask: masked mean of the token losses. Public as `mindspeed_ms.training.loss_func.LossWithMask`."""

from mindspore import dtype, mint, nn

from mindspeed_ms import ops
from mindspeed_ms.core.tensor_parallel.mappings import reduce_from_context_parallel_region


class LossWithMask(nn.Cell):
    """Masked mean `sum(loss * mask) / sum(mask)` of a loss per token.

    Under context parallelism both sums run over the ranks that share the sequence: the result is the mean of the whole
    sequence, its gradient that of this rank's part.

    Args:
        loss_func (Callable): `(logits [..., v / tp], label [...]) -> loss [...]`; with `label_smoothing` as a third
            argument when that is set.
        label_smoothing (float): passed on to `loss_func` unless 0.

    Inputs: logits, label, loss_mask `[...]` (None counts every token). Output: float32 scalar; 0, with zero gradients,
    when the mask counts no token at all.

    Raises:
        ValueError: other arguments, or a mask whose shape is not that of the loss.
    """

    def __init__(self, loss_func, *args, label_smoothing=0.0, **kwargs):
        super().__init__()
        if args or kwargs:
            raise ValueError(f"LossWithMask does not know {list(args) + sorted(kwargs)}: expected label_smoothing.")
        self.loss_func = loss_func
        self.label_smoothing = label_smoothing

    def construct(self, logits, label, loss_mask=None):
        """See the class."""
        extra = (self.label_smoothing,) if self.label_smoothing else ()
        return self.mean(self.loss_func(logits, label, *extra), label, loss_mask)

    @staticmethod
    def mean(loss, label, loss_mask=None):
        """Masked mean (scalar) of the losses of the tokens; arguments as of the call."""
        loss = ops.cast(loss, dtype.float32)
        if loss_mask is None:
            loss_mask = label == label
        if tuple(loss_mask.shape) != tuple(loss.shape):
            raise ValueError(f"loss_mask has shape {tuple(loss_mask.shape)}, but the loss {tuple(loss.shape)}.")
        loss_mask = ops.cast(loss_mask, dtype.float32)
        total = reduce_from_context_parallel_region(ops.total(loss * loss_mask))
        count = reduce_from_context_parallel_region(ops.total(loss_mask))
        return total / (count + ops.is_zero(count))  # without a token: 0 / 1


class TokenLosses(LossWithMask):
    """The losses of the tokens themselves: float32 `[b, s]` of the model's `[s, b]`; this rank's part of the sequences under
    context parallelism. The mask stays with the caller."""

    @staticmethod
    def mean(loss, label, loss_mask=None):
        """See the class."""
        del label, loss_mask
        return mint.transpose(ops.cast(loss, dtype.float32), 0, 1).contiguous()
