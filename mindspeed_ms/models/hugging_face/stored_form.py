"""Stored forms of a Hugging Face folder's weights that are no plain slices: experts in one tensor, rows of gate and up
alternating, MXFP4 and FP8 numbers. Each is read as the values that it stands for.

MXFP4 (OCP Microscaling): two E2M1 numbers per byte, the low half first, and for each 32 of them the exponent of a power of
two, plus 127. FP8 (DeepSeek): E4M3 numbers, and for each block of rows and columns a float32 factor. A piece is read whole:
memory holds one tensor, of a tensor of all experts one of them.
"""

from dataclasses import dataclass

import numpy as np

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.reader import numpy_dtype
from mindspeed_ms.models.families.tensors import TensorPart

BLOCKS, SCALES, SCALE = "_blocks", "_scales", "_scale_inv"
"""Ends of the names: MXFP4's two tensors of a weight, and what follows an FP8 weight's own name."""
MXFP4_SIZE = 32
_MXFP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_MXFP4_VALUES = np.concatenate([_MXFP4_VALUES, -_MXFP4_VALUES])
_BIAS = 127


@dataclass(frozen=True)
class Place:
    """Values in a file: name, bytes, dtype (as `FolderTensor`) and shape."""

    file: str
    start: int
    stop: int
    dtype: str
    shape: tuple

    @classmethod
    def of(cls, stored, slot=None):
        """The place of a FolderTensor, or of one of the tensors along its first axis."""
        start, stop, shape = stored.start, stored.stop, stored.shape
        if slot is not None:
            size = (stop - start) // shape[0]
            start, stop, shape = start + slot * size, start + (slot + 1) * size, shape[1:]
        return cls(stored.file, start, stop, stored.dtype, shape)

    def values(self, read):
        """Array of the stored values; bfloat16 and FP8 as bits."""
        kind = np.uint8 if self.dtype.startswith("float8") else numpy_dtype(self.dtype)
        return read(self.file, self.start, self.stop).view(kind).reshape(self.shape)


@dataclass(frozen=True)
class StoredForm:
    """How one of our local tensors follows from stored ones.

    Attributes:
        part (TensorPart): order of rows and columns.
        places (tuple[Place]): the values, or those and their scales.
        kind (str): "plain", "mxfp4" or "fp8".
        dtype (str): of the result: "float32", "bfloat16" or "float16".
        block (tuple[int]): of FP8: rows and columns with one scale.
    """

    part: TensorPart
    places: tuple
    kind: str
    dtype: str
    block: tuple = ()

    def local(self, read):
        """Our local tensor: an array of its shape, contiguous, in the dtype's stored form.

        Args:
            read (Callable): `(file, start, stop) -> uint8 array` of the bytes of a file.
        """
        values = [place.values(read) for place in self.places]
        if self.kind == "mxfp4":
            # rows of the stored form are outputs, as ours
            return self.part.as_ours(_of_orientation(self.part, in_dtype(mxfp4_values(*values), self.dtype)))
        if self.kind == "fp8":
            return self.part.as_ours(in_dtype(fp8_values(*values, self.block), self.dtype))
        return self.part.as_ours(values[0])


def _of_orientation(part, values):
    """Decoded [out, in] in the orientation of the unquantised tensor."""
    return values.swapaxes(-1, -2) if part.transposed else values


def mxfp4_values(blocks, scales):
    """float32 values [rows, n * 32] of bytes [rows, n, 16] and exponents [rows, n], both uint8; exact."""
    numbers = np.empty((*blocks.shape, 2), np.float32)
    numbers[..., 0] = _MXFP4_VALUES[blocks & 0xF]
    numbers[..., 1] = _MXFP4_VALUES[blocks >> 4]
    numbers = numbers.reshape(*blocks.shape[:-1], -1)
    exponents = scales.astype(np.int32)[..., None] - _BIAS
    with np.errstate(over="ignore"):
        return np.ldexp(numbers, exponents).reshape(*blocks.shape[:-2], -1)


def _fp8_table():
    """float32 value of each byte as E4M3 (without infinities; 0x7F and 0xFF are no numbers)."""
    bits = np.arange(256)
    exponents, mantissas = (bits >> 3) & 0xF, bits & 7
    values = np.where(exponents == 0, np.ldexp(mantissas / 8, -6), np.ldexp(1 + mantissas / 8, exponents - 7))
    values = np.where(bits >= 128, -values, values)
    values[[0x7F, 0xFF]] = np.nan
    return values.astype(np.float32)


