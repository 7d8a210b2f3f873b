"""Reductions in rank order over all ranks' values in one piece of memory, for all host backends: equal bit by bit."""

import ctypes

import numpy as np

from mindspeed_ms.core.comm import shm_kernels as kernels
from mindspeed_ms.core.comm.interface import REDUCTIONS

OP_NUMBERS = {name: number for number, name in enumerate(REDUCTIONS)}
assert (OP_NUMBERS["sum"], OP_NUMBERS["max"], OP_NUMBERS["min"], OP_NUMBERS["prod"]) == (
    kernels.SUM,
    kernels.MAX,
    kernels.MIN,
    kernels.PROD,
)
_LOGICAL = {"sum": kernels.MAX, "max": kernels.MAX, "prod": kernels.MIN, "min": kernels.MIN}


def combine_into(out, dtype, op, source, stride, count):
    """Reduce the values of `count` ranks into `out`, in rank order.

    Args:
        out (np.ndarray): flat, contiguous, as payloads are.
        dtype (str): name of the values' dtype.
        op (str): one of `REDUCTIONS`.
        source (int): address of rank 0's values; rank r's are `r * stride` bytes further.
        count (int): number of ranks.
    """
    if not out.size:
        return
    if dtype == "bfloat16":
        kernels.combine_bfloat16(out.view(np.uint16), source, stride, count, OP_NUMBERS[op])
    elif dtype == "float16":
        _combine_float16(out, op, source, stride, count)
    elif dtype == "bool":
        kernels.combine(out.view(np.uint8), source, stride, count, _LOGICAL[op])
    else:
        kernels.combine(out, source, stride, count, OP_NUMBERS[op])


_FLOAT16_FUNCTIONS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def _combine_float16(out, op, source, stride, count):
    """`combine_into` for float16: accumulated in float32, rounded once, with numpy's exact conversions."""
    function = _FLOAT16_FUNCTIONS[op]
    for start in range(0, out.size, kernels.BLOCK):
        length = min(kernels.BLOCK, out.size - start)
        total = array_at(source + 2 * start, length, np.float16).astype(np.float32)
        for rank in range(1, count):
            function(total, array_at(source + rank * stride + 2 * start, length, np.float16).astype(np.float32), out=total)
        with np.errstate(over="ignore"):
            out[start : start + length] = total


def array_at(address, length, dtype):
    """Array over the memory at an address; the caller keeps that memory alive."""
    dtype = np.dtype(dtype)
    return np.frombuffer((ctypes.c_char * (length * dtype.itemsize)).from_address(address), dtype, length)
