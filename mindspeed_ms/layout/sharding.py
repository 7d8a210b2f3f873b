"""Sharding of a parameter: the part of the global tensor that one rank holds, and its initializer.

`ParameterSharding` cuts a tensor along one axis (tensor parallelism), `FlatSlice` cuts the local tensor again by a flat
range (distributed optimizer, ZeRO). Both can `split` a global array and be `join`ed again; numpy is imported only then.
"""

import itertools
from dataclasses import dataclass
from math import prod

_BLOCKS = {2: "gate and up"}  # number of blocks -> their meaning
INITIALIZER_KINDS = ("normal", "ones", "zeros", "constant")


@dataclass(frozen=True)
class Initializer:
    """Initializer of a parameter.

    Attributes:
        kind (str): one of "normal", "ones", "zeros", "constant".
        value (float): standard deviation of "normal", the value of "constant", unused otherwise.

    Raises:
        ValueError: unknown kind, or a negative standard deviation.
    """

    kind: str
    value: float = 0.0

    def __post_init__(self):
        if self.kind not in INITIALIZER_KINDS:
            raise ValueError(f"Initializer kind '{self.kind}' is unknown, choose one of {list(INITIALIZER_KINDS)}.")
        if self.kind == "normal" and self.value < 0:
            raise ValueError(f"Initializer 'normal' needs a standard deviation >= 0, but got {self.value}.")

    @classmethod
    def normal(cls, std):
        """Normal distribution with mean 0 and standard deviation `std`."""
        return cls("normal", float(std))

    @classmethod
    def constant(cls, value):
        """Constant initializer: every element is `value`; 0 and 1 become the kinds "zeros" and "ones"."""
        value = float(value)
        if value == 0.0:
            return cls("zeros")
        if value == 1.0:
            return cls("ones")
        return cls("constant", value)

    @classmethod
    def zeros(cls):
        """Initializer with zeros."""
        return cls("zeros")

    @classmethod
    def ones(cls):
        """Initializer with ones."""
        return cls("ones")


def _merged(ranges):
    """`ranges` with touching neighbours merged, so that equal shards compare equal."""
    result = []
    for start, stop in ranges:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return tuple(result)


def _part(size, index, count, axis):
    """Bounds `(start, stop)` of the `index`-th of `count` equal parts of `size`."""
    if not 0 <= index < count:
        raise ValueError(f"shard index {index} must be in [0, {count}).")
    if size % count:
        raise ValueError(f"axis {axis} of size {size} cannot be cut into {count} equal shards.")
    part = size // count
    return index * part, (index + 1) * part


