"""Reader and writer of MindSpore's `.ckpt` files, without MindSpore: byte ranges of each tensor's values.

Source of the format: `checkpoint.proto` of MindSpore (protobuf): `Checkpoint {repeated Value value = 1}`,
`Value {string tag = 1; TensorProto tensor = 2}`, `TensorProto {repeated int64 dims = 1; string tensor_type = 2;
bytes tensor_content = 3}`. A scalar has dims [0]. MindSpore cuts contents above 512 MB into values of one tag, and may add
"crc_num" and 10 bytes at the end. Wire format: https://protobuf.dev/programming-guides/encoding.
"""

import math
import mmap
import os
from dataclasses import dataclass, field

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import DTYPE_BYTES

TENSOR_TYPES = {
    "Float64": "float64",
    "Float32": "float32",
    "Float16": "float16",
    "BFloat16": "bfloat16",
    "Int64": "int64",
    "Int32": "int32",
    "Int16": "int16",
    "Int8": "int8",
    "UInt8": "uint8",
    "Bool": "bool",
}
_TYPES_OF_DTYPES = {dtype: name for name, dtype in TENSOR_TYPES.items()}
_MOST_BYTES = (1 << 31) - (1 << 20)
_CRC_BYTES = 17


@dataclass
class FileTensor:
    """Tensor in one of upstream's files: dtype, shape and byte ranges of its values.

    Attributes:
        dtype (str): "float32", ...; of `.ckpt` files also MindSpore's other names.
        shape (tuple[int]): as stored; () for a scalar.
        ranges (list[(int, int)]): bytes of the file, one after another the values.
    """

    dtype: str
    shape: tuple
    ranges: list = field(default_factory=list)


def prefixes(entries):
    """Bytes before the values of each `shard_file.Entry`: list[bytes].

    Raises:
        CheckpointError: a tensor that one protobuf message cannot hold.
    """
    return [_prefix(entry) for entry in entries]


def _prefix(entry):
    if entry.nbytes > _MOST_BYTES:
        raise CheckpointError(
            f"{entry.name} has {entry.nbytes} bytes, more than a .ckpt file can hold of one tensor: leave "
            "training_config.ckpt_format (--ckpt-format) unset or set it to safetensors."
        )
    dims = b"".join(b"\x08" + _varint(size) for size in entry.shape or (0,))
    content = b"\x1a" + _varint(entry.nbytes)
    tensor = dims + _text(0x12, _TYPES_OF_DTYPES[entry.dtype]) + content
    value = _text(0x0A, entry.name) + b"\x12" + _varint(len(tensor) + entry.nbytes) + tensor
    return b"\x0a" + _varint(len(value) + entry.nbytes) + value


def _text(tag, text):
    data = text.encode()
    return bytes((tag,)) + _varint(len(data)) + data


def _varint(number):
    result = bytearray()
    while number > 127:
        result.append(number & 127 | 128)
        number >>= 7
    return bytes([*result, number])


def read_tensors(path):
    """Read the header of a `.ckpt` file, no values: {name: FileTensor}.

    Raises:
        CheckpointError: it cannot be read, or is no such file.
    """
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            end = len(data) - (_CRC_BYTES if data[-_CRC_BYTES : -_CRC_BYTES + 7] == b"crc_num" else 0)
            tensors = {}
            for number, start, stop in _fields(data, 0, end):
                if number == 1 and stop is not None:
                    _add_value(tensors, data, start, stop)
            for name, tensor in tensors.items():
                nbytes = sum(stop - start for start, stop in tensor.ranges)
                expected = math.prod(tensor.shape) * DTYPE_BYTES.get(tensor.dtype, 0)
                if expected not in (0, nbytes) and (tensor.shape or nbytes):  # dims [0] are those of an empty tensor too
                    raise ValueError(f"tensor {name!a}, {tensor.dtype} {list(tensor.shape)}, has {nbytes} bytes")
            return tensors
    except (OSError, ValueError, IndexError) as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read as a .ckpt file of MindSpore: {error}.") from error


def _add_value(tensors, data, start, stop):
    name, dims, kind, content = None, [], None, None
    for number, first, last in _fields(data, start, stop):
        if last is None:
            raise ValueError(f"a number at byte {start} where text is expected")
        if number == 1:
            name = data[first:last].decode()
        elif number == 2:
            for inner, low, high in _fields(data, first, last):
                if (high is None) != (inner == 1):
                    raise ValueError(f"a field of another type in tensor {name!a}")
                if inner == 1:
                    dims.append(low)
                elif inner == 2:
                    kind = data[low:high].decode()
                elif inner == 3:
                    content = (low, high)
    if content is None:
        return  # a table (MapParameter), which no model here has
    shape = () if dims == [0] else tuple(dims)
    tensors.setdefault(name, FileTensor(TENSOR_TYPES.get(kind, kind), shape)).ranges.append(content)


def _fields(data, position, end):
    """(number, start, stop) of each field of a protobuf message; for a number field (number, value, None)."""
    while position < end:
        key, position = _read_varint(data, position)
        if key & 7 == 0:
            value, position = _read_varint(data, position)
            yield key >> 3, value, None
        elif key & 7 == 2:
            length, position = _read_varint(data, position)
            if position + length > end:
                raise ValueError("it ends too early")
            yield key >> 3, position, position + length
            position += length
        else:
            raise ValueError(f"unknown field at byte {position}")


def _read_varint(data, position):
    result = shift = 0
    while True:
        byte = data[position]
        result |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return result, position
        if shift > 63:
            raise ValueError(f"no number at byte {position}")
