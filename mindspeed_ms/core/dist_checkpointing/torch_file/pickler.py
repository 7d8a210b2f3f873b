"""Writes the pickle (protocol 2) of a torch.save file from the objects that `reader` gives; nothing is imported for it."""

import argparse
import collections
import io
import pathlib
import struct
import types
from dataclasses import dataclass

import numpy as np

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.torch_file.allowed import STORAGES, is_member, is_opaque
from mindspeed_ms.core.dist_checkpointing.torch_file.objects import (
    ITEMSIZES,
    Global,
    Opaque,
    Size,
    TensorReference,
    TensorToWrite,
    shown,
)
from mindspeed_ms.core.dist_checkpointing.torch_file.unpickler import is_allowed

_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items() if dtype in ITEMSIZES}
_FACTORIES = {kind: Global("builtins", kind.__name__) for kind in (list, dict, int, float, set, str, bool)}
_FACTORIES[collections.OrderedDict] = Global("collections", "OrderedDict")
_ORDERED_DICT = Global("collections", "OrderedDict")


@dataclass
class StorageToWrite:
    """Storage of the file: `nbytes`, and `source`, one of the tensors (TensorReference or TensorToWrite) that view it."""

    source: object
    nbytes: int


class Pickler:
    """Pickles one object tree.

    Attributes:
        data (bytearray): the pickle.
        storages (list[StorageToWrite]): of its tensors; their place in the list is their key.
    """

    def __init__(self):
        self.data, self.storages = bytearray(b"\x80\2"), []
        self._memo, self._keys, self._alive = {}, {}, []

    def dump(self, tree):
        """Pickle the tree; CheckpointError naming the place of an object that cannot be written."""
        try:
            self._save(tree, "")
        except RecursionError:
            raise CheckpointError("An object nested so deeply cannot be written as a file of torch.save.") from None
        self.data += b"."
        return self

    def _save(self, value, place):
        key = (type(value), value) if isinstance(value, str | Global) else id(value)
        known = self._memo.get(key)
        if known is not None:
            self.data += b"h" + bytes([known]) if known < 256 else b"j" + known.to_bytes(4, "little")
            return
        action = next((action for kind, action in _ACTIONS if isinstance(value, kind)), None)
        if action is None:
            what = f"{shown(place) or 'the object'} is of type {type(value).__name__}"
            raise CheckpointError(f"{what}, which cannot be written as a file of torch.save.")
        action(self, value, place)

    def _remember(self, value):
        """Refer to the object on top of the stack when it comes again."""
        number = len(self._memo)
        self._memo[(type(value), value) if isinstance(value, str | Global) else id(value)] = number
        self._alive.append(value)  # so that its id stays its own
        self.data += b"q" + bytes([number]) if number < 256 else b"r" + number.to_bytes(4, "little")

    def _call(self, name, arguments, place, opcode=b"R"):
        self._save(name, place)
        self._save_tuple(arguments, place, remember=False)
        self.data += opcode

    def _build(self, state, place):
        self._save(state, place)
        self.data += b"b"

    # Plain Python

    def _save_none(self, value, place):
        self.data += b"N"

    def _save_bool(self, value, place):
        self.data += b"\x88" if value else b"\x89"

    def _save_int(self, value, place):
        if 0 <= value < 256:
            self.data += b"K" + bytes([value])
        elif -(1 << 31) <= value < 1 << 31:
            self.data += b"J" + struct.pack("<i", value)
        else:
            encoded = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            short = len(encoded) < 256
            self.data += (b"\x8a" + bytes([len(encoded)]) if short else b"\x8b" + struct.pack("<i", len(encoded))) + encoded

    def _save_float(self, value, place):
        self.data += b"G" + struct.pack(">d", value)

    def _save_str(self, value, place):
        encoded = value.encode("utf-8", "surrogatepass")
        self.data += b"X" + struct.pack("<I", len(encoded)) + encoded
        self._remember(value)

    def _save_bytes(self, value, place):
        self._call(Global("_codecs", "encode"), (value.decode("latin-1"), "latin1"), place)

    def _save_bytearray(self, value, place):
        self._call(Global("builtins", "bytearray"), (bytes(value),), place)

    def _save_complex(self, value, place):
        self._call(Global("builtins", "complex"), (value.real, value.imag), place)

    def _save_slice(self, value, place):
        self._call(Global("builtins", "slice"), (value.start, value.stop, value.step), place)

    def _save_tuple(self, value, place, remember=True):
        if not value:
            self.data += b")"
            return
        self.data += b"(" if len(value) > 3 else b""
        for number, part in enumerate(value):
            self._save(part, f"{place}.{number}")
        self.data += (b"\x85", b"\x86", b"\x87", b"t")[min(len(value), 4) - 1]
        if remember:
            self._remember(value)

    def _save_size(self, value, place):
        self._call(Global("torch", "Size"), (tuple(value),), place)

    def _save_list(self, value, place):
        self.data += b"]"
        self._remember(value)
        self._save_parts(value, place)

    def _save_parts(self, parts, place):
        if parts:
            self.data += b"("
            for number, part in enumerate(parts):
                self._save(part, f"{place}.{number}")
            self.data += b"e"

    def _save_dict(self, value, place):
        self.data += b"}"
        self._remember(value)
        self._save_items(value, place)

    def _save_items(self, value, place):
        if value:
            self.data += b"("
            for key, item in value.items():
                self._save(key, place)
                self._save(item, f"{place}.{key}" if place else str(key))
            self.data += b"u"

    def _save_ordered_dict(self, value, place):
        self._call(_ORDERED_DICT, (), place)
        self._remember(value)
        self._save_items(value, place)
        if vars(value):
            self._build(vars(value), place)

    def _save_default_dict(self, value, place):
        factory = value.default_factory
        if factory is not None and factory not in _FACTORIES:
            raise CheckpointError(f"{shown(place)} has a factory that cannot be written as a file of torch.save.")
        self._call(Global("collections", "defaultdict"), (factory and _FACTORIES[factory],), place)
        self._remember(value)
        self._save_items(value, place)

    def _save_counter(self, value, place):
        self._call(Global("collections", "Counter"), (dict(value),), place)
        self._remember(value)

    def _save_set(self, value, place):
        self._call(Global("builtins", type(value).__name__), (list(value),), place)
        self._remember(value)

    def _save_namespace(self, value, place):
        cls = Global("argparse", "Namespace") if isinstance(value, argparse.Namespace) else Global("types", "SimpleNamespace")
        self._call(cls, (), place, b"\x81" if cls.module == "argparse" else b"R")
        self._remember(value)
        self._build(vars(value), place)

    def _save_path(self, value, place):
        name = "PureWindowsPath" if isinstance(value, pathlib.PureWindowsPath) else "PosixPath"
        self._call(Global("pathlib", name), value.parts, place)

    def _save_stream(self, value, place):
        self._call(Global("_io", "BytesIO"), (), place, b"\x81")
        self._remember(value)
        self._build((value.getvalue(), value.tell(), None), place)

    def _save_global(self, value, place):
        if not is_allowed(value):
            raise CheckpointError(f"{shown(place)} names {value}, which is not one of the classes that checkpoints consist of.")
        self.data += f"c{value.module}\n{value.name}\n".encode()
        self._remember(value)

    def _save_opaque(self, value, place):
        cls = Global(value.module, value.name)
        if not is_opaque(value) or (
            value.made_by == "getattr" and not (len(value.arguments) == 1 and is_member(*value.arguments))
        ):
            raise CheckpointError(
                f"{shown(place)} is made by {cls}, which is not one of the classes that checkpoints consist of."
            )
        if value.made_by == "getattr":
            self._call(Global("builtins", "getattr"), (cls, *value.arguments), place)
        else:
            self._call(cls, tuple(value.arguments), place, b"\x81" if value.made_by == "new" else b"R")
        self._remember(value)
        if value.state is not None:
            self._build(value.state, place)

    # numpy

    def _save_array(self, value, place):
        _check_plain(value, place)
        self._call(Global("numpy.core.multiarray", "_reconstruct"), (Global("numpy", "ndarray"), (0,), b"b"), place)
        self._remember(value)
        self._build((1, value.shape, value.dtype, False, value.tobytes()), place)

    def _save_numpy_dtype(self, value, place):
        self._call(Global("numpy", "dtype"), (value.str[1:], False, True), place)
        self._remember(value)
        self._build((3, value.str[0], None, None, None, -1, -1, 0), place)

    def _save_scalar(self, value, place):
        _check_plain(value, place)
        self._call(Global("numpy.core.multiarray", "scalar"), (value.dtype, value.tobytes()), place)

    # Tensors

    def _save_tensor(self, value, place):
        if value.dtype not in ITEMSIZES:
            raise CheckpointError(f"{shown(place)} has dtype {shown(value.dtype)}: expected one of {', '.join(ITEMSIZES)}.")
        stride, offset = _stride(value), getattr(value, "offset", 0)
        function, arguments = self._rebuilding(value, stride, offset)
        if value.parameter:
            self._save(
                Global("torch._utils", "_rebuild_parameter" + ("_with_state" if value.attributes is not None else "")), ""
            )
            self.data += b"("
            self._call(function, arguments, place)
            self._save(value.requires_grad, place)
            self._call(_ORDERED_DICT, (), place)
            if value.attributes is not None:
                self._save(value.attributes, place)
            self.data += b"tR"
        elif value.attributes is not None:
            whole = (function, Global("torch", "Tensor"), arguments, value.attributes)
            self._call(Global("torch._tensor", "_rebuild_from_type_v2"), whole, place)
        else:
            self._call(function, arguments, place)
        self._remember(value)

    def _rebuilding(self, value, stride, offset):
        """Function that makes the tensor, and its arguments."""
        key, hooks = _Persistent(self._storage(value), value), collections.OrderedDict()
        arguments = (key, offset, tuple(value.shape), stride, value.requires_grad, hooks)
        if key.kind is None:
            return Global("torch._utils", "_rebuild_tensor_v3"), (*arguments, Global("torch", value.dtype))
        return Global("torch._utils", "_rebuild_tensor_v2"), arguments

    def _storage(self, value):
        """Number of the tensor's storage."""
        memory = value.storage if isinstance(value, TensorReference) else value
        self._alive.append(memory)
        identity = (value.path, memory.start, memory.stop) if isinstance(value, TensorReference) else id(value)
        if identity not in self._keys:
            self._keys[identity] = len(self.storages)
            self.storages.append(StorageToWrite(value, _storage_bytes(value)))
        return self._keys[identity]

    def _save_persistent(self, value, place):
        kind = Global("torch.storage", "UntypedStorage") if value.kind is None else Global("torch", value.kind)
        self._save_tuple(("storage", kind, str(value.number), "cpu", value.numel), place, remember=False)
        self.data += b"Q"


