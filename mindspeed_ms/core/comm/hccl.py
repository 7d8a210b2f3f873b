"""Backend `hccl`: collectives on Ascend through the documented operators of `mindspore.mint.distributed`.

Results are written in place by those operators, so forms that return a new tensor allocate it first. Every operator is
looked up in the module when it is called. HCCL neither compares the calls of the ranks nor watches their processes;
with MINDSPEED_MS_COMM_DEBUG=1 the calls are compared first, as the host backends always do.
"""

import functools
import hashlib
import os

import numpy as np
from mindspore import Tensor, mint
from mindspore import dtype as mstype
from mindspore.communication import create_group
from mindspore.mint import distributed

from mindspeed_ms.core.comm import calls
from mindspeed_ms.core.comm.calls import COMPARED_WORDS, Call
from mindspeed_ms.core.comm.errors import CommError, MismatchError
from mindspeed_ms.core.comm.interface import CompletedHandle, Handle, ProcessGroup
from mindspeed_ms.core.comm.payload import requested_dtype
from mindspeed_ms.core.comm.waiting import waits_for
from mindspeed_ms.core.device import dtype_name, to_dtype

_TIMEOUT_VARIABLE = "HCCL_EXEC_TIMEOUT"
# HCCL has no bool: it travels as bytes, and is combined by these
_LOGICAL = {"sum": "max", "max": "max", "prod": "min", "min": "min"}
_STACK_BYTES = 4096


class HcclJob:
    """HCCL communication of one rank."""

    def __init__(self, environment, timeout):
        os.environ.setdefault(_TIMEOUT_VARIABLE, str(max(1, int(timeout))))
        distributed.init_process_group("hccl")
        self._rank = environment.rank
        self._groups_made = {}

    def new_group(self, name, ranks, timeout):
        """Group of these ranks, in ascending order. HCCL has one timeout for all groups, that of `init`."""
        if list(ranks) != sorted(ranks):
            raise CommError(f"new_group {name}: ranks are {list(ranks)}; hccl orders the ranks of a group, expected ascending.")
        key = (name, tuple(ranks))
        instance = self._groups_made[key] = self._groups_made.get(key, 0) + 1
        # a name of our own: two groups of the same ranks must stay two
        digest = hashlib.sha256(repr((key, instance)).encode()).hexdigest()[:16]
        create_group(f"mindspeed_ms_{digest}", list(ranks))
        return HcclGroup(name, ranks, self._rank, f"mindspeed_ms_{digest}")

    def close(self, exception=None):
        """Do nothing: HCCL ends its communication with the process."""


class HcclHandle(Handle):
    """Handle of an asynchronous HCCL operator, and its result."""

    def __init__(self, handle, finish):
        self._handle, self._finish = handle, finish
        self._result = None

    def wait(self):
        """Order later operators behind this one; return the result."""
        if self._finish is not None:
            if self._handle is not None:
                self._handle.wait()
            self._result = self._finish()
            self._finish = None
        return self._result

    def is_completed(self):
        """True after `wait`: HCCL does not report completion."""
        return self._finish is None


def _numpy_too(method):
    """Decorator: a method on tensors also accepts a numpy array and then returns one."""

    @functools.wraps(method)
    def call(self, tensor, *arguments):
        if not isinstance(tensor, np.ndarray):
            return method(self, tensor, *arguments)
        if any(isinstance(argument, np.ndarray) for argument in arguments):
            raise CommError(f"group {self.name}: a numpy array cannot be overwritten by HCCL; expected a tensor.")
        handle = method(self, Tensor(tensor), *arguments)
        return HcclHandle(None, lambda: handle.wait().asnumpy())

    return call


