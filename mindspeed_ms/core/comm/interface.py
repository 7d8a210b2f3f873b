"""Process groups: the interface of all communication backends, with collectives, messages and asynchronous handles.

Tensors are MindSpore tensors, contiguous or not; numpy arrays are taken as well and then numpy arrays come back.
Results are new tensors that own their memory. Collectives work along axis 0. Reductions run in rank order, so a result
depends on neither timing nor backend: float32, float64 and integers are combined as `((r0 + r1) + r2) + ...` in their
own type (integers wrap); bfloat16 and float16 are accumulated in float32 in that order and rounded once at the end;
bool is combined logically (sum and max: or, prod and min: and). (hccl reduces in its own order, fixed if
HCCL_DETERMINISTIC=true.)

An asynchronous call returns a `Handle` before it is complete. Its tensors must be left alone until `wait()` returned.
Handles of one group complete in the order in which their calls were made; while a rank waits for one, those of all its
other groups advance.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from mindspeed_ms.core.comm.errors import CommError
from mindspeed_ms.core.comm.payload import copy_into

REDUCTIONS = ("sum", "max", "min", "prod")


class Handle(ABC):
    """Handle of an asynchronous call."""

    @abstractmethod
    def wait(self):
        """Block until the call is complete and return its result; later calls return the same."""

    @abstractmethod
    def is_completed(self):
        """True if `wait()` would return at once. Advances the call without blocking."""

    def wait_part(self, index):
        """Result of one message of `batch_isend_irecv`; where the backend can, without waiting for the others."""
        return self.wait()[index]

    def is_part_completed(self, index):
        """True if `wait_part(index)` would return at once."""
        del index
        return self.is_completed()


class CompletedHandle(Handle):
    """Handle of a call that needed no communication."""

    def __init__(self, result=None):
        self._result = result

    def wait(self):
        """Return the result."""
        return self._result

    def is_completed(self):
        """Always True."""
        return True


@dataclass(frozen=True)
class P2P:
    """One point-to-point message of `ProcessGroup.batch_isend_irecv`; made by `P2P.send` or `P2P.recv`."""

    kind: str
    peer: int
    tensor: object = None
    shape: tuple = None
    dtype: object = None

    @classmethod
    def send(cls, tensor, destination):
        """Message with the values of `tensor` to the global rank `destination`."""
        return cls("send", destination, tensor=tensor)

    @classmethod
    def recv(cls, shape, dtype, source):
        """Message of this shape and dtype from the global rank `source`."""
        return cls("recv", source, shape=tuple(shape), dtype=dtype)


class ProcessGroup(ABC):
    """A named group of ranks.

    Attributes:
        name (str): as given to `new_group`.
        ranks (tuple[int]): its global ranks, in order.
        rank (int): this process's place in `ranks`.
        size (int): number of ranks.
    """

    def __init__(self, name, ranks, global_rank):
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(global_rank)
        self.size = len(self.ranks)

    def __repr__(self):
        return f"{type(self).__name__}({self.name!r}, ranks={list(self.ranks)}, rank={self.rank})"

    # ---- collectives --------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor, op="sum", async_op=False):
        """Combine the tensors of all ranks.

        Args:
            tensor: any shape, the same on every rank; not changed.
            op (str): "sum", "max", "min" or "prod".
            async_op (bool): return a `Handle` at once instead of the result.

        Returns:
            New tensor of that shape; in a group of one, `tensor` itself.
        """
        check_reduction(op, "all_reduce", self)
        if self.size == 1:
            return _given(tensor, async_op)
        return _finish(self._all_reduce(tensor, op, None, async_op), async_op)

    def all_reduce_in_place(self, tensor, op="sum", async_op=False):
        """All-reduce that overwrites `tensor`, which must own its memory (no view); returns `tensor`. See `all_reduce`."""
        check_reduction(op, "all_reduce_in_place", self)
        if self.size == 1:
            return _given(tensor, async_op)
        return _finish(self._all_reduce(tensor, op, tensor, async_op), async_op)

    def all_gather(self, tensor, async_op=False):
        """Join the tensors `[n, ...]` of all ranks to `[n * size, ...]`, in rank order."""
        check_has_axis(tensor, "all_gather", self)
        if self.size == 1:
            return _given(tensor, async_op)
        return _finish(self._all_gather(tensor, None, async_op), async_op)

    def all_gather_into(self, out, tensor, async_op=False):
        """All-gather into `out` `[n * size, ...]`, which must own its memory; `tensor` may be this rank's part of it."""
        check_has_axis(tensor, "all_gather_into", self)
        check_count(out, _elements(tensor) * self.size, "all_gather_into", "out", self)
        if self.size == 1:
            return _given(self._copy_into(out, tensor), async_op)
        return _finish(self._all_gather(tensor, out, async_op), async_op)

    def reduce_scatter(self, tensor, op="sum", async_op=False):
        """Combine the tensors `[n * size, ...]` of all ranks and return this rank's part `[n, ...]`."""
        check_reduction(op, "reduce_scatter", self)
        check_divisible(tensor, "reduce_scatter", self)
        if self.size == 1:
            return _given(tensor, async_op)
        return _finish(self._reduce_scatter(tensor, op, None, async_op), async_op)

    def reduce_scatter_into(self, out, tensor, op="sum", async_op=False):
        """Reduce-scatter into `out` `[n, ...]`, which must own its memory; it may be this rank's part of `tensor`."""
        check_reduction(op, "reduce_scatter_into", self)
        check_divisible(tensor, "reduce_scatter_into", self)
        check_count(out, _elements(tensor) // self.size, "reduce_scatter_into", "out", self)
        if self.size == 1:
            return _given(self._copy_into(out, tensor), async_op)
        return _finish(self._reduce_scatter(tensor, op, out, async_op), async_op)

    def all_to_all(self, tensor, output_splits=None, input_splits=None, async_op=False):
        """Send part i of `tensor` to rank i of the group; return the parts received, joined in rank order.

        Args:
            tensor: `[n, ...]`.
            output_splits (list[int]): rows received from each rank; None: n / size each.
            input_splits (list[int]): rows for each rank, n in sum; None: n / size each.

        Returns:
            New tensor `[sum(output_splits), ...]`.
        """
        input_splits, output_splits = check_splits(tensor, input_splits, output_splits, self)
        if self.size == 1:
            return _given(tensor, async_op)
        return _finish(self._all_to_all(tensor, output_splits, input_splits, async_op), async_op)

    def broadcast(self, tensor, source, async_op=False):
        """Return the tensor of the global rank `source`; the others pass one of the same shape and dtype, which is not read."""
        self.index_of(source, "broadcast")
        if self.size == 1:
            return _given(tensor, async_op)
        return _finish(self._broadcast(tensor, source, None, async_op), async_op)

    def broadcast_in_place(self, tensor, source, async_op=False):
        """Broadcast that overwrites `tensor`, which must own its memory; returns `tensor`. See `broadcast`."""
        self.index_of(source, "broadcast_in_place")
        if self.size == 1:
            return _given(tensor, async_op)
        return _finish(self._broadcast(tensor, source, tensor, async_op), async_op)

    @abstractmethod
    def barrier(self):
        """Return when every rank of the group has called it."""

    # ---- messages -----------------------------------------------------------------------------------------------------

    def send(self, tensor, destination):
        """Send to the global rank `destination`. Returns when `tensor` may be changed, possibly before it has arrived."""
        self._isend(tensor, self.peer_index(destination, "send"), async_op=False).wait()

    def recv(self, shape, dtype, source):
        """Return the next tensor from the global rank `source`; shape and dtype must be those sent."""
        return self._irecv(shape, dtype, self.peer_index(source, "recv")).wait()

    def isend(self, tensor, destination):
        """Asynchronous `send`: return a `Handle` at once."""
        return self._isend(tensor, self.peer_index(destination, "isend"))

    def irecv(self, shape, dtype, source):
        """Asynchronous `recv`: return a `Handle` whose `wait()` gives the tensor."""
        return self._irecv(shape, dtype, self.peer_index(source, "irecv"))

    def batch_isend_irecv(self, operations):
        """Start several messages that advance together, in any order.

        Args:
            operations (list[P2P]): `P2P.send(tensor, rank)` and `P2P.recv(shape, dtype, rank)`.

        Returns:
            Handle: `wait()` gives a list with the received tensors, None for sends.
        """
        for operation in operations:
            self.peer_index(operation.peer, "batch_isend_irecv")
        return self._batch(operations)

    # ---- objects ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def all_gather_object(self, value):
        """List of the (picklable) values of all ranks, in rank order."""

    @abstractmethod
    def broadcast_object(self, value, source):
        """The (picklable) value of the global rank `source`."""

    # ---- for backends -------------------------------------------------------------------------------------------------

    # Each starts the call and returns a Handle; `async_op` False: it is waited for at once. `out` None: a new tensor.

    @abstractmethod
    def _all_reduce(self, tensor, op, out, async_op):
        """See `all_reduce`."""

    @abstractmethod
    def _all_gather(self, tensor, out, async_op):
        """See `all_gather`."""

    @abstractmethod
    def _reduce_scatter(self, tensor, op, out, async_op):
        """See `reduce_scatter`."""

    @abstractmethod
    def _all_to_all(self, tensor, output_splits, input_splits, async_op):
        """See `all_to_all`."""

    @abstractmethod
    def _broadcast(self, tensor, source, out, async_op):
        """See `broadcast`."""

    @abstractmethod
    def _isend(self, tensor, peer, async_op=True):
        """See `isend`; `peer` is an index in the group."""

    @abstractmethod
    def _irecv(self, shape, dtype, peer):
        """See `irecv`."""

    def _batch(self, operations):
        """Start every message; return one Handle for all."""
        handles = [
            self._isend(operation.tensor, self.ranks.index(operation.peer))
            if operation.kind == "send"
            else self._irecv(operation.shape, operation.dtype, self.ranks.index(operation.peer))
            for operation in operations
        ]
        return GatheredHandle(handles)

    def _copy_into(self, out, tensor):
        """Copy `tensor` to `out`, in a group of one rank."""
        return copy_into(out, tensor, self)

    def close(self):  # noqa: B027 - most backends hold nothing
        """Release the resources of the group."""

    def index_of(self, rank, operation):
        """Index of a global rank in the group.

        Raises:
            CommError: it is no member.
        """
        if rank not in self.ranks:
            raise CommError(
                f"{operation} on group {self.name}: rank {rank} is no member; its ranks are {list(self.ranks)} "
                "(ranks are given as global ranks)."
            )
        return self.ranks.index(rank)

    def peer_index(self, rank, operation):
        """Index of another member in the group.

        Raises:
            CommError: it is no member, or this rank itself.
        """
        index = self.index_of(rank, operation)
        if index == self.rank:
            raise CommError(f"{operation} on group {self.name}: rank {rank} is this rank itself; a message needs another.")
        return index


class GatheredHandle(Handle):
    """Handle of several calls; the result is the list of their results."""

    def __init__(self, handles):
        self._handles = handles

    def wait(self):
        """Block until all are complete; return their results."""
        return [handle.wait() for handle in self._handles]

    def is_completed(self):
        """True if all calls are complete."""
        states = [handle.is_completed() for handle in self._handles]  # asking lets each go on
        return all(states)

    def wait_part(self, index):
        """Block until the call `index` is complete; return its result."""
        return self._handles[index].wait()

    def is_part_completed(self, index):
        """True if the call `index` is complete."""
        return self._handles[index].is_completed()


def _given(result, async_op):
    return CompletedHandle(result) if async_op else result


def _finish(handle, async_op):
    return handle if async_op else handle.wait()


# ---- checks that every backend shares ------------------------------------------------------------------------------------


def check_reduction(op, operation, group):
    """Refuse an unknown reduction."""
    if op not in REDUCTIONS:
        raise CommError(f"{operation} on group {group.name}: op is {op!r}, expected one of {', '.join(REDUCTIONS)}.")


def check_has_axis(tensor, operation, group):
    """Refuse a tensor without an axis to join along."""
    if not tensor.shape:
        raise CommError(f"{operation} on group {group.name}: the tensor has no axes; expected [n, ...]. Use tensor.reshape(1).")


def check_divisible(tensor, operation, group):
    """Refuse a tensor that does not split evenly along axis 0."""
    check_has_axis(tensor, operation, group)
    if tensor.shape[0] % group.size:
        raise CommError(
            f"{operation} on group {group.name}: axis 0 of shape {tuple(tensor.shape)} is not divisible by the "
            f"group's size {group.size}."
        )


def check_count(out, expected, operation, argument, group):
    """Refuse an output with a wrong number of elements."""
    if _elements(out) != expected:
        raise CommError(
            f"{operation} on group {group.name}: {argument} has shape {tuple(out.shape)}, "
            f"{_elements(out)} elements; expected {expected} elements."
        )


def check_splits(tensor, input_splits, output_splits, group):
    """Both splits as lists; refuse splits that do not fit the tensor."""
    check_has_axis(tensor, "all_to_all", group)
    if input_splits is None or output_splits is None:
        check_divisible(tensor, "all_to_all", group)
    even = [tensor.shape[0] // group.size] * group.size
    checked = []
    for name, splits in (("input_splits", input_splits), ("output_splits", output_splits)):
        splits = even if splits is None else [int(rows) for rows in splits]
        if len(splits) != group.size or min(splits) < 0:
            raise CommError(f"all_to_all on group {group.name}: {name} is {splits}, expected {group.size} numbers >= 0.")
        checked.append(splits)
    if sum(checked[0]) != tensor.shape[0]:
        raise CommError(
            f"all_to_all on group {group.name}: input_splits {checked[0]} add up to {sum(checked[0])}, but "
            f"axis 0 of the tensor has {tensor.shape[0]} rows."
        )
    if group.size == 1 and checked[0] != checked[1]:
        raise CommError(f"all_to_all on group {group.name}: output_splits {checked[1]} differ from input_splits {checked[0]}.")
    return checked


def _elements(tensor):
    count = 1
    for length in tensor.shape:
        count *= length
    return count
