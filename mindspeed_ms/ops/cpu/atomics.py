"""Atomic memory operations between threads: shared counters, and waiting for another thread to change one."""

import functools

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mindspeed_ms.core.compiled import compiled

_YIELD_EVERY = 64
_yield_processor = types.ExternalFunction("sched_yield", types.int32())


def _element(context, builder, array_type, array, index):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


@intrinsic
def add_atomically(typing_context, array, index, number):
    """Atomic array[index] += number of an int64 array; returns the value before. All threads see one order."""

    def generate(context, builder, signature, arguments):
        place = _element(context, builder, signature.args[0], arguments[0], arguments[1])
        return builder.atomic_rmw("add", place, arguments[2], "seq_cst")

    return types.int64(array, types.int64, types.int64), generate


@intrinsic
def read_atomically(typing_context, array, index):
    """Atomic read of array[index] of an int64 array."""

    def generate(context, builder, signature, arguments):
        place = _element(context, builder, signature.args[0], arguments[0], arguments[1])
        return builder.atomic_rmw("add", place, ir.Constant(ir.IntType(64), 0), "seq_cst")

    return types.int64(array, types.int64), generate


@functools.partial(compiled, room="atomics", nogil=True, error_model="numpy")
def wait_until_changed(array, index, value, rounds):
    """Wait until array[index] differs from `value`; False if it did not within `rounds` checks."""
    for k in range(rounds):
        if read_atomically(array, index) != value:
            return True
        if k % _YIELD_EVERY == _YIELD_EVERY - 1:
            _yield_processor()
    return False