@dataclass(frozen=True)
class ParameterSharding:
    """Shard of a parameter on one rank: index ranges of one axis of the global tensor.

    Attributes:
        global_shape (tuple[int]): shape of the whole parameter.
        axis (Optional[int]): the axis that is cut; None when every rank holds all of it.
        ranges (tuple[(start, stop)]): the ranges along `axis` that the rank holds, concatenated in this order.
            Ranges that touch are merged. Empty when `axis` is None.
        leading (Optional[(start, stop)]): held range of the first axis, if that is cut beside `axis`: the experts of a rank
            in a tensor of all experts. None for all.

    Raises:
        ValueError: axis outside the shape, empty, overlapping or out-of-range ranges.
    """

    global_shape: tuple[int, ...]
    axis: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    leading: tuple[int, int] | None = None

    def __post_init__(self):
        object.__setattr__(self, "global_shape", tuple(int(size) for size in self.global_shape))
        if self.axis is None:
            if self.ranges or self.leading:
                raise ValueError(f"ranges {self.ranges or self.leading} need an axis.")
            return
        dimensions = len(self.global_shape)
        if not -dimensions <= self.axis < dimensions:
            raise ValueError(f"axis {self.axis} is outside the shape {self.global_shape}.")
        object.__setattr__(self, "axis", self.axis % dimensions)
        object.__setattr__(self, "ranges", _merged((int(start), int(stop)) for start, stop in self.ranges))
        self._check_ranges()
        if self.leading is not None:
            self._check_leading()

    def _check_leading(self):
        start, stop = (int(place) for place in self.leading)
        if self.axis == 0 or not 0 <= start < stop <= self.global_shape[0]:
            raise ValueError(
                f"leading ({start}, {stop}) needs a cut of a later axis and must lie in axis 0 of size {self.global_shape[0]}."
            )
        object.__setattr__(self, "leading", None if (start, stop) == (0, self.global_shape[0]) else (start, stop))

    def _inside(self):
        """The sharding along `axis`, relative to the rows in `leading`."""
        start, stop = self.leading
        return ParameterSharding((stop - start, *self.global_shape[1:]), self.axis, self.ranges)

    def _check_ranges(self):
        size = self.global_shape[self.axis]
        if not self.ranges:
            raise ValueError(f"a shard along axis {self.axis} needs at least one range.")
        for start, stop in self.ranges:
            if not 0 <= start < stop <= size:
                raise ValueError(f"range ({start}, {stop}) is empty or outside axis {self.axis} of size {size}.")
        ordered = sorted(self.ranges)
        for (_, stop), (start, _) in itertools.pairwise(ordered):
            if start < stop:
                raise ValueError(f"ranges {self.ranges} of axis {self.axis} overlap.")

    @classmethod
    def replicated(cls, global_shape):
        """Sharding of a replicated parameter: every rank holds all of it."""
        return cls(tuple(global_shape))

    @classmethod
    def contiguous(cls, global_shape, axis, index, count, stride=1):
        """Sharding of part `index` of `count` equal parts along `axis`, of each of `stride` equal blocks.

        Raises:
            ValueError: the axis does not divide.
        """
        global_shape = tuple(global_shape)
        size = global_shape[axis]
        if size % stride:
            raise ValueError(
                f"axis {axis} of size {size} cannot hold {_BLOCKS.get(stride, f'{stride} blocks')} of the same size."
            )
        block = size // stride
        start, stop = _part(block, index, count, axis)
        return cls(global_shape, axis, tuple((first + start, first + stop) for first in range(0, size, block)))

    @classmethod
    def gated(cls, global_shape, axis=0, index=0, count=1):
        """Sharding of part `index` of `count` of a `[gate; up]` matrix: the rank holds `[gate_index; up_index]`.

        Raises:
            ValueError: the axis is odd, or its half does not divide by `count`.
        """
        return cls.contiguous(global_shape, axis, index, count, stride=2)

    def of_rows(self, start, stop):
        """This sharding restricted to rows `start..stop` of axis 0 (a rank's experts)."""
        return ParameterSharding(self.global_shape, self.axis, self.ranges, (start, stop))

    @property
    def local_shape(self):
        """Shape of the rank's part."""
        if self.axis is None:
            return self.global_shape
        if self.leading is not None:
            return self._inside().local_shape
        length = sum(stop - start for start, stop in self.ranges)
        return self.global_shape[: self.axis] + (length,) + self.global_shape[self.axis + 1 :]

    @property
    def numel(self):
        """Number of local elements."""
        return prod(self.local_shape)

    @property
    def is_whole(self):
        """True when the rank holds every element in the global order."""
        return self.axis is None or (self.leading is None and self.ranges == ((0, self.global_shape[self.axis]),))

    def flat_ranges(self, start=0, stop=None):
        """Ranges, in the flattened global tensor, of elements `start..stop` of the flattened (row-major) local tensor.

        Args:
            start (int): first local element.
            stop (Optional[int]): one after the last; None is the end of the local tensor.

        Returns:
            list[(int, int)]: global `(start, stop)` ranges in local order; their lengths add up to `stop - start`.

        Raises:
            ValueError: the range leaves the local tensor.
        """
        numel = self.numel
        stop = numel if stop is None else stop
        if not 0 <= start <= stop <= numel:
            raise ValueError(f"flat range ({start}, {stop}) leaves the local tensor of {numel} elements.")
        if start == stop:
            return []
        if self.is_whole:
            return [(start, stop)]
        if self.leading is not None:
            shift = self.leading[0] * prod(self.global_shape[1:])
            return [(low + shift, high + shift) for low, high in self._inside().flat_ranges(start, stop)]
        return list(_merged(self._runs(start, stop)))

    def _runs(self, start, stop):
        """Contiguous runs of the local range, one per (outer index, range)."""
        inner = prod(self.global_shape[self.axis + 1 :])
        local_block = self.local_shape[self.axis] * inner
        global_block = self.global_shape[self.axis] * inner
        for outer in range(start // local_block, (stop - 1) // local_block + 1):
            local = outer * local_block
            for first, last in self.ranges:
                length = (last - first) * inner
                low, high = max(start, local), min(stop, local + length)
                if low < high:
                    shift = outer * global_block + first * inner - local
                    yield low + shift, high + shift
                local += length

    def split(self, array):
        """Local part of the global `array` (numpy, `global_shape`); a view if one range is held."""
        self._check_shape(array, self.global_shape, "global")
        if self.axis is None:
            return array
        if self.leading is not None:
            return self._inside().split(array[slice(*self.leading)])
        import numpy as np

        before = (slice(None),) * self.axis
        pieces = [array[before + (slice(start, stop),)] for start, stop in self.ranges]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=self.axis)

    def place(self, out, array):
        """Write the local `array` (`local_shape`) to its place in the global numpy array `out`."""
        self._check_shape(out, self.global_shape, "global")
        self._check_shape(array, self.local_shape, "local")
        if self.axis is None:
            out[...] = array
            return
        if self.leading is not None:
            self._inside().place(out[slice(*self.leading)], array)
            return
        before = (slice(None),) * self.axis
        offset = 0
        for start, stop in self.ranges:
            length = stop - start
            out[before + (slice(start, stop),)] = array[before + (slice(offset, offset + length),)]
            offset += length

    @staticmethod
    def _check_shape(array, shape, side):
        if tuple(array.shape) != tuple(shape):
            raise ValueError(f"the {side} array has shape {tuple(array.shape)}, but {tuple(shape)} is needed.")