_FP8_VALUES = _fp8_table()


def fp8_values(weight, scales, block):
    """float32 values [rows, columns] of E4M3 bytes and factors [ceil(rows / block rows), ceil(columns / block columns)]."""
    values = _FP8_VALUES[weight]
    rows, columns = block
    for first in range(0, weight.shape[0], rows):
        wide = np.repeat(scales[first // rows], columns)[: weight.shape[1]]
        values[first : first + rows] *= wide
    return values


def in_dtype(values, dtype):
    """float32 array in the stored form of a dtype, rounded to nearest even; bfloat16 as bits."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def form_of(part, name, found, place, dtype, block):
    """(StoredForm or None, names of the stored tensors, dtype) of one TensorPart; None: a plain slice of a file.

    Args:
        part (TensorPart): of our model.
        name (str): as the folder has it, without ends of quantised forms.
        found (dict[str, FolderTensor]): tensors of the folder.
        place (Callable): `(FolderTensor) -> path` for messages.
        dtype (str): of quantised weights as they are read.
        block (tuple[int]): of FP8.

    Returns:
        None if the folder has no such tensor.

    Raises:
        CheckpointError: a quantised tensor without its scales, or of another shape or dtype; names file and tensor.
    """
    if name + BLOCKS in found or name + SCALES in found:
        return _mxfp4(part, name, found, place, dtype)
    stored = found.get(name)
    if stored is None:
        return None
    if stored.dtype == "float8_e4m3fn" or name + SCALE in found:
        return _fp8(part, name, found, place, dtype, block)
    if part.slot is None and not part.alternating:
        return None, (name,), stored.dtype
    _check_shape(place(stored), name, stored, part.stored_shape)
    return StoredForm(part, (Place.of(stored, part.slot),), "plain", stored.dtype), (name,), stored.dtype


def _mxfp4(part, name, found, place, dtype):
    names = name + BLOCKS, name + SCALES
    for one, other in (names, names[::-1]):
        if one not in found:
            raise CheckpointError(
                f"{place(found[other])}: tensor {other} is there, but {one} is not: they are one MXFP4 weight."
            )
    # [experts, out, in / 32, 16] and [experts, out, in / 32]
    rows, columns = part.sharding.local_shape
    leading = () if part.slot is None else (part.slots,)
    if columns % MXFP4_SIZE:
        raise CheckpointError(
            f"{place(found[names[0]])}: tensor {names[0]} is MXFP4, but its weight has {columns} columns: expected a multiple "
            f"of {MXFP4_SIZE}."
        )
    shape = (*leading, rows, columns // MXFP4_SIZE)
    for one, expected in zip(names, ((*shape, MXFP4_SIZE // 2), shape)):
        _check_shape(place(found[one]), one, found[one], expected)
        _check_dtype(place(found[one]), one, found[one], "uint8")
    places = tuple(Place.of(found[one], part.slot) for one in names)
    return StoredForm(part, places, "mxfp4", dtype), names, dtype


def _fp8(part, name, found, place, dtype, block):
    stored, scales = found[name], found.get(name + SCALE)
    if scales is None:
        raise CheckpointError(
            f"{place(stored)}: tensor {name} is float8_e4m3fn, but there is no {name + SCALE}: expected the factors of its "
            "blocks."
        )
    _check_dtype(place(stored), name, stored, "float8_e4m3fn")
    _check_dtype(place(scales), name + SCALE, scales, "float32")
    _check_shape(place(stored), name, stored, part.stored_shape)
    _check_shape(place(scales), name + SCALE, scales, tuple(-(-size // one) for size, one in zip(stored.shape, block)))
    places = Place.of(stored), Place.of(scales)
    return StoredForm(part, places, "fp8", dtype, block), (name, name + SCALE), dtype


def _check_shape(path, name, stored, shape):
    if stored.shape != tuple(shape):
        raise CheckpointError(f"{path}: tensor {name} has the shape {list(stored.shape)}, but config.json says {list(shape)}.")


def _check_dtype(path, name, stored, dtype):
    if stored.dtype != dtype:
        raise CheckpointError(f"{path}: tensor {name} is {stored.dtype}: expected {dtype}.")
