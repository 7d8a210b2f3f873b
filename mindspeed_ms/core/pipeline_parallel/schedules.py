"""Forward and backward of all micro-batches of a step. Source: Megatron core, `schedules.py`.

The loss is never multiplied on the tape: loss scale and 1/micro-batches go into the gradient that seeds the backward.
"""
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
from mindspore import Tensor

from mindspeed_ms.core import autograd, parallel_state


@dataclass
class ScheduleOptions:
    """What a schedule needs to know of the run.

    Attributes:
        calculate_per_token_loss (bool): the loss functions return sums over tokens; gradients are divided by the number
            of tokens of the global batch at the end instead of by micro-batches.
        grad_scale_func (Optional[Callable[[], float]]): the loss scale.
        finalize_model_grads_func (Optional[Callable]): called with (model chunks, number of tokens or None) after the
            last backward.
    """
    calculate_per_token_loss: bool = False
    grad_scale_func: Callable[[], float] | None = None
    finalize_model_grads_func: Callable | None = None


def get_forward_backward_func():
    """The schedule for this run's pipeline layout.

    Raises:
        ValueError: more than one pipeline stage; only the schedule without pipelining exists.
    """
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if stages > 1:
        raise ValueError(f"pipeline_model_parallel_size is {stages}: no pipeline schedule is available, expected 1.")
    return forward_backward_no_pipelining


def forward_backward_no_pipelining(*, forward_step_func, data_iterator, model, num_microbatches, seq_length=None,
                                   micro_batch_size=None, decoder_seq_length=None, forward_only=False,
                                   collect_non_loss_data=False, first_val_step=None, options=None):
    """Run every micro-batch forward and backward, one after the other.

    Args:
        forward_step_func (Callable): `(data_iterator, model) -> (output, loss_func)`; `loss_func(output)` returns
            `(loss, reduced)` or `(loss, num_tokens, reduced)` as in Megatron, `reduced` being what is reported.
        data_iterator (Iterator or list with one): gives the micro-batches.
        model (Cell or list with one): the model.
        num_microbatches (int): how many micro-batches.
        forward_only (bool): no backward (evaluation).
        collect_non_loss_data (bool): call `loss_func(output, non_loss_data=True)` and collect what it returns.
        options (Optional[ScheduleOptions]): loss scale, finalisation.
        seq_length, micro_batch_size, decoder_seq_length, first_val_step: of Megatron's signature; shapes are known from
            the tensors here.

    Returns:
        list: what the loss function reported, one entry per micro-batch.
    """
    del seq_length, micro_batch_size, decoder_seq_length, first_val_step
    options = options or ScheduleOptions()
    model, data_iterator = _only(model, "model"), _only(data_iterator, "data_iterator")
    no_sync = getattr(model, "no_sync", nullcontext)
    collected, total_tokens = [], 0.0
    for number in range(num_microbatches):
        is_last = number == num_microbatches - 1
        context = nullcontext() if is_last or forward_only else no_sync()
        with context, (autograd.no_grad() if forward_only else nullcontext()):
            loss, tokens = forward_step(forward_step_func, data_iterator, model, collected, collect_non_loss_data)
            if not forward_only:
                backward_step(loss, _seed(options, tokens, num_microbatches))
        total_tokens += tokens or 0.0
    if not forward_only and options.finalize_model_grads_func is not None:
        options.finalize_model_grads_func([model], total_tokens if options.calculate_per_token_loss else None)
    return collected


def forward_step(forward_step_func, data_iterator, model, collected, collect_non_loss_data=False):
    """Run one micro-batch forward and append what its loss function reports to `collected`.

    Returns:
        (loss, num_tokens): the tensor to start the backward from (None for non-loss data) and the tokens that the loss
        function counted, or None.
    """
    output, loss_func = forward_step_func(data_iterator, model)
    if collect_non_loss_data:
        collected.append(loss_func(output, non_loss_data=True))
        return None, None
    result = loss_func(output)
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise ValueError(f"the loss function returned {type(result).__name__}: expected (loss, reported) or (loss, "
                         "number of tokens, reported).")
    collected.append(result[-1])
    tokens = _as_float(result[1]) if len(result) == 3 else None
    return result[0], tokens


def backward_step(loss, seed):
    """Run the backward from a scalar loss; `seed` (float) is the gradient of the loss."""
    autograd.backward(loss, Tensor(np.full(loss.shape, seed, np.float32)).astype(loss.dtype))


def _seed(options, tokens, num_microbatches):
    """Gradient of the loss tensor: Megatron's division by tokens or micro-batches, times the loss scale."""
    scale = options.grad_scale_func() if options.grad_scale_func is not None else 1.0
    if options.calculate_per_token_loss:
        if tokens is None:
            raise ValueError("calculate_per_token_loss is set: the loss function must return (sum of losses, number "
                             "of tokens, reported).")
        return scale
    # three values mean a sum over tokens: the mean over the micro-batch is what is differentiated
    return scale / ((tokens or 1.0) if tokens is not None else 1.0) / num_microbatches


def _as_float(value):
    return float(value.asnumpy()) if isinstance(value, Tensor) else float(value)


def _only(value, name):
    if isinstance(value, (list, tuple)):
        if len(value) != 1:
            raise ValueError(f"{name} has {len(value)} entries: without pipelining expected one.")
        return value[0]
    return value