@dataclass(frozen=True)
class FlatSlice:
    """Elements `start..stop` of the flattened local tensor of `sharding`, such as a distributed optimizer's part.

    `split` gives a 1-D array; `place` writes one back.
    """

    sharding: ParameterSharding
    start: int
    stop: int

    def __post_init__(self):
        if not 0 <= self.start <= self.stop <= self.sharding.numel:
            raise ValueError(
                f"flat range ({self.start}, {self.stop}) leaves the local tensor of {self.sharding.numel} elements."
            )

    @property
    def global_shape(self):
        """Shape of the whole parameter."""
        return self.sharding.global_shape

    @property
    def local_shape(self):
        """Local shape `(stop - start,)`."""
        return (self.stop - self.start,)

    def flat_ranges(self):
        """Held ranges of the flattened global tensor, in local order."""
        return self.sharding.flat_ranges(self.start, self.stop)

    def split(self, array):
        """Held elements of the global `array`, 1-D."""
        return self.sharding.split(array).reshape(-1)[self.start : self.stop]

    def place(self, out, array):
        """Write the held elements to their places in the C-contiguous global numpy array `out`."""
        ParameterSharding._check_shape(out, self.global_shape, "global")
        ParameterSharding._check_shape(array, self.local_shape, "local")
        if not out.flags.c_contiguous:
            raise ValueError("a flat slice can only be placed into a C-contiguous array.")
        flat = out.reshape(-1)
        offset = 0
        for start, stop in self.flat_ranges():
            flat[start:stop] = array[offset : offset + stop - start]
            offset += stop - start


def join(pieces, out=None):
    """Join the pieces of one parameter to the global tensor.

    Args:
        pieces (iterable[(ParameterSharding | FlatSlice, numpy.ndarray)]): the parts, in any order; replicas may repeat.
        out (Optional[numpy.ndarray]): global C-contiguous array to fill; a new one by default.

    Returns:
        numpy.ndarray: the global array.

    Raises:
        ValueError: no piece, pieces of different parameters, or elements that no piece covers.
    """
    import numpy as np

    pieces = list(pieces)
    if not pieces:
        raise ValueError("join needs at least one piece.")
    shape = pieces[0][0].global_shape
    if out is None:
        out = np.empty(shape, dtype=pieces[0][1].dtype)
    for sharding, array in pieces:
        if sharding.global_shape != shape:
            raise ValueError(f"pieces of different parameters: global shapes {shape} and {sharding.global_shape}.")
        sharding.place(out, array)
    missing = uncovered([sharding for sharding, _ in pieces])
    if missing:
        raise ValueError(f"no piece holds elements {missing[0]} of the flattened parameter of shape {shape}.")
    return out


def uncovered(shardings):
    """Flat global ranges that none of `shardings` (all of one parameter) holds; empty if they cover it."""
    position, missing = 0, []
    for start, stop in sorted(part for sharding in shardings for part in sharding.flat_ranges()):
        if start > position:
            missing.append((position, start))
        position = max(position, stop)
    total = prod(shardings[0].global_shape)
    if position < total:
        missing.append((position, total))
    return missing
