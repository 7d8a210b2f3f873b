"""Losses of a step: loss function, token count, and reduction of the reported losses over all ranks.

The reported loss is reduced by one collective over the world, with sums in float64 in rank order.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mindspore import Tensor, dtype

from mindspeed_ms import ops
from mindspeed_ms.core import autograd, comm, parallel_state
from mindspeed_ms.core import num_microbatches_calculator as calculator
from mindspeed_ms.core.pipeline_parallel.micro_batch_loss import MAIN_LOSS, MicroBatchLoss, as_float
from mindspeed_ms.core.tensor_parallel.mappings import reduce_from_context_parallel_region


def loss_function(tokens, per_token, output, non_loss_data=False, loss_mask=None):
    """MicroBatchLoss of a model that returns its mean loss.

    Args:
        tokens (float or Tensor): tokens of this rank's part of the sequences, see `count_tokens`.
        per_token (bool): differentiate the sum over tokens.
        output (Tensor or tuple): what the model returned; the loss is its first part.
        non_loss_data (bool): return the output as it is.
        loss_mask (Optional[Tensor]): `[b, s]`, of the batch; shows samples without tokens.

    Returns:
        MicroBatchLoss: or `output`, with `non_loss_data`.

    Raises:
        ValueError: the first part is no scalar Tensor.
    """
    if non_loss_data:
        return output
    loss = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(loss, Tensor) or loss.size != 1:
        shape = getattr(loss, "shape", type(loss).__name__)
        raise ValueError(
            f"the model returned {shape} as its loss: expected a scalar Tensor (or it first in a tuple). "
            "A model that returns logits needs labels in the batch, or a forward_step_func."
        )
    reported = {MAIN_LOSS: TokenMean(autograd.detach(loss), tokens, loss_mask)}
    if not per_token:
        return MicroBatchLoss(loss, reported)
    return MicroBatchLoss(loss * _tokens_of_whole_sequences(tokens), reported, tokens)


def count_tokens(batch):
    """Tokens of a local batch that the loss is averaged over: the sum of `loss_mask` (a scalar float32 Tensor, counted where
    the mask is and read after the step), else the elements of `labels` or `tokens` (float)."""
    mask = batch.get("loss_mask")
    if mask is not None:
        return ops.total(ops.cast(mask if isinstance(mask, Tensor) else Tensor(np.asarray(mask)), dtype.float32))
    for name in ("labels", "tokens", "input_ids"):
        if batch.get(name) is not None:
            return float(batch[name].size)
    return float(next((value.size for value in batch.values() if hasattr(value, "size")), 1))


def _tokens_of_whole_sequences(tokens):
    """Number of tokens, summed over the ranks that share the sequences."""
    if isinstance(tokens, Tensor):
        return reduce_from_context_parallel_region(tokens)
    return tokens * parallel_state.get_context_parallel_world_size()


@dataclass(frozen=True)
class TokenMean:
    """Reported mean loss over all tokens of the sequences; `tokens` of them are on this rank.

    Both may be scalar Tensors, which are read after the step. `loss_mask` `[b, s]` is the mask that the tokens were counted
    with, if there is one: it shows the samples without any.
    """

    value: Tensor
    tokens: Any
    loss_mask: Any = None

    def sum_and_count(self):
        """Share of this rank: (sum of the losses, number of tokens)."""
        tokens = as_float(self.tokens)
        return as_float(self.value) * tokens, tokens

    def tokens_of_samples(self):
        """Tokens of each sample on this rank, where the mask is not zero: int array `[b]`."""
        mask = self.loss_mask.asnumpy() if isinstance(self.loss_mask, Tensor) else np.asarray(self.loss_mask)
        return np.count_nonzero(mask.reshape(len(mask) if mask.ndim > 1 else 1, -1), axis=1)


@dataclass(frozen=True)
class StepLosses:
    """Reduced losses of a step, equal on all ranks.

    Attributes:
        values (dict[str, float]): mean over all tokens (or micro-batches) of the step, by name. A name that no
            rank reported in this step, or over no token, is left out; the main loss, the first name, is NaN then.
        tokens (float): tokens of the first of them.
        not_finite (list[tuple[int, int]]): (global rank, micro-batch) of each loss that was NaN or infinite.
        stop_requested (list[int]): ranks that ask to end after this step.
        bad_gradients (list[int]): ranks whose gradients held NaN or infinity before the reduction, where that is checked.
        samples_without_tokens (int): samples whose labels are all masked.
        has_tokens (bool): False: the main loss was reported, but over no token at all.
    """

    values: dict
    tokens: float = 0.0
    not_finite: list = field(default_factory=list)
    stop_requested: list = field(default_factory=list)
    bad_gradients: list = field(default_factory=list)
    samples_without_tokens: int = 0
    has_tokens: bool = True


class LossReducer:
    """Reduction of the reported losses over all ranks.

    Every micro-batch reports a dict. Its values are a `TokenMean`, a pair (sum, count) of this rank's part, or a number
    that is averaged over micro-batches. Names may come and go: all ranks agree on new ones in the step that brings them,
    those of the last pipeline stage first.
    """

    def __init__(self):
        self._names = []

    def reduce(self, reported, stop_requested=False, bad_gradients=False):
        """Reduce the reported losses and error flags of a step over all ranks.

        Args:
            reported (list[dict]): this rank's micro-batches.
            stop_requested (bool): this rank asks to end.
            bad_gradients (bool): this rank's gradients hold NaN or infinity.

        Returns:
            StepLosses: equal on all ranks.
        """
        local, not_finite, tokens_of_samples = self._sum_locally(reported)
        without_tokens = _samples_without_tokens(tokens_of_samples)
        local, without_tokens = (local, without_tokens) if self._counts() else ({}, 0)
        flags = [float(stop_requested), float(not_finite), float(bad_gradients), float(without_tokens)]
        gathered = self._gather_values(flags, local)
        if gathered[:, len(flags)].any():
            self._agree_on_names(local)
            gathered = self._gather_values(flags, local)
        sums = gathered[:, len(flags) + 1 :].sum(axis=0).reshape(-1, 2)
        values = {
            name: float(total / count) if count else math.nan
            for place, (name, (total, count)) in enumerate(zip(self._names, sums))
            if count or not place
        }
        return StepLosses(
            values,
            float(sums[0, 1]) if len(sums) else 0.0,
            [(rank, int(row[1])) for rank, row in enumerate(gathered) if row[1] >= 0],
            [rank for rank, row in enumerate(gathered) if row[0]],
            [rank for rank, row in enumerate(gathered) if row[2]],
            int(gathered[:, 3].sum()),
            not (gathered[:, 3].any() and len(sums) and not sums[0, 1]),
        )

    def _gather_values(self, flags, local):
        """All ranks' values, float64 `[ranks, flags + 1 + 2 * names]`: flags, 1 for new names, (sum, count) per name."""
        vector = [*flags, float(any(name not in self._names for name in local))]
        for name in self._names:
            vector += local.get(name, (0.0, 0.0))
        return self._gather(np.array(vector, np.float64))

    @staticmethod
    def _sum_locally(reported):
        local, not_finite, tokens_of_samples = {}, -1, []
        for number, losses in enumerate(reported):
            for place, (name, value) in enumerate(losses.items()):
                total, count = _sum_and_count(value)
                if not math.isfinite(total) and not_finite < 0:
                    not_finite = number
                old = local.get(name, (0.0, 0.0))
                local[name] = (old[0] + total, old[1] + count)
                if isinstance(value, TokenMean) and value.loss_mask is not None:
                    tokens_of_samples.append(value.tokens_of_samples())
                elif not place and isinstance(value, (TokenMean, tuple, list)):  # the main loss; others may have no count
                    tokens_of_samples.append(np.full(calculator.get_micro_batch_size(), count))
        return local, not_finite, tokens_of_samples

    def _agree_on_names(self, local):
        is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        everyone = comm.world_group().all_gather_object((not is_last, list(local)))
        everyone.sort(key=lambda entry: entry[0])  # the main loss comes first
        self._names = list(dict.fromkeys([*self._names, *(name for _, names in everyone for name in names)]))

    @staticmethod
    def _counts():
        """Whether this rank's losses enter the sum: only tensor-parallel rank 0 (the other tensor ranks hold copies)."""
        return parallel_state.get_tensor_model_parallel_rank() == 0

    @staticmethod
    def _gather(vector):
        world = comm.world_group()
        if world.size == 1:
            return vector.reshape(1, -1)
        return np.asarray(world.all_gather(vector)).reshape(world.size, -1)


def _sum_and_count(value):
    if isinstance(value, TokenMean):
        return value.sum_and_count()
    parts = value if isinstance(value, (tuple, list)) else np.ravel(value.asnumpy() if isinstance(value, Tensor) else value)
    array = [as_float(part) for part in parts]
    if len(array) == 2:
        return array[0], array[1]
    if len(array) != 1:
        raise ValueError(f"a reported loss has {len(array)} values: expected one, or a pair (sum, count).")
    return array[0], 1.0


def _samples_without_tokens(tokens_of_samples):
    """Number of samples without a token (int), counted by the first of the ranks that share their sequences."""
    group = parallel_state.get_context_parallel_group()
    tokens = np.concatenate(tokens_of_samples).astype(np.float64) if tokens_of_samples else np.zeros(0)
    if tokens.size and group.size > 1:
        tokens = np.asarray(group.all_gather(tokens)).reshape(group.size, -1).sum(axis=0)
    return int((tokens == 0).sum()) if group.rank == 0 else 0
