"""Objects in the tree of a torch.save file that plain Python lacks: tensors, names of classes, inert stand-ins of objects."""

import os
from dataclasses import dataclass, field

import numpy as np

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import DTYPE_BYTES
from mindspeed_ms.core.dist_checkpointing.reader import numpy_dtype

ITEMSIZES = {**DTYPE_BYTES, "uint16": 2, "uint32": 4, "uint64": 8}
_LONGEST_SHOWN = 200


def shown(name):
    """A name from a file as one short line of ASCII, for messages."""
    text = ascii(str(name))[1:-1]
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."


@dataclass(frozen=True)
class Global:
    """Name of an allowed class, function or constant, e.g. Global("torch", "float32"); never imported."""

    module: str
    name: str

    def __str__(self):
        return shown(f"{self.module}.{self.name}")


@dataclass(eq=False)
class Opaque:
    """Inert stand-in of an object of a known class (an enum of Megatron, torch.device, ...), written back as that class.

    Attributes:
        module, name (str): of the class.
        arguments (tuple): that it is made with: (1,) of ModelType(1).
        state: its attributes (dict or tuple); None if it has none.
        made_by (str): "call" of the class, its "new", or "getattr" (a member of an enum by name).
    """

    module: str
    name: str
    arguments: tuple = ()
    state: object = None
    made_by: str = "call"


class Size(tuple):
    """torch.Size."""

    __slots__ = ()


@dataclass(eq=False)
class Storage:
    """Memory that one or several tensors view.

    Attributes:
        key (str): its name in the file.
        dtype (Optional[str]): of its elements; None: bytes (torch.UntypedStorage).
        numel (int): elements (or bytes).
        location (str): device that it was on, "cpu", "cuda:0", ...
        start, stop (int): its bytes in the file; -1 until they are known.
    """

    key: str
    dtype: str | None
    numel: int
    location: str = "cpu"
    start: int = -1
    stop: int = -1


@dataclass(frozen=True, eq=False)
class TensorReference:
    """Tensor in a file, not yet read.

    Attributes:
        path (str): of the file.
        dtype (str): "float32", "bfloat16", ...
        shape, stride (tuple[int]): in elements.
        offset (int): of the first element in the storage, in elements.
        storage (Storage): shared by tensors that share memory.
        parameter (bool): a torch.nn.Parameter.
        requires_grad (bool): as saved.
        attributes: Python attributes of the tensor (dict, rarely a tuple of two dicts), or None.
        name (str): where it is in the tree, e.g. "model.output_layer.weight"; for messages.
    """

    path: str
    dtype: str
    shape: tuple
    stride: tuple
    offset: int
    storage: Storage
    parameter: bool = False
    requires_grad: bool = False
    attributes: object = None
    name: str = ""

    def __repr__(self):
        return f"TensorReference({self.name!r}, {self.dtype}, {list(self.shape)})"

    @property
    def itemsize(self):
        """Bytes of one element."""
        return ITEMSIZES[self.dtype]

    @property
    def numel(self):
        """Number of elements."""
        return _product(self.shape)

    @property
    def nbytes(self):
        """Bytes of all elements."""
        return self.numel * self.itemsize

    @property
    def start(self):
        """Byte of the file where the first element begins."""
        return self.storage.start + self.offset * self.itemsize

    @property
    def stop(self):
        """Byte of the file where the last element ends."""
        return self.start + self.span * self.itemsize

    @property
    def span(self):
        """Elements of the storage from the first to the last one of this tensor."""
        if not self.numel:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride))

    @property
    def is_contiguous(self):
        """Whether bytes `start` to `stop` are the elements, row-major."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride)):
            if size != 1 and stride != expected:
                return not self.numel
            expected *= size
        return True

    def rows(self, first, last):
        """Bytes (start, stop) of the file that hold rows `first` to `last` (exclusive) of a contiguous tensor.

        Raises:
            CheckpointError: it is not contiguous, or has no such rows.
        """
        if not self.is_contiguous or not self.shape or not 0 <= first <= last <= self.shape[0]:
            raise CheckpointError(
                f"{self.path}: rows {first} to {last} of tensor {shown(self.name)} are no byte range: it has shape "
                f"{list(self.shape)} and strides {list(self.stride)}."
            )
        row = _product(self.shape[1:]) * self.itemsize
        return self.start + first * row, self.start + last * row

    def read(self):
        """The values as a numpy array (bfloat16: uint16 bits).

        Raises:
            CheckpointError: the file cannot be read, or ends within the tensor.
        """
        elements = np.empty(self.span, numpy_dtype(self.dtype))
        read_exactly(self.path, self.start, memoryview(elements).cast("B") if self.span else b"", self.name)
        if self.is_contiguous:
            return elements.reshape(self.shape)
        strides = [stride * self.itemsize for stride in self.stride]
        return np.ascontiguousarray(np.lib.stride_tricks.as_strided(elements, self.shape, strides, writeable=False))


@dataclass(eq=False)
class TensorToWrite:
    """Tensor to write with `write_torch_file`; the same object at two places of the tree is written once.

    Attributes:
        dtype (str): "float32", ...
        shape (tuple[int]): as written.
        data: contiguous values (numpy array or bytes; bfloat16 as its bits), or a function without arguments that gives them,
            or an iterator over blocks of their bytes.
        parameter, requires_grad, attributes: as in `TensorReference`.
    """

    dtype: str
    shape: tuple
    data: object = field(repr=False)
    parameter: bool = False
    requires_grad: bool = False
    attributes: object = None

    @property
    def nbytes(self):
        """Bytes of all elements."""
        return _product(self.shape) * ITEMSIZES[self.dtype]


def read_exactly(path, start, memory, name):
    """Fill `memory` (writable bytes) with the file's bytes from `start` on; CheckpointError naming the tensor if it cannot."""
    memory = memoryview(memory)
    try:
        with open(path, "rb", buffering=0) as file:
            while memory.nbytes:
                count = os.preadv(file.fileno(), [memory], start)
                if not count:
                    raise CheckpointError(f"{path} is damaged: it ends within tensor {shown(name)}.")
                memory, start = memory[count:], start + count
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def _product(sizes):
    result = 1
    for size in sizes:
        result *= size
    return result
