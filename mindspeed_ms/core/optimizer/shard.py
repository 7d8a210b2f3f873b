"""Optimizer shard: the part of a buffer that this rank updates, cut into runs for one operator call each."""

import math
from dataclasses import dataclass
from typing import Any

import mindspore as ms

from mindspeed_ms.core import storage


@dataclass(frozen=True)
class Piece:
    """Part of one parameter in a shard.

    Attributes:
        name (str): state-dict key.
        param (Parameter): the parameter.
        start, stop (int): elements of the shard.
        offset (int): element of the flattened parameter that `start` is.
        shape (tuple[int]): of the whole parameter.
        group (int): number of its parameter group.
    """

    name: str
    param: Any
    start: int
    stop: int
    offset: int
    shape: tuple
    group: int

    @property
    def is_whole(self):
        """Whether the whole parameter lies in the shard."""
        return self.stop - self.start == math.prod(self.shape)


@dataclass(frozen=True)
class Run:
    """Neighbouring elements of a shard with equal settings, given by `key`."""

    start: int
    stop: int
    key: Any


class OptimizerShard:
    """Optimizer shard: elements `start` to `stop` of a `ParamAndGradBuffer`.

    Without the distributed optimizer the one shard of a buffer is the whole of it; with it, a rank has one of each
    bucket.

    Args:
        buffer (ParamAndGradBuffer): where the parameters and gradients are.
        start, stop (int): the range.
        group_of (dict[int, int]): id of a parameter -> number of its group.

    Attributes:
        param, grad (Tensor): flat, over the buffer's memory.
        main (Tensor): flat float32 values that the update works on: `param` itself, or float32 masters of it.
        pieces (list[Piece]), runs (list[Run]): runs have the group's number as key and take in the padding between.
    """

    def __init__(self, buffer, start, stop, group_of):
        self.buffer = buffer
        self.start, self.stop = start, stop
        self.numel = stop - start
        self.param = buffer.slice_param(start, stop)
        self.grad = buffer.slice_grad(start, stop)
        self.pieces = self._make_pieces(group_of)
        self.runs = self.runs_by(lambda piece: piece.group)
        self.has_masters = buffer.param_dtype != ms.float32
        self._masters = storage.FlatBuffer(self.numel, ms.float32) if self.has_masters else None
        self.main = self._masters.tensor if self.has_masters else self.param
        self.copy_model_params_to_main_params()

    def _make_pieces(self, group_of):
        pieces = []
        for placed in self.buffer.layout.parameters:
            start, stop = max(placed.start, self.start), min(placed.stop, self.stop)
            if start < stop:
                param = self.buffer.params[placed.index]
                pieces.append(
                    Piece(
                        self.buffer.names[placed.index],
                        param,
                        start - self.start,
                        stop - self.start,
                        start - placed.start,
                        self.buffer.shapes[placed.index],
                        group_of[id(param)],
                    )
                )
        return pieces

    def runs_by(self, key_of):
        """Runs of neighbouring pieces with equal `key_of(piece)`; a piece with key None is left out."""
        runs, previous = [], None
        for piece in self.pieces:
            key = key_of(piece)
            if key is not None:
                start = runs.pop().start if key == previous else piece.start
                runs.append(Run(start, piece.stop, key))
            previous = key
        return runs

    def slice_grad(self, start, stop):
        """Flat Tensor over gradients of the shard."""
        return self.buffer.slice_grad(self.start + start, self.start + stop)

    def slice_main(self, start, stop, shape=None):
        """Tensor over the float32 values that the update works on."""
        if self.has_masters:
            return self._masters.slice(start, stop, shape)
        return self.buffer.slice_param(self.start + start, self.start + stop, shape)

    def copy_main_params_to_model_params(self):
        """Round the masters into the parameters."""
        if self.has_masters:
            storage.write(self.param, self.main)

    def copy_model_params_to_main_params(self):
        """Copy the parameters' values into the masters."""
        if self.has_masters:
            storage.write(self.main, self.param)

    @property
    def nbytes(self):
        """Bytes of the masters."""
        return self._masters.nbytes if self.has_masters else 0
