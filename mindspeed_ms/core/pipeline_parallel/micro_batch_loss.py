"""Loss of a micro-batch (differentiated, reported, tokens), the backward scale, and auxiliary losses on any stage.

Source: Megatron core, the loss part of `schedules.forward_step` and `MoEAuxLossAutoScaler`.
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mindspore import Tensor, float32

from mindspeed_ms import ops
from mindspeed_ms.core import parallel_state
from mindspeed_ms.core.autograd import Function, detach, no_grad

MAIN_LOSS = "lm loss"


@dataclass(frozen=True)
class MicroBatchLoss:
    """Loss of a micro-batch on this rank in three values. No value is read to the host before the step ends.

    Under context parallelism a mean is that of the whole sequence, its gradient that of this rank's part: `BackwardScale`
    holds the factor that makes up for the average over these ranks. The reported values never carry it.

    Attributes:
        differentiated (Tensor): scalar that the backward starts from: a mean, or the sum over `tokens`.
        reported (dict): values by name; see `training.losses.LossReducer`.
        tokens (Optional[float or Tensor]): tokens of this rank's part of the sequences that `differentiated` sums over;
            None: `differentiated` is a mean.
    """

    differentiated: Any
    reported: dict
    tokens: Any = None

    @classmethod
    def of(cls, result):
        """Convert a loss function's result: a MicroBatchLoss, Megatron's `(loss, reported)` or `(loss, tokens, reported)`, or
        the loss alone, a mean.

        Raises:
            ValueError: anything else.
        """
        if isinstance(result, cls):
            return result
        if isinstance(result, Tensor) and result.size == 1:
            return cls(result, {MAIN_LOSS: detach(result)})
        if not isinstance(result, tuple) or len(result) not in (2, 3):
            raise ValueError(
                f"the loss function returned {_kind_of(result)}: expected a scalar Tensor, (loss, reported) or (loss, "
                "number of tokens, reported)."
            )
        return cls(result[0], result[-1], result[1] if len(result) == 3 else None)


def _kind_of(result):
    return f"a Tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__


@dataclass(frozen=True)
class BackwardScale:
    """Initial gradient of each loss: loss scale, number of micro-batches and context-parallel size as one factor.

    The loss is never multiplied on the tape: this object holds every factor.

    Attributes:
        loss_scale (float): of fp16.
        num_microbatches (int): micro-batches of the step; a mean is divided by them.
        per_token (bool): losses are sums over tokens, which `finalize_model_grads` divides by the tokens of the global
            batch: only the loss scale multiplies them.
        context_parallel_size (int): gradients are averaged over the ranks that share a sequence, where the gradient of a
            mean is a sum over them.
    """

    loss_scale: float = 1.0
    num_microbatches: int = 1
    per_token: bool = False
    context_parallel_size: int = field(default_factory=parallel_state.get_context_parallel_world_size)

    def of(self, tokens=None):
        """The scale of a loss that is a mean (None), or the sum over `tokens` (number or Tensor): a float, or where tokens are
        a Tensor a scalar Tensor, which is not read to the host."""
        if self.per_token:
            return self.loss_scale
        factor = self.loss_scale * self.context_parallel_size
        if isinstance(tokens, Tensor):
            with no_grad():
                counted = ops.cast(tokens.reshape(()), float32)
                counted = counted + ops.is_zero(counted)  # without a token: 0 / 1
                return factor / (counted * self.num_microbatches)
        return factor / (1.0 if tokens is None else float(tokens) or 1.0) / self.num_microbatches

    def of_main_loss(self, loss):
        """The scale (float or scalar Tensor) of a `MicroBatchLoss`.

        Raises:
            ValueError: `per_token`, and the loss says no number of tokens.
        """
        if self.per_token and loss.tokens is None:
            raise ValueError(
                "calculate_per_token_loss is set: the loss function must return (sum of losses, number of tokens, reported)."
            )
        return self.of(loss.tokens)


_published = BackwardScale(context_parallel_size=1)


def get_backward_scale():
    """`BackwardScale` of the running step; 1 outside of a step."""
    return _published


@contextlib.contextmanager
def published(scale):
    """Context manager: `get_backward_scale` returns `scale`."""
    global _published
    before, _published = _published, scale
    try:
        yield
    finally:
        _published = before


_recorded = None  # {name: (sum, count)} of the forward that runs; None in a backward, which may recompute forwards


@contextlib.contextmanager
def recording_auxiliary_losses(record):
    """Inside, a forward of one micro-batch: named auxiliary losses are added to the dict `record`, (sum, count) by name."""
    global _recorded
    before, _recorded = _recorded, record
    try:
        yield
    finally:
        _recorded = before


def attach_auxiliary_loss(activation, loss, name=None):
    """Add a loss to the training where the main loss is not at hand, on any stage.

    It is differentiated when the backward reaches `activation`, with the scale of a main loss: a mean per micro-batch, or
    with `calculate_per_token_loss` a sum over its tokens.

    Args:
        activation (Tensor): what the model goes on with; it needs a gradient.
        loss (Tensor): the auxiliary loss, scalar.
        name (Optional[str]): report it under this name: the mean over all losses of the name in the step (layers,
            micro-batches, data-parallel ranks); a forward that is recomputed counts once. None: it is not reported.

    Returns:
        Tensor: `activation`.
    """
    if name is not None:
        record_auxiliary(name, detach(loss))
    return _AuxiliaryLoss.apply(activation, loss)


def records_auxiliary():
    """Whether a forward runs whose auxiliary values are counted: not in a backward, which may recompute forwards."""
    return _recorded is not None


def record_auxiliary(name, value):
    """Report a value of this forward under `name`, see `attach_auxiliary_loss`.

    Args:
        name (str): as above.
        value (float or scalar Tensor): equal on the tensor-parallel ranks.
    """
    if _recorded is not None:
        total, count = _recorded.get(name, (0.0, 0))
        _recorded[name] = value + total, count + 1


class _AuxiliaryLoss(Function):
    @staticmethod
    def forward(ctx, activation, loss):
        ctx.shape, ctx.dtype = loss.shape, loss.dtype
        return activation

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, filled(ctx.shape, _published.of(), ctx.dtype)


def filled(shape, value, dtype):
    """Tensor of one value: a number or a scalar Tensor."""
    if isinstance(value, Tensor):
        return ops.cast(value, dtype).broadcast_to(tuple(shape))
    return ops.cast(Tensor(np.full(shape, value, np.float32)), dtype)


def as_float(value):
    """Float of a number or a one-element Tensor."""
    return float(value.asnumpy().reshape(-1)[0]) if isinstance(value, Tensor) else float(value)
