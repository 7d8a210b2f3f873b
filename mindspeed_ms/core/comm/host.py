"""Base class of the groups of host backends (shm, mccl): conversion between tensors, arrays and pickled objects."""

import pickle

import numpy as np

from mindspeed_ms.core.comm import payload
from mindspeed_ms.core.comm.calls import Call
from mindspeed_ms.core.comm.errors import MismatchError
from mindspeed_ms.core.comm.interface import Handle, ProcessGroup


class Result(Handle):
    """Handle whose result, an array, becomes the caller's tensor."""

    __slots__ = ("_finish", "_operation", "_value")

    def __init__(self, operation, finish):
        self._operation = operation
        self._finish = finish
        self._value = None

    def wait(self):
        """Block until the call is complete; return the tensor."""
        if self._operation is not None:
            self._operation.wait()
            self._value = self._finish()
            self._operation = self._finish = None
        return self._value

    def is_completed(self):
        """True if `wait` would not block."""
        return self._operation is None or self._operation.is_completed()


class HostProcessGroup(ProcessGroup):
    """Process group whose data is moved by the processor.

    Backends implement the `_start_*` methods on contiguous arrays; each returns a handle, and has filled `out` when
    that is complete.
    """

    def _all_reduce(self, tensor, op, out, async_op):
        if out is None:
            array, dtype = payload.read(tensor, "all_reduce", self)
            result = payload.empty(array.shape, dtype)
        else:
            array, dtype = payload.writable(out, "all_reduce_in_place", self)
            result = array
        call = Call("all_reduce", dtype, array.shape, op, array.nbytes, None, not async_op)
        operation = self._start_all_reduce(call, array.reshape(-1), result.reshape(-1))
        return Result(operation, _result(tensor, out, result, dtype))

    def _all_gather(self, tensor, out, async_op):
        array, dtype = payload.read(tensor, "all_gather", self)
        result = self._output(out, (array.shape[0] * self.size, *array.shape[1:]), dtype, "all_gather_into")
        if out is not None and payload.overlaps_elsewhere(array, result, self.rank * array.nbytes):
            array = array.copy()
        call = Call("all_gather", dtype, array.shape, None, array.nbytes, None, not async_op)
        operation = self._start_all_gather(call, array.reshape(-1), result.reshape(-1))
        return Result(operation, _result(tensor, out, result, dtype))

    def _reduce_scatter(self, tensor, op, out, async_op):
        array, dtype = payload.read(tensor, "reduce_scatter", self)
        result = self._output(out, (array.shape[0] // self.size, *array.shape[1:]), dtype, "reduce_scatter_into")
        if out is not None and payload.overlaps_elsewhere(result, array, self.rank * result.nbytes):
            array = array.copy()
        call = Call("reduce_scatter", dtype, array.shape, op, array.nbytes, None, not async_op)
        operation = self._start_reduce_scatter(call, array.reshape(-1), result.reshape(-1))
        return Result(operation, _result(tensor, out, result, dtype))

    def _all_to_all(self, tensor, output_splits, input_splits, async_op):
        array, dtype = payload.read(tensor, "all_to_all", self)
        result = payload.empty((sum(output_splits), *array.shape[1:]), dtype)
        row = array.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
        call = Call("all_to_all", dtype, array.shape, None, array.nbytes, (input_splits, output_splits), not async_op)
        operation = self._start_all_to_all(call, array.reshape(-1), result.reshape(-1), row)
        return Result(operation, _result(tensor, None, result, dtype))

    def _broadcast(self, tensor, source, out, async_op):
        if out is None:
            array, dtype = payload.read(tensor, "broadcast", self)
            result = array.copy() if self.ranks[self.rank] == source else payload.empty(array.shape, dtype)
        else:
            array, dtype = payload.writable(out, "broadcast_in_place", self)
            result = array
        call = Call("broadcast", dtype, array.shape, source, array.nbytes, None, not async_op)
        operation = self._start_broadcast(call, result.reshape(-1), self.ranks.index(source))
        return Result(operation, _result(tensor, out, result, dtype))

    def _output(self, out, shape, dtype, operation):
        """Array for the result: over the memory of `out`, or new."""
        if out is None:
            return payload.empty(shape, dtype)
        array, found = payload.writable(out, operation, self)
        if found != dtype:
            raise MismatchError(f"{operation} on group {self.name}: out is {found}, the tensor is {dtype}; expected the same.")
        return array

    def _isend(self, tensor, peer, async_op=True):
        array, dtype = payload.read(tensor, "send", self)
        call = Call("message", dtype, array.shape, None, array.nbytes, blocking=False)
        return self._start_send(call, array.reshape(-1), peer, async_op)

    def _irecv(self, shape, dtype, peer):
        name, as_numpy = payload.requested_dtype(dtype)
        result = payload.empty(tuple(shape), name)
        call = Call("message", name, result.shape, None, result.nbytes, blocking=False)
        operation = self._start_recv(call, result.reshape(-1), peer)
        return Result(operation, lambda: payload.wrap(result, name, as_numpy))

    def all_gather_object(self, value):
        """List of the values of all ranks."""
        if self.size == 1:
            return [value]
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        lengths = np.empty(self.size, np.int64)
        self._object_step("all_gather_object", np.array([data.size]), lengths)
        longest = int(lengths.max())
        padded = np.zeros(longest, np.uint8)
        padded[: data.size] = data
        gathered = np.empty((self.size, longest), np.uint8)
        self._object_step("all_gather_object", padded, gathered.reshape(-1))
        return [pickle.loads(gathered[rank, : lengths[rank]].tobytes()) for rank in range(self.size)]

    def _object_step(self, name, array, out):
        call = Call(name, array.dtype.name, array.shape, None, array.nbytes)
        self._start_all_gather(call, array, out).wait()

    def broadcast_object(self, value, source):
        """The value of the global rank `source`."""
        index = self.index_of(source, "broadcast_object")
        data = np.frombuffer(pickle.dumps(value), np.uint8).copy() if index == self.rank else None
        length = np.array([0 if data is None else data.size])
        self._start_broadcast(Call("broadcast_object", "int64", (1,), source, 8), length, index).wait()
        if data is None:
            data = np.empty(int(length[0]), np.uint8)
        call = Call("broadcast_object", "uint8", data.shape, source, data.nbytes)
        self._start_broadcast(call, data, index).wait()
        return value if index == self.rank else pickle.loads(data.tobytes())


def _result(tensor, out, array, dtype):
    """Function that converts the output array to the caller's result."""
    if out is not None:
        return lambda: out
    as_numpy = isinstance(tensor, np.ndarray)
    return lambda: payload.wrap(array, dtype, as_numpy)
