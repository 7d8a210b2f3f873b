"""Tensor storage: flat buffers, in-place writes, numpy access to a tensor's memory, release of parameters.

On CPU a buffer is a numpy array and its slices are tensors made from it: MindSpore then sees independent base tensors, so
every kernel and every write works, and memory is shared. In-place tensor methods (`add_`, `+=`, `copy_` on a view) are
silently lost on CPU and must never be used. On Ascend a buffer is one tensor and its slices are views.
"""

import functools
import math
from contextlib import contextmanager

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, ops
from mindspore._c_expression import TensorPy
from mindspore.common.np_dtype import bfloat16 as np_bfloat16

from mindspeed_ms.core import autograd
from mindspeed_ms.core.device import device_target, dtype_name, dtype_size, to_dtype
from mindspeed_ms.core.released_parameter import UnfilledParameter, mark_held, mark_released

_NUMPY_DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "float64": np.float64,
    "int8": np.int8,
    "uint8": np.uint8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "bool": np.bool_,
    "bfloat16": np_bfloat16,
}  # MindSpore's extension dtype: arithmetic goes through its int16 bits
_ARRAY_KINDS = {to_dtype(name): np.dtype(np.int16 if name == "bfloat16" else kind) for name, kind in _NUMPY_DTYPES.items()}

_NO_ARRAY = None, None
# of new tensors: the methods of Tensor around them take as long again
_data_ptr, _tensor_of_contiguous = TensorPy._data_ptr, TensorPy.from_numpy
_ALIGNMENT = 64
_CAST_ELEMENTS = 1 << 15


def numpy_dtype(dtype):
    """numpy dtype of a tensor's elements; MindSpore's own extension dtype for bfloat16."""
    return np.dtype(_NUMPY_DTYPES[dtype_name(dtype)])


def is_in_host_memory():
    """Whether buffers lie in host memory, so that offloading has no meaning."""
    return device_target() == "CPU"


class FlatBuffer:
    """Flat buffer: `numel` elements of one dtype in contiguous memory, initially zero; slices are tensors that share it."""

    def __init__(self, numel, dtype):
        self.numel = int(numel)
        self.dtype = to_dtype(dtype)
        self._on_host = is_in_host_memory()
        if self._on_host:
            self._array = _aligned_zeros(self.numel, numpy_dtype(self.dtype))
            self.tensor = Tensor.from_numpy(self._array)
        else:
            self._array = None
            self.tensor = ops.zeros((self.numel,), self.dtype)

    @property
    def nbytes(self):
        """Bytes of the whole buffer."""
        return self.numel * dtype_size(self.dtype)

    def slice(self, start, stop, shape=None):
        """Tensor over elements `start` to `stop` that shares the buffer's memory, shaped `shape` (flat if None)."""
        if not 0 <= start <= stop <= self.numel:
            raise ValueError(f"slice {start}:{stop} is outside a buffer of {self.numel} elements.")
        shape = (stop - start,) if shape is None else tuple(shape)
        if self._on_host:
            return from_array(self._array[start:stop].reshape(shape), self.dtype)
        return mint.narrow(self.tensor, 0, start, stop - start).view(shape)

    def zero(self):
        """Set every element to zero."""
        if self._on_host:
            self._array.fill(0)
        else:
            zero(self.tensor)


def zeros(shape, dtype):
    """Tensor of zeros in memory of its own."""
    return FlatBuffer(math.prod(shape), dtype).slice(0, math.prod(shape), shape)


class _Memory:
    """Array interface to a tensor's memory; keeps the tensor alive as long as an array uses it."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor):
        self.tensor = tensor
        kind = _ARRAY_KINDS[tensor.dtype]
        strides = None if tensor.is_contiguous() else tuple(kind.itemsize * stride for stride in tensor.stride())
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor._data_ptr(), False),
            "typestr": kind.str,
            "shape": tensor.shape,
            "strides": strides,
        }


def _aligned_zeros(numel, dtype):
    """Zeros aligned to 64 bytes: kernels sum in an order that depends on alignment, and runs must be bit-equal."""
    memory = np.zeros(numel * dtype.itemsize + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + numel * dtype.itemsize].view(dtype)


def as_array(tensor):
    """Writable numpy array over the memory of a contiguous tensor (CPU); bfloat16 comes as its int16 bits.

    Raises:
        ValueError: the tensor is not contiguous.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tensor.shape} is not contiguous: it cannot be written as one piece. "
            "Pass a tensor that owns its memory, such as a slice of a FlatBuffer."
        )
    return read_array(tensor)


def read_array(tensor):
    """Numpy array over a tensor's memory (CPU); bfloat16 comes as its int16 bits.

    Never a copy: views give arrays with their strides, where `Tensor.asnumpy` would copy them.

    Raises:
        RuntimeError: the memory is a device's.
    """
    array, address = tensor.__dict__.get(autograd.ARRAY, _NO_ARRAY)
    if array is not None and tensor._data_ptr() == address:
        return array
    if not is_in_host_memory():
        raise RuntimeError("numpy cannot look into a device's memory: use storage.host_array, which copies.")
    array = np.asarray(_Memory(tensor))
    if isinstance(tensor, Parameter):  # read again and again; another tensor would live as long as its array
        tensor.__dict__[autograd.ARRAY] = array, tensor._data_ptr()
    return array


