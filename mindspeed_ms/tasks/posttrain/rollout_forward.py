"""Log-probabilities and values of the answers of a rollout, by forward-only passes in the layout of the training."""

from contextlib import contextmanager
from functools import partial

import numpy as np

from mindspeed_ms.config.model_description import describe_model
from mindspeed_ms.core import comm, parallel_state
from mindspeed_ms.core import num_microbatches_calculator as calculator
from mindspeed_ms.core.pipeline_parallel import get_forward_backward_func
from mindspeed_ms.training.data_streams import to_tensor


def micro_batch_of(rollout, rows):
    """Micro-batch (dict of Tensors) of some answers of a rollout (dict of arrays, a row for each answer)."""
    batch = {name: values[rows] for name, values in rollout.items()}
    length = batch["tokens"].shape[1]
    batch["position_ids"] = np.tile(np.arange(length, dtype=np.int32), (len(rows), 1))
    return {name: to_tensor(value) for name, value in batch.items()}


def log_probabilities_of(trainer, rollout):
    """Log-probabilities of the answers' tokens by the weights of now: float32 `[n, s]`, 0 elsewhere; see `outputs_of`."""
    return -outputs_of(trainer, rollout)[0]


def outputs_of(trainer, rollout):
    """What the model of a trainer gives for the answers' tokens with the weights of now: float32 `[k, n, s]`, 0 elsewhere; the
    same on all ranks. k is 1 (losses), or 2 (losses, values) of a policy with a critic."""
    model = trainer.trainer.model
    with evaluating(model):
        found = forward_only(model, _forward, rollout, 1 + describe_model(trainer.all_config).has_critic)
    return found * rollout["loss_mask"]


def forward_only(model, forward, rollout, parts):
    """Outputs of a model for all answers, in steps of a global batch: float32 `[parts, n, s]`, the same on all ranks.

    Args:
        model (list[Cell]): this rank's chunks.
        forward (Callable): `(batch, chunk) -> output`, on the last stage `[parts * b, s]`.
        rollout (dict): see `micro_batch_of`.
        parts (int): as above.
    """
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    answers, length = rollout["tokens"].shape
    known, found = np.zeros((parts, answers, length), np.float32), []
    count, rows = calculator.get_num_microbatches(), calculator.get_micro_batch_size()
    for start in range(0, answers, count * rows * size):
        own = np.arange(start, start + count * rows * size).reshape(count, size, rows)[:, rank]
        outputs = get_forward_backward_func()(
            forward_step_func=partial(_step, forward),
            data_iterator=iter([micro_batch_of(rollout, row) for row in own]),
            model=model,
            num_microbatches=count,
            seq_length=length,
            micro_batch_size=rows,
            forward_only=True,
            collect_non_loss_data=True,
        )
        found += [(row, output.asnumpy().reshape(parts, len(row), -1)) for row, output in zip(own, outputs)]
    speaks = parallel_state.get_tensor_model_parallel_rank() == 0
    for part in comm.world_group().all_gather_object(found if speaks else []):
        for row, values in part:
            known[:, row] = values
    return known


def _step(forward, data_iterator, model):
    return forward(next(data_iterator), model), _as_it_is


def _forward(batch, model):
    return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=batch["loss_mask"])


def _as_it_is(output, non_loss_data=True):
    del non_loss_data
    return output


@contextmanager
def evaluating(model):
    """Context manager: the chunks of a model neither drop out nor recompute."""
    modes = [chunk.training for chunk in model]
    for chunk in model:
        chunk.set_train(False)
    try:
        yield
    finally:
        for chunk, mode in zip(model, modes):
            chunk.set_train(mode)
