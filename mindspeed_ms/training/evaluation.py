"""Evaluation: forward passes without dropout, loss over all tokens."""

from mindspeed_ms.core import num_microbatches_calculator as calculator
from mindspeed_ms.core.pipeline_parallel import get_forward_backward_func
from mindspeed_ms.training.losses import LossReducer


def evaluate(forward_step_func, data_iterator, model, eval_iters, process_non_loss_data_func=None):
    """Mean losses of `eval_iters` global batches, of the full size also during a batch-size ramp-up.

    Args:
        forward_step_func (Callable): as in training.
        data_iterator: micro-batches.
        model (list[DistributedDataParallel]): the chunks; dropout is off inside and on again afterwards.
        eval_iters (int): how many global batches.
        process_non_loss_data_func (Optional[Callable]): if given, one more global batch is run for its data.

    Returns:
        (losses, non_loss_data): dict[str, float], equal on all ranks; list of what the loss function returned for
            non-loss data, one entry per micro-batch, or None.
    """
    forward_backward_func = get_forward_backward_func()
    reducer, reported, non_loss_data = LossReducer(), [], None

    def run(collect):
        return forward_backward_func(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=calculator.get_num_microbatches(),
            forward_only=True,
            collect_non_loss_data=collect,
        )

    for chunk in model:
        chunk.set_train(False)
    try:
        with calculator.full_batch_size():
            for _ in range(eval_iters):
                reported += run(False)
            if process_non_loss_data_func is not None:
                non_loss_data = run(True)
    finally:
        for chunk in model:
            chunk.set_train(True)
    return reducer.reduce(reported).values, non_loss_data