def from_array(array, dtype=None):
    """Tensor that shares memory with a contiguous numpy array; with `dtype` bfloat16 the array holds its int16 bits.

    The tensor keeps the array with its address: while the tensor's memory is there, `read_array` gives it at once.
    """
    flags = array.flags
    make = _tensor_of_contiguous if flags.c_contiguous else Tensor.from_numpy
    if dtype is not None and to_dtype(dtype) == ms.bfloat16:
        tensor = make(array.view(np_bfloat16))
        array = array.view(np.int16)
    else:
        tensor = make(array)
    if flags.c_contiguous and flags.writeable:  # MindSpore copies others
        tensor.__dict__[autograd.ARRAY] = array, _data_ptr(tensor)
    return tensor


def host_array(tensor):
    """Flat numpy array of a contiguous tensor's values: its own memory on CPU, a copy of a device's; bfloat16 comes as its
    int16 bits."""
    if is_in_host_memory():
        return as_array(tensor).reshape(-1)
    return tensor.asnumpy().reshape(-1).view(_ARRAY_KINDS[tensor.dtype])


@contextmanager
def filling(tensor):
    """Context manager: yields `host_array` of a tensor and writes it back to the tensor at the end."""
    array = host_array(tensor)
    if is_in_host_memory():
        yield array
        return
    array = array.copy()
    yield array
    write(tensor, from_array(array, tensor.dtype))


def write(destination, source):
    """Copy `source` (same number of elements, any dtype) into the memory of `destination`."""
    if destination.size != source.size:
        raise ValueError(f"cannot write {source.size} elements into {destination.size}.")
    if isinstance(destination, UnfilledParameter):  # all of its values are given here
        mark_held(destination)
    with autograd.no_grad():
        if device_target() == "CPU":
            if source.dtype != destination.dtype:
                _write_cast(destination, source)
            else:
                as_array(destination)[...] = read_array(source).reshape(destination.shape)
        else:
            destination[:] = source.reshape(destination.shape).astype(destination.dtype)


def write_rows(destination, numbers, rows):
    """Replace rows of a contiguous tensor, seen as [all leading dimensions, last dimension].

    Args:
        destination (Tensor): such as a cache; changed in place.
        numbers (ndarray): int64 [n], different ones.
        rows (Tensor): [n, last dimension], of its dtype.
    """
    with autograd.no_grad():
        if device_target() == "CPU":
            array = as_array(destination)
            array.reshape(-1, array.shape[-1])[numbers] = read_array(rows)
        else:
            destination.view(-1, destination.shape[-1]).index_copy_(0, Tensor(numbers, ms.int64), rows)


def _write_cast(destination, source):
    """Write with a cast, in parts that stay in the processor's cache."""
    target, values = as_array(destination).reshape(-1), read_array(source).reshape(-1)
    for start in range(0, values.size, _CAST_ELEMENTS):
        part = values[start : start + _CAST_ELEMENTS]
        part = _widened(part) if source.dtype == ms.bfloat16 else part
        target[start : start + _CAST_ELEMENTS] = _narrowed(part) if destination.dtype == ms.bfloat16 else part


def _widened(bits):
    """float32 array of bfloat16 bits (int16)."""
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _narrowed(values):
    """bfloat16 bits (int16) of an array of numbers, rounded to nearest even; NaN stays NaN."""
    values = np.ascontiguousarray(values, np.float32)
    wide = values.view(np.uint32)
    bits = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), bits).view(np.int16)


def add_into(destination, source):
    """Add `source` to the memory of `destination` (same number of elements)."""
    with autograd.no_grad():
        if device_target() == "CPU" and destination.dtype != ms.bfloat16:
            array, values = as_array(destination), read_array(source).reshape(destination.shape)
            values = _widened(values) if source.dtype == ms.bfloat16 else values
            np.add(array, values, out=array, casting="same_kind")
        else:
            write(destination, destination + source.reshape(destination.shape).astype(destination.dtype))


def zero(tensor):
    """Set the memory of `tensor` to zero."""
    with autograd.no_grad():
        if device_target() == "CPU":
            as_array(tensor).fill(0)
        else:
            tensor[:] = ops.zeros(tensor.shape, tensor.dtype)


def set_data(parameter, tensor):
    """Replace the storage of a parameter by that of `tensor`; its identity, name and hooks stay."""
    mark_held(parameter)
    parameter.__dict__.pop(autograd.ARRAY, None)
    with autograd.no_grad():
        parameter.data = tensor


def release(parameter):
    """Free the storage of a parameter (ZeRO-3) until `set_data` replaces it; its identity, name and hooks stay.

    A use of its values raises `ReleasedParameterError`; code that bypasses the check reads one NaN.
    """
    set_data(parameter, _nothing(parameter.dtype))
    mark_released(parameter)


@functools.cache
def _nothing(dtype):
    return Tensor([float("nan")], dtype)
