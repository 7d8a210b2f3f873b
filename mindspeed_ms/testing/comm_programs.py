"""Self-test of a communication backend: random calls whose results every rank also computes in numpy.

All ranks draw the same program: a group, an operation, a dtype, a shape. The values of each rank come from the program
too, so that the expected result, to the last bit, is computed with numpy beside the call.
"""

import random

import numpy as np

from mindspeed_ms.core.comm import registry
from mindspeed_ms.core.comm.interface import P2P, REDUCTIONS

DTYPES = ("float32", "float16", "bfloat16", "int32", "int64", "uint8", "bool")
# rows and columns: nothing, little, more than a small slot, more than a large slot
SHAPES = ((0, 3), (1, 0), (1, 1), (3, 5), (7, 129), (16, 1024), (5, 70001))
SHAPE_WEIGHTS = (4, 2, 8, 12, 8, 4, 1)
_NUMPY_REDUCTIONS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


class SelfTest:
    """Random program of communication calls.

    Args:
        seed (int): the same on all ranks.
        as_tensors (bool): give MindSpore tensors instead of numpy arrays.

    Raises:
        AssertionError: by `run`, if a result is wrong.
    """

    def __init__(self, seed, as_tensors=False):
        self._random = random.Random(seed)
        self._seed = seed
        self._calls = 0
        self._as_tensors = as_tensors
        self.rank = registry.get_rank()
        self._groups = self._make_groups()
        self._operations = [
            self._all_reduce,
            self._all_reduce_in_place,
            self._all_gather,
            self._all_gather_into,
            self._reduce_scatter,
            self._reduce_scatter_into,
            self._all_to_all,
            self._broadcast,
            self._messages,
            self._barrier,
            self._objects,
        ]

    def run(self, calls):
        """Make `calls` calls, some asynchronous and completed in another order; returns the number with this rank."""
        outstanding, taken = [], 0
        for _ in range(calls):
            self._calls += 1
            ranks, group = self._random.choice(self._groups)
            operation = self._random.choice(self._operations)
            dtype = self._random.choice(DTYPES)
            shape = self._random.choices(SHAPES, SHAPE_WEIGHTS)[0]
            detail = self._random.randrange(1 << 30)
            asynchronous = self._random.random() < 0.3
            if group is not None:
                taken += 1
                check = operation(group, ranks, dtype, shape, random.Random(detail), asynchronous)
                if check is not None:
                    outstanding.append(check)
            if len(outstanding) > 3:
                self._finish(outstanding)
        self._finish(outstanding)
        return taken

    def _finish(self, outstanding):
        order = random.Random(self._calls + self.rank)  # ranks wait in different orders
        order.shuffle(outstanding)
        for check in outstanding:
            check()
        outstanding.clear()

    def _make_groups(self):
        """Groups [(ranks, this rank's group or None)]: the world and random, overlapping subsets."""
        size = registry.get_world_size()
        subsets = [list(range(size))]
        for _ in range(min(5, size)):
            subsets.append(sorted(self._random.sample(range(size), self._random.randint(1, size))))
        return [
            (ranks, registry.new_group(ranks, f"check-{index}") if self.rank in ranks else None)
            for index, ranks in enumerate(subsets)
        ]

    # ---- values -------------------------------------------------------------------------------------------------------

    def _values(self, dtype, shape, rank):
        """Input of rank `rank` to this call, as a payload array (bfloat16 as its bits)."""
        generator = np.random.default_rng((self._seed, self._calls, rank))
        if dtype == "bool":
            return generator.random(shape) < 0.5
        if dtype == "bfloat16":
            return _to_bfloat16(generator.standard_normal(shape, np.float32))
        if dtype in ("float32", "float16"):
            return generator.standard_normal(shape, np.float32).astype(dtype)
        return generator.integers(0, 100, shape).astype(dtype)

    def _give(self, array, dtype):
        if dtype == "bfloat16":
            from mindspore.common.np_dtype import bfloat16

            array = array.view(bfloat16)
        if not self._as_tensors:
            return array
        from mindspore import Tensor

        return Tensor.from_numpy(np.ascontiguousarray(array))

    def _taker(self, what, result, expected, dtype, asynchronous, out=None):
        """Check a result now, or for an asynchronous call return a function that checks it later."""

        def check():
            value = result.wait() if asynchronous else result
            array = value if isinstance(value, np.ndarray) else value.asnumpy()
            if dtype == "bfloat16":
                array = array.view(np.int16)
            assert array.shape == expected.shape, f"{what}: shape {array.shape}, expected {expected.shape}"
            assert array.dtype == expected.dtype, f"{what}: dtype {array.dtype}, expected {expected.dtype}"
            assert array.tobytes() == expected.tobytes(), f"{what}: wrong values"

        if asynchronous:
            return check
        check()
        return None

    # ---- operations ---------------------------------------------------------------------------------------------------

    def _all_reduce(self, group, ranks, dtype, shape, choices, asynchronous):
        op = choices.choice(REDUCTIONS)
        expected = reduced([self._values(dtype, shape, rank) for rank in ranks], dtype, op)
        given = self._give(self._values(dtype, shape, self.rank), dtype)
        result = group.all_reduce(given, op, async_op=asynchronous)
        return self._taker(f"all_reduce {op} {dtype} {shape}", result, expected, dtype, asynchronous)

    def _all_reduce_in_place(self, group, ranks, dtype, shape, choices, asynchronous):
        op = choices.choice(REDUCTIONS)
        expected = reduced([self._values(dtype, shape, rank) for rank in ranks], dtype, op)
        given = self._give(self._values(dtype, shape, self.rank), dtype)
        result = group.all_reduce_in_place(given, op, async_op=asynchronous)
        return self._taker(f"all_reduce_in_place {op} {dtype} {shape}", result, expected, dtype, asynchronous)

    def _all_gather(self, group, ranks, dtype, shape, choices, asynchronous):
        expected = np.concatenate([self._values(dtype, shape, rank) for rank in ranks])
        result = group.all_gather(self._give(self._values(dtype, shape, self.rank), dtype), async_op=asynchronous)
        return self._taker(f"all_gather {dtype} {shape}", result, expected, dtype, asynchronous)

    def _all_gather_into(self, group, ranks, dtype, shape, choices, asynchronous):
        """All-gather into an output of which the tensor is this rank's part, as in a sharded parameter buffer."""
        parts = [self._values(dtype, shape, rank) for rank in ranks]
        expected = np.concatenate(parts)
        whole = np.zeros_like(expected)
        part = whole[group.rank * shape[0] : (group.rank + 1) * shape[0]]
        part[...] = parts[group.rank]
        out = self._give(whole, dtype)
        result = group.all_gather_into(out, self._give(part, dtype), async_op=asynchronous)
        return self._taker(f"all_gather_into {dtype} {shape}", result, expected, dtype, asynchronous)

    def _reduce_scatter(self, group, ranks, dtype, shape, choices, asynchronous):
        op = choices.choice(REDUCTIONS)
        whole = (shape[0] * len(ranks), shape[1])
        expected = reduced([self._values(dtype, whole, rank) for rank in ranks], dtype, op)
        expected = expected[group.rank * shape[0] : (group.rank + 1) * shape[0]]
        given = self._give(self._values(dtype, whole, self.rank), dtype)
        result = group.reduce_scatter(given, op, async_op=asynchronous)
        return self._taker(f"reduce_scatter {op} {dtype} {shape}", result, expected, dtype, asynchronous)

    def _reduce_scatter_into(self, group, ranks, dtype, shape, choices, asynchronous):
        """Reduce-scatter into this rank's part of the tensor, as in a sharded gradient buffer."""
        whole = (shape[0] * len(ranks), shape[1])
        expected = reduced([self._values(dtype, whole, rank) for rank in ranks], dtype, "sum")
        expected = expected[group.rank * shape[0] : (group.rank + 1) * shape[0]]
        given = self._values(dtype, whole, self.rank)
        out = self._give(given[group.rank * shape[0] : (group.rank + 1) * shape[0]], dtype)
        result = group.reduce_scatter_into(out, self._give(given, dtype), async_op=asynchronous)
        return self._taker(f"reduce_scatter_into {dtype} {shape}", result, expected, dtype, asynchronous)

    def _all_to_all(self, group, ranks, dtype, shape, choices, asynchronous):
        splits = [[choices.randint(0, shape[0]) for _ in ranks] for _ in ranks]  # [from][to]
        parts = []
        for index, rank in enumerate(ranks):
            values = self._values(dtype, (sum(splits[index]), shape[1]), rank)
            start = sum(splits[index][: group.rank])
            parts.append(values[start : start + splits[index][group.rank]])
        given = self._give(self._values(dtype, (sum(splits[group.rank]), shape[1]), self.rank), dtype)
        received = [splits[index][group.rank] for index in range(len(ranks))]
        result = group.all_to_all(given, received, splits[group.rank], async_op=asynchronous)
        return self._taker(f"all_to_all {dtype} {shape}", result, np.concatenate(parts), dtype, asynchronous)

    def _broadcast(self, group, ranks, dtype, shape, choices, asynchronous):
        source = choices.choice(ranks)
        expected = self._values(dtype, shape, source)
        given = self._give(self._values(dtype, shape, self.rank), dtype)
        function = choices.choice([group.broadcast, group.broadcast_in_place])
        result = function(given, source, async_op=asynchronous)
        return self._taker(f"broadcast {dtype} {shape}", result, expected, dtype, asynchronous)

    def _messages(self, group, ranks, dtype, shape, choices, asynchronous):
        """Messages from every rank to the next one: single, in a batch, or all sent before any is received."""
        if len(ranks) == 1:
            return None
        following, previous = ranks[(group.rank + 1) % len(ranks)], ranks[group.rank - 1]
        given = self._give(self._values(dtype, shape, self.rank), dtype)
        expected = self._values(dtype, shape, previous)
        wanted = given.dtype if not self._as_tensors else dtype
        kind = choices.choice(("send", "isend", "batch"))
        what = f"{kind} {dtype} {shape}"
        if kind == "send":
            group.send(given, following)
            return self._taker(what, group.recv(shape, wanted, previous), expected, dtype, False)
        if kind == "isend":
            received = group.irecv(shape, wanted, previous)
            sent = group.isend(given, following)
            sent.wait()
            return self._taker(what, received, expected, dtype, True)
        batch = group.batch_isend_irecv([P2P.recv(shape, wanted, previous), P2P.send(given, following)])
        return self._taker(what, batch.wait()[0], expected, dtype, False)

    def _barrier(self, group, ranks, dtype, shape, choices, asynchronous):
        group.barrier()

    def _objects(self, group, ranks, dtype, shape, choices, asynchronous):
        own = {"rank": self.rank, "text": "x" * self.rank}
        expected = [{"rank": rank, "text": "x" * rank} for rank in ranks]
        assert group.all_gather_object(own) == expected, "all_gather_object"
        source = choices.choice(ranks)
        assert group.broadcast_object(own, source) == expected[ranks.index(source)], "broadcast_object"


def reduced(values, dtype, op):
    """Reduction in rank order, as the interface defines it."""
    if dtype == "bool":
        return np.logical_or.reduce(values) if op in ("sum", "max") else np.logical_and.reduce(values)
    if dtype == "bfloat16":
        values = [(value.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for value in values]
    elif dtype == "float16":
        values = [value.astype(np.float32) for value in values]
    total = values[0]
    for value in values[1:]:
        total = _NUMPY_REDUCTIONS[op](total, value)
    if dtype == "bfloat16":
        return _to_bfloat16(total)
    with np.errstate(over="ignore"):
        return total.astype(dtype)


def _to_bfloat16(array):
    """bfloat16 bits of float32 values, rounded to nearest even; no NaN."""
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.int16)


def run(seed, calls, as_tensors=False):
    """Run a program on this rank; returns the number of calls that it took part in."""
    return SelfTest(seed, as_tensors).run(calls)
