"""Gradient clipping (`MegatronOptimizer` applies it), and the global gradient norm, which counts each element once.

Source: Megatron core, `clip_grads.py`. A parameter that is copied over tensor-parallel ranks counts on the first of
them, a tied embedding on the first pipeline stage. Squares are summed in float64, over ranks in rank order.
"""

import math

import mindspore as ms
import numpy as np

from mindspeed_ms import ops
from mindspeed_ms.core import parallel_state, storage
from mindspeed_ms.core.tensor_parallel.cell import description_of


def counts_in_norm(param):
    """Whether this rank's copy of a parameter is the one that counts in norms."""
    return description_of(param).counts_in_norm(parallel_state.get_coordinates())


class ModelStatistics:
    """Norm and number of zeros of all gradients (or weights) of a model, in any layout.

    Args:
        shards (list[OptimizerShard]): this rank's part.
        slice_of (Callable[[OptimizerShard, int, int], Tensor]): which values of a shard; default: its gradients.
    """

    def __init__(self, shards, slice_of=None):
        slice_of = slice_of or (lambda shard, start, stop: shard.slice_grad(start, stop))
        self._local, self._padding = {False: [], True: []}, {False: 0, True: 0}
        self._copies = []  # values that another rank counts
        self._groups = {False: [parallel_state.get_model_parallel_group()]}
        if self._any_rank_has_experts(shards):
            self._groups[True] = [parallel_state.get_expert_tensor_model_pipeline_parallel_group()]
        for shard in shards:
            self._add(shard, slice_of, shard.buffer.is_expert)

    def _add(self, shard, slice_of, expert):
        runs = shard.runs_by(lambda piece: True if counts_in_norm(piece.param) else None)
        self._local[expert] += [slice_of(shard, run.start, run.stop) for run in runs]
        copies = shard.runs_by(lambda piece: None if counts_in_norm(piece.param) else True)
        self._copies += [slice_of(shard, run.start, run.stop) for run in copies]
        self._padding[expert] += sum(run.stop - run.start for run in runs) - sum(
            piece.stop - piece.start for piece in shard.pieces if counts_in_norm(piece.param)
        )
        sharding = shard.buffer.sharding
        if sharding is not None and sharding.group not in self._groups[expert]:
            # the ranks' parts first: all of them have buffers of this kind or none has
            self._groups[expert].insert(0, sharding.group)

    @staticmethod
    def _any_rank_has_experts(shards):
        own = np.array([float(any(shard.buffer.is_expert for shard in shards))])
        return bool(_sum_over(parallel_state.get_model_parallel_group(), own)[0])

    def _totals(self, measure, padding=False, copies=0.0):
        """Sums over all ranks: of the measure, and of `copies`."""
        totals = np.zeros(2)
        for expert, groups in self._groups.items():
            values = sum((measure(tensor) for tensor in self._local[expert]), 0.0)
            local = np.array([values - self._padding[expert] * padding, copies], np.float64)
            for group in groups:
                local = _sum_over(group, local)
            totals += local
        return totals

    def norm_and_finite(self):
        """Global L2 norm (float), and whether every element on every rank is finite, copies included; equal on all ranks.

        Copies of a parameter may overflow on one rank alone. Source: Megatron core, `_unscale_main_grads_and_check_for_nan`.
        """
        copies = sum((ops.sum_of_squares(tensor) for tensor in self._copies), 0.0)
        totals = self._totals(ops.sum_of_squares, copies=copies)
        return _root(totals[0]), bool(np.isfinite(totals).all())

    def norm(self):
        """Global L2 norm (float), equal on all ranks; inf or nan if any element that counts is."""
        return _root(self._totals(ops.sum_of_squares)[0])

    def num_zeros(self):
        """Number of elements that are exactly zero (int)."""
        return int(self._totals(ops.count_zeros, padding=True)[0])


def _sum_over(group, values):
    """Sum a small float64 array over a group, in rank order."""
    if group.size == 1:
        return values
    return group.all_gather(values).reshape(group.size, -1).T.copy().sum(axis=1)


def _root(total):
    return math.sqrt(total) if total >= 0.0 else float(total)


def clip_coefficient(norm, clip_grad):
    """Clipping factor `min(1, clip_grad / (norm + 1e-6))`; 1 without clipping."""
    return min(clip_grad / (norm + 1.0e-6), 1.0) if clip_grad > 0.0 else 1.0


def clip_by_value(shards, limit):
    """Clip every gradient to [-limit, limit], in place."""
    for shard in shards:
        storage.write(shard.grad, ops.cast(shard.grad, ms.float32).clip(-limit, limit))