class _Persistent:
    """Storage as tensors refer to it."""

    def __init__(self, number, tensor):
        typed = getattr(tensor, "storage", tensor).dtype is not None
        self.number, self.kind = number, _STORAGE_OF.get(tensor.dtype) if typed else None
        self.numel = _storage_bytes(tensor) // (1 if self.kind is None else ITEMSIZES[tensor.dtype])


def _check_plain(value, place):
    if value.dtype.kind not in "biufc":
        raise CheckpointError(f"{shown(place)} is a numpy {type(value).__name__} of {value.dtype}, which cannot be written.")


def _storage_bytes(tensor):
    if isinstance(tensor, TensorToWrite):
        return tensor.nbytes
    return tensor.storage.numel * ITEMSIZES[tensor.storage.dtype or "uint8"]


def _stride(tensor):
    if isinstance(tensor, TensorReference):
        return tensor.stride
    stride, step = [], 1
    for size in reversed(tensor.shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


_ACTIONS = [
    (type(None), Pickler._save_none),
    (bool, Pickler._save_bool),
    (np.generic, Pickler._save_scalar),  # before float: np.float64 is one
    (int, Pickler._save_int),
    (float, Pickler._save_float),
    (str, Pickler._save_str),
    (TensorReference | TensorToWrite, Pickler._save_tensor),
    (Size, Pickler._save_size),
    (tuple, Pickler._save_tuple),
    (list, Pickler._save_list),
    (collections.OrderedDict, Pickler._save_ordered_dict),
    (collections.defaultdict, Pickler._save_default_dict),
    (collections.Counter, Pickler._save_counter),
    (dict, Pickler._save_dict),
    (Global, Pickler._save_global),
    (Opaque, Pickler._save_opaque),
    (argparse.Namespace | types.SimpleNamespace, Pickler._save_namespace),
    (set | frozenset, Pickler._save_set),
    (bytes, Pickler._save_bytes),
    (bytearray, Pickler._save_bytearray),
    (complex, Pickler._save_complex),
    (slice, Pickler._save_slice),
    (np.ndarray, Pickler._save_array),
    (np.dtype, Pickler._save_numpy_dtype),
    (pathlib.PurePath, Pickler._save_path),
    (io.BytesIO, Pickler._save_stream),
    (_Persistent, Pickler._save_persistent),
]
