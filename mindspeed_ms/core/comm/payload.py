"""Conversion between tensors and the numpy arrays that host backends move.

A payload is a C-contiguous numpy array. bfloat16, which numpy lacks, travels as its 16 bits in an int16 array with the
name "bfloat16" beside it.
"""

import numpy as np

from mindspeed_ms.core.comm.errors import CommError

# the place in this tuple is the dtype's number in call headers
DTYPE_NAMES = (
    "float32",
    "float16",
    "bfloat16",
    "int32",
    "int64",
    "uint8",
    "bool",
    "float64",
    "int8",
    "int16",
    "uint16",
    "uint32",
    "uint64",
)
DTYPE_NUMBERS = {name: number for number, name in enumerate(DTYPE_NAMES)}
_names = {}
_WIRE_DTYPES = {name: np.dtype("int16" if name == "bfloat16" else name) for name in DTYPE_NAMES}


def _name(dtype):
    """Name of a numpy dtype, cached because numpy takes microseconds to build it."""
    name = _names[dtype] = dtype.name
    return name


def read(tensor, operation, group):
    """(contiguous array of a tensor's values, dtype name); no copy if the tensor is contiguous and owns its memory."""
    array = tensor if isinstance(tensor, np.ndarray) else tensor.asnumpy()
    name = _names.get(array.dtype) or _name(array.dtype)
    if name == "bfloat16":
        array = array.view(np.int16)
    elif name not in DTYPE_NUMBERS:
        raise CommError(
            f"{operation} on group {group.name}: dtype {name} cannot be sent; expected one of {', '.join(DTYPE_NAMES)}."
        )
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return array, name


def writable(tensor, operation, group):
    """(array over the memory of a tensor that will be overwritten, dtype name).

    Raises:
        CommError: it is a view or read-only, so a write would be lost.
    """
    if isinstance(tensor, np.ndarray):
        owns = tensor.flags.c_contiguous and tensor.flags.writeable
        array = tensor
    else:
        array = tensor.asnumpy()
        owns = not array.size or array.ctypes.data == tensor._data_ptr()
    if not owns:
        raise CommError(
            f"{operation} on group {group.name}: the tensor of shape {tuple(tensor.shape)} to be overwritten is a "
            "view or not contiguous, and writes into it would be lost. Pass a tensor that owns its memory, such "
            "as a slice of a FlatBuffer, or use the form that returns a new tensor."
        )
    return read(array, operation, group)


def empty(shape, name):
    """New array for values of the named dtype."""
    return np.empty(shape, _WIRE_DTYPES[name])


def wrap(array, name, as_numpy):
    """Result from a new array: a tensor that shares its memory, or a numpy array."""
    if name == "bfloat16":
        from mindspore.common.np_dtype import bfloat16

        array = array.view(bfloat16)
    if as_numpy:
        return array
    from mindspore import Tensor

    return Tensor.from_numpy(array)


def requested_dtype(dtype):
    """Name of the dtype given to `recv`, and whether it is numpy's: then `recv` returns a numpy array."""
    if isinstance(dtype, np.dtype) or (isinstance(dtype, type) and issubclass(dtype, np.generic)):
        dtype = np.dtype(dtype)
        name = _names.get(dtype) or _name(dtype)
        if name not in DTYPE_NUMBERS:
            raise CommError(f"recv: dtype {name} cannot be sent; expected one of {', '.join(DTYPE_NAMES)}.")
        return name, True
    from mindspeed_ms.core.device import dtype_name

    return dtype_name(dtype), False


def copy_into(out, tensor, group):
    """Overwrite `out` with the values of `tensor` of the same dtype (any device); returns `out`."""
    if isinstance(out, np.ndarray):
        np.copyto(writable(out, "copy", group)[0].reshape(-1), read(tensor, "copy", group)[0].reshape(-1))
        return out
    from mindspeed_ms.core import storage

    storage.write(out, tensor)
    return out


def address(array):
    """Address of an array's first element."""
    return array.ctypes.data


def overlaps_elsewhere(part, whole, offset_bytes):
    """True if `part` shares memory with `whole` but does not lie exactly `offset_bytes` into it."""
    if not part.size or not whole.size or not np.may_share_memory(part, whole):
        return False
    return address(part) != address(whole) + offset_bytes
