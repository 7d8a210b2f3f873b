"""Conversion between Tensors and the float32 arrays that kernels work on."""

import ctypes
import functools
import math

import mindspore as ms
import numpy as np

from mindspeed_ms.core import storage
from mindspeed_ms.ops.cpu import threads
from mindspeed_ms.ops.cpu.kernels import casts, reductions
from mindspeed_ms.ops.cpu.vectors import LINE

_SMALL = 4096
"""Elements below which the place of an array does not matter."""


def float32_of(tensor):
    """C-contiguous float32 array of a tensor's values: its own memory for a contiguous float32 tensor, else a copy.

    Raises:
        ValueError: the dtype is none of float32, float16, bfloat16.
    """
    array = storage.read_array(tensor)
    if array.dtype == np.float32:
        # np.ascontiguousarray would make a vector of a scalar
        return array if array.flags.c_contiguous else np.asarray(array, order="C")
    if tensor.dtype == ms.bfloat16:
        array = np.asarray(array, order="C")
        wide = np.empty(array.shape, np.float32)
        threads.run(casts.widen_bfloat16, array.size, array.size, array.reshape(-1), wide.reshape(-1))
        return wide
    if tensor.dtype == ms.float16:
        return np.asarray(array, np.float32, order="C")
    raise ValueError(f"operators work on float32, float16 and bfloat16 tensors, got {tensor.dtype} of shape {tensor.shape}.")


def tensor_of(array, dtype):
    """Tensor of a float32 array, rounded to `dtype` (to nearest even); float32 shares the array's memory."""
    if dtype is ms.float32 or dtype == ms.float32:  # the first is quicker
        return storage.from_array(array)
    if dtype == ms.bfloat16:
        bits = np.empty(array.shape, np.int16)
        threads.run(casts.narrow_to_bfloat16, array.size, array.size, array.reshape(-1), bits.reshape(-1))
        return storage.from_array(bits, ms.bfloat16)
    if dtype == ms.float16:
        with np.errstate(over="ignore"):  # float16 overflows to inf, which the loss scaler looks for
            return storage.from_array(array.astype(np.float16))
    raise ValueError(f"operators give float32, float16 and bfloat16 tensors, not {dtype}.")


def integers_of(tensor):
    """C-contiguous int64 array of an integer tensor."""
    return np.ascontiguousarray(storage.read_array(tensor), np.int64)


def bytes_of(mask):
    """C-contiguous uint8 array of a bool or uint8 tensor, without a cast."""
    array = storage.read_array(mask)
    if array.dtype == np.bool_:
        array = array.view(np.uint8)
    elif array.dtype != np.uint8:
        raise ValueError(f"a mask of shape {mask.shape} has dtype {mask.dtype}: expected bool or uint8.")
    return np.ascontiguousarray(array)


def empty(shape):
    """Uninitialised float32 array; a large one begins at a cache line, else each vector of its rows would lie in two."""
    size = shape if isinstance(shape, int) else math.prod(shape)
    if size < _SMALL:
        return np.empty(shape, np.float32)
    block = np.empty(size + LINE // 4, np.float32)
    start = -block.__array_interface__["data"][0] % LINE // 4
    return block[start : start + size].reshape(shape)


def _keep_freed_memory():
    """Set the C library to keep large freed blocks: page faults of new memory cost more than most kernels."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:  # other C libraries than glibc have no such switch
        set_option(_M_MMAP_THRESHOLD, _LARGE)
        set_option(_M_TRIM_THRESHOLD, _LARGE)
        set_option(_M_TOP_PAD, 64 << 20)


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # numbers of malloc.h
_LARGE = (1 << 31) - 1
_keep_freed_memory()


def rows_of(array):
    """Array reshaped to [rows, last dimension]."""
    return array.reshape(-1, array.shape[-1])


def bits_of(tensor):
    """C-contiguous array of elements that are only moved: float32 as it is, half precisions as int16."""
    array = np.ascontiguousarray(storage.read_array(tensor))
    return array.view(np.int16) if array.dtype == np.float16 else array


def new_like(array, shape):
    """Uninitialised array of the element type of `array`."""
    return empty(shape) if array.dtype == np.float32 else np.empty(shape, array.dtype)


@functools.lru_cache(maxsize=64)
def zeros_vector(size):
    """Shared float32 zeros [size]; never written."""
    return np.zeros(size, np.float32)


def tensor_of_bits(array, dtype):
    """Tensor of `dtype` from an array of elements as `bits_of` returns them."""
    if array.dtype == np.float32:
        return storage.from_array(array)
    return storage.from_array(array.view(np.float16) if dtype == ms.float16 else array, dtype)


def column_sums(values):
    """Sums over the rows of a float32 array [rows, n]."""
    sums = empty(values.shape[1])
    threads.run(reductions.column_sums, values.shape[1], values.size, values, sums)
    return sums