class HcclGroup(ProcessGroup):
    """Process group of Ascend devices.

    Args:
        hccl_name (str): its name for MindSpore.
    """

    def __init__(self, name, ranks, global_rank, hccl_name):
        super().__init__(name, ranks, global_rank)
        self.hccl_name = hccl_name
        self._debug = calls.debug_enabled()
        self._sequence = 0

    # ---- collectives --------------------------------------------------------------------------------------------------

    @_numpy_too
    def _all_reduce(self, tensor, op, out, async_op):
        self._compare("all_reduce", tensor, op)
        if out is not None and tensor.dtype != mstype.bool_:
            if not tensor.is_contiguous():
                raise CommError(
                    f"all_reduce_in_place on group {self.name}: the tensor is not contiguous. Pass a contiguous "
                    "one, or use all_reduce."
                )
            data = tensor
        else:
            data = self._own_copy(tensor)
        if not data.size:
            return CompletedHandle(tensor)
        reduction = _LOGICAL[op] if tensor.dtype == mstype.bool_ else op
        handle = self._run("all_reduce", distributed.all_reduce, data, op=reduction, group=self.hccl_name, async_op=async_op)
        return HcclHandle(handle, lambda: self._result(data, tensor, out))

    @_numpy_too
    def _all_gather(self, tensor, out, async_op):
        self._compare("all_gather", tensor)
        data = _sendable(tensor)
        result = self._new((tensor.shape[0] * self.size, *tensor.shape[1:]), data, out)
        if not data.size:
            return CompletedHandle(self._result(result, tensor, out))
        handle = self._run(
            "all_gather", distributed.all_gather_into_tensor, result, data, group=self.hccl_name, async_op=async_op
        )
        return HcclHandle(handle, lambda: self._result(result, tensor, out))

    @_numpy_too
    def _reduce_scatter(self, tensor, op, out, async_op):
        self._compare("reduce_scatter", tensor, op)
        data = _sendable(tensor)
        result = self._new((tensor.shape[0] // self.size, *tensor.shape[1:]), data, out)
        if not data.size:
            return CompletedHandle(self._result(result, tensor, out))
        reduction = _LOGICAL[op] if tensor.dtype == mstype.bool_ else op
        handle = self._run(
            "reduce_scatter",
            distributed.reduce_scatter_tensor,
            result,
            data,
            op=reduction,
            group=self.hccl_name,
            async_op=async_op,
        )
        return HcclHandle(handle, lambda: self._result(result, tensor, out))

    @_numpy_too
    def _all_to_all(self, tensor, output_splits, input_splits, async_op):
        self._compare("all_to_all", tensor, splits=(input_splits, output_splits))
        data = _sendable(tensor)
        result = self._new((sum(output_splits), *tensor.shape[1:]), data, None)
        if 0 in tensor.shape[1:]:
            return CompletedHandle(self._result(result, tensor, None))
        handle = self._run(
            "all_to_all",
            distributed.all_to_all_single,
            result,
            data,
            output_split_sizes=output_splits,
            input_split_sizes=input_splits,
            group=self.hccl_name,
            async_op=async_op,
        )
        return HcclHandle(handle, lambda: self._result(result, tensor, None))

    @_numpy_too
    def _broadcast(self, tensor, source, out, async_op):
        self._compare("broadcast", tensor, source)
        data = tensor if out is not None and tensor.dtype != mstype.bool_ else self._own_copy(tensor)
        if not data.size:
            return CompletedHandle(tensor)
        handle = self._run("broadcast", distributed.broadcast, data, source, group=self.hccl_name, async_op=async_op)
        return HcclHandle(handle, lambda: self._result(data, tensor, out))

    def barrier(self):
        """Return when every rank has called it."""
        self._run("barrier", distributed.barrier, group=self.hccl_name)

    # ---- messages -----------------------------------------------------------------------------------------------------

    def _isend(self, tensor, peer, async_op=True):
        data = _sendable(tensor)
        if not data.size:
            return CompletedHandle()
        handle = self._run("send", distributed.isend, data, dst=self.ranks[peer], group=self.hccl_name)
        return HcclHandle(handle, lambda: None)

    def _irecv(self, shape, dtype, peer):
        data, finish = self._receiver(shape, dtype)
        if not data.size:
            return CompletedHandle(finish())
        handle = self._run("recv", distributed.irecv, data, src=self.ranks[peer], group=self.hccl_name)
        return HcclHandle(handle, finish)

    def _batch(self, operations):
        """Send and receive all messages as one operator: single sends and receives of HCCL would wait for each other."""
        requests, finishers = [], []
        for operation in operations:
            if operation.kind == "send":
                data, finish = _sendable(operation.tensor), lambda: None
            else:
                data, finish = self._receiver(operation.shape, operation.dtype)
            finishers.append(finish)
            if data.size:
                kind = "isend" if operation.kind == "send" else "irecv"
                requests.append(distributed.P2POp(kind, data, operation.peer, group=self.hccl_name))
        if not requests:
            return CompletedHandle([finish() for finish in finishers])
        handles = self._run("batch_isend_irecv", distributed.batch_isend_irecv, requests)
        return HcclHandle(handles[0], lambda: [finish() for finish in finishers])

    def _receiver(self, shape, dtype):
        name, as_numpy = requested_dtype(dtype)
        data = mint.empty(tuple(shape), dtype=mstype.uint8 if name == "bool" else to_dtype(name))

        def finish():
            result = data.astype(mstype.bool_) if name == "bool" else data
            return result.asnumpy() if as_numpy else result

        return data, finish

    # ---- objects ------------------------------------------------------------------------------------------------------

    def all_gather_object(self, value):
        """List of the values of all ranks."""
        values = [None] * self.size
        self._run("all_gather_object", distributed.all_gather_object, values, value, group=self.hccl_name)
        return values

    def broadcast_object(self, value, source):
        """The value of the global rank `source`."""
        self.index_of(source, "broadcast_object")
        values = [value]
        self._run("broadcast_object", distributed.broadcast_object_list, values, source, group=self.hccl_name)
        return values[0]

    # ---- helpers ------------------------------------------------------------------------------------------------------

    def _own_copy(self, tensor):
        """Contiguous copy of a tensor that an operator may overwrite; bool as bytes."""
        return tensor.astype(mstype.uint8) if tensor.dtype == mstype.bool_ else tensor.contiguous().copy()

    def _new(self, shape, data, out):
        """Output tensor of a call: `out`, unless that is bool."""
        if out is not None and out.dtype != mstype.bool_:
            if out.dtype != data.dtype:
                raise MismatchError(
                    f"group {self.name}: out is {dtype_name(out.dtype)}, the tensor is "
                    f"{dtype_name(data.dtype)}; expected the same."
                )
            return out
        return mint.empty(tuple(shape), dtype=data.dtype)

    @staticmethod
    def _result(data, tensor, out):
        if tensor.dtype != mstype.bool_:
            return data
        result = data.astype(mstype.bool_)
        if out is None:
            return result
        out[:] = result
        return out

    def _run(self, name, operator, *arguments, **keywords):
        try:
            return operator(*arguments, **keywords)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = f"{str(error).rstrip().rstrip('.')}.{waits_for()}"
            raise CommError(f"{name} on group {self.name} (ranks {list(self.ranks)}) failed: {reason}") from error

    def _compare(self, operation, tensor, detail=None, splits=None):
        """Exchange the calls' headers (debug mode only) and refuse differing ones on every rank."""
        if not self._debug:
            return
        self._sequence += 1
        call = Call(operation, dtype_name(tensor.dtype), tuple(tensor.shape), detail, 0, splits)
        call.sequence = self._sequence
        everyone = self.all_gather_object((call.words().tolist(), splits, calls.caller_stack(_STACK_BYTES)))
        headers = [words for words, _, _ in everyone]
        if any(words[:COMPARED_WORDS] != headers[0][:COMPARED_WORDS] for words in headers):
            stacks = [np.frombuffer(stack, np.uint8) for _, _, stack in everyone]
            raise MismatchError(calls.describe_mismatch(self, headers) + calls.describe_stacks(self, stacks))
        if splits is not None:
            calls.check_matching_splits(self, np.array([pair for _, pair, _ in everyone]))


def _sendable(tensor):
    """Contiguous tensor of a dtype that HCCL supports; numpy arrays become tensors."""
    if isinstance(tensor, np.ndarray):
        tensor = Tensor(tensor)
    if tensor.dtype == mstype.bool_:
        return tensor.astype(mstype.uint8)
    return tensor if tensor.is_contiguous() else tensor.contiguous()
