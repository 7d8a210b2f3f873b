"""Constructors that stand for the classes and functions named in a pickle of torch.save: all of them inert.

They only keep plain values, so that no file can run code, and the cost of all of them is bounded by the pickle's own size. The
first argument of each is the `unpickler.TorchObjects` of the file.
"""

import argparse
import collections
import io
import pathlib
import re
import types

import numpy as np

from mindspeed_ms.core.dist_checkpointing.torch_file.allowed import FACTORIES, is_member, is_opaque
from mindspeed_ms.core.dist_checkpointing.torch_file.objects import Global, Opaque, Size, Storage, TensorReference, shown
from mindspeed_ms.core.dist_checkpointing.torch_file.pickle_machine import check_key

_NUMPY_DTYPE = re.compile(r"[iu][1248]|f[248]|b1|c8|c16")


class Refused(ValueError):
    """Reason why a call or a state is not allowed."""


def _size(value):
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise Refused(f"{shown(value)} is no size")
    return value


def _sizes(values):
    if not isinstance(values, tuple | list) or len(values) > 32:
        raise Refused(f"{type(values).__name__} of {len(values)} is no shape")
    return tuple(_size(value) for value in values)


def _typed(value, *kinds):
    if type(value) not in kinds:
        raise Refused(f"{type(value).__name__} instead of {kinds[0].__name__}")
    return value


# Tensors


def _rebuild_tensor(objects, storage, offset, shape, stride, requires_grad=False, hooks=None, metadata=None, *, dtype=None):
    _typed(storage, Storage)
    if hooks:
        raise Refused("a tensor with hooks")
    if metadata and any(value for value in _typed(metadata, dict).values()):
        raise Refused(f"a tensor with {', '.join(shown(name) for name in metadata)}")
    shape, stride = _sizes(shape), _sizes(stride)
    if len(shape) != len(stride):
        raise Refused(f"a tensor of shape {list(shape)} with strides {list(stride)}")
    return TensorReference(
        objects.path, dtype or storage.dtype, shape, stride, _size(offset), storage, requires_grad=_typed(requires_grad, bool)
    )


def _rebuild_tensor_v3(objects, storage, offset, shape, stride, requires_grad, hooks, dtype, metadata=None):
    if _typed(dtype, Global).module != "torch":
        raise Refused(f"dtype {dtype}")
    return _rebuild_tensor(objects, storage, offset, shape, stride, requires_grad, hooks, metadata, dtype=dtype.name)


def _rebuild_npu_tensor(objects, storage, offset, shape, stride, requires_grad, hooks, npu_storage_info=None):
    # the storage is saved in the plain layout; the last argument says which one the device is to use
    return _rebuild_tensor(objects, storage, offset, shape, stride, requires_grad, hooks)


def _changed(tensor, **changes):
    fields = {**vars(_typed(tensor, TensorReference)), **changes}
    return TensorReference(**fields)


def _rebuild_parameter(objects, tensor, requires_grad, hooks, state=None):
    if hooks:
        raise Refused("a parameter with hooks")
    return _changed(tensor, parameter=True, requires_grad=_typed(requires_grad, bool), attributes=state)


def _rebuild_from_type(objects, function, cls, arguments, state):
    if _typed(cls, Global) not in (Global("torch", "Tensor"), Global("torch.nn.parameter", "Parameter")):
        raise Refused(f"a tensor of class {cls}")
    if _typed(function, Global).module != "torch._utils" or not function.name.startswith("_rebuild_tensor"):
        raise Refused(f"a tensor made by {function}")
    tensor = objects.call(function, arguments)
    return _changed(tensor, parameter=cls.name == "Parameter", attributes=state)


# Plain Python


def _ordered_dict(objects, pairs=()):
    result = collections.OrderedDict()
    for pair in pairs:
        key, value = _typed(pair, list, tuple)
        check_key(key)
        result[key] = value
    return result


def _default_dict(objects, factory=None, items=None):
    if factory is not None and _typed(factory, Global) == Global("collections", "OrderedDict"):
        return collections.defaultdict(collections.OrderedDict)
    if factory is not None and (factory.module != "builtins" or factory.name not in FACTORIES):
        raise Refused(f"factory {factory}")
    return collections.defaultdict(factory and FACTORIES[factory.name])


def _counter(objects, items=None):
    return collections.Counter(_typed(items, dict)) if items else collections.Counter()


def _set(kind):
    def make(objects, items=()):
        for key in _typed(items, list, tuple):
            check_key(key)
        return kind(items)

    return make


def _encode(objects, text, encoding="utf-8"):
    if encoding not in ("latin1", "latin-1", "utf-8", "utf8", "ascii"):
        raise Refused(f"encoding {shown(encoding)}")
    return _typed(text, str).encode(encoding)


def _bytes(objects, data=b""):
    return bytes(_typed(data, bytes, bytearray))


def _bytearray(objects, data=b"", encoding=None):
    return bytearray(_encode(objects, data, encoding) if encoding is not None else _typed(data, bytes, bytearray))


def _complex(objects, real, imaginary=0.0):
    return complex(_typed(real, float, int), _typed(imaginary, float, int))


def _slice(objects, *parts):
    return slice(*(part if part is None else _typed(part, int) for part in parts))


def _member(objects, cls, name):
    """`getattr(cls, name)`: member of an enum, as Python 3.11 pickles it."""
    if not is_opaque(_typed(cls, Global)) or not is_member(name):
        raise Refused(f"{shown(name)} of {cls}")
    return Opaque(cls.module, cls.name, (name,), made_by="getattr")


def _reconstructor(objects, cls, base, state):
    if base != Global("builtins", "object") or state is not None:
        raise Refused("an object with a state of its base")
    return objects.new(cls, ())


def _new_object(objects, cls, *arguments):
    return objects.new(cls, arguments)


def _path(kind):
    return lambda objects, *parts: kind(*(_typed(part, str) for part in parts))


def _layout(objects, name):
    return objects.find(*_typed(name, str).rsplit(".", 1))


# numpy


def _numpy_dtype(objects, code, align=False, copy=True):
    if not _NUMPY_DTYPE.fullmatch(_typed(code, str)):
        raise Refused(f"numpy dtype {shown(code)}")
    return np.dtype(code, False, True)


def _set_dtype_state(objects, dtype, state):
    if tuple(state[:1]) + tuple(state[2:8]) != (3, None, None, None, -1, -1, 0) or state[1] not in ("<", ">", "|", "="):
        raise Refused("a dtype of another kind")
    dtype.__setstate__(tuple(state[:8]))


def _array(objects, raw, dtype, shape, order="C"):
    shape, raw = _sizes((shape,) if isinstance(shape, int) else shape), _typed(raw, bytes, bytearray)
    expected = _typed_dtype(dtype).itemsize
    for size in shape:
        expected *= size
    if expected != len(raw) or order not in ("C", "F"):
        raise Refused(f"a numpy array of shape {list(shape)} and {len(raw)} bytes")
    return np.frombuffer(bytes(raw), dtype).reshape(shape, order=order)


def _typed_dtype(dtype):
    if not isinstance(dtype, np.dtype):
        raise Refused(f"{type(dtype).__name__} instead of a numpy dtype")
    return dtype


def _empty_array(objects, cls, shape, kind):
    if cls != Global("numpy", "ndarray") or shape != (0,):
        raise Refused("a numpy array of another kind")
    return np.empty(0, np.int8)


def _set_array_state(objects, array, state):
    _, shape, dtype, fortran, raw = state
    made = _array(objects, raw, dtype, shape)  # checks them
    objects.spend(len(raw))
    array.__setstate__((1, made.shape, dtype, bool(fortran), bytes(raw)))


def _scalar(objects, dtype, raw):
    return _array(objects, raw, dtype, ())[()]


# States


def _set_attributes(objects, target, state):
    for name in _typed(state, dict):
        _typed(name, str)
    vars(target).update(state)


def _set_metadata(objects, target, state):
    if list(_typed(state, dict)) not in ([], ["_metadata"]):
        raise Refused(f"attribute {shown(next(iter(state)))}")
    vars(target).update(state)


def _set_opaque_state(objects, target, state):
    if target.state is not None:
        raise Refused("it has one")
    target.state = state


def _set_stream(objects, target, state):
    content, position = state[:2]
    if target.getbuffer().nbytes:
        raise Refused("it has one")
    objects.spend(len(content))
    target.write(_typed(content, bytes))
    target.seek(_size(position))


STATES = [
    (argparse.Namespace, _set_attributes),
    (types.SimpleNamespace, _set_attributes),
    (collections.OrderedDict, _set_metadata),
    (np.ndarray, _set_array_state),
    (np.dtype, _set_dtype_state),
    (io.BytesIO, _set_stream),
    (Opaque, _set_opaque_state),
]
CALLS = {
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_v3,
    ("torch_npu.utils.storage", "_rebuild_npu_tensor"): _rebuild_npu_tensor,
    ("torch_npu.utils.tensor_methods", "_rebuild_npu_tensor"): _rebuild_npu_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("torch", "Size"): lambda objects, sizes=(): Size(_typed(sizes, tuple, list, Size)),
    ("torch.serialization", "_get_layout"): _layout,
    ("collections", "OrderedDict"): _ordered_dict,
    ("collections", "defaultdict"): _default_dict,
    ("collections", "Counter"): _counter,
    ("argparse", "Namespace"): lambda objects: argparse.Namespace(),
    ("types", "SimpleNamespace"): lambda objects: types.SimpleNamespace(),
    ("_io", "BytesIO"): lambda objects: io.BytesIO(),
    ("builtins", "set"): _set(set),
    ("builtins", "frozenset"): _set(frozenset),
    ("builtins", "bytearray"): _bytearray,
    ("builtins", "bytes"): _bytes,
    ("builtins", "complex"): _complex,
    ("builtins", "slice"): _slice,
    ("builtins", "getattr"): _member,
    ("copyreg", "_reconstructor"): _reconstructor,
    ("copyreg", "__newobj__"): _new_object,
    ("_codecs", "encode"): _encode,
    **{
        (f"numpy.{core}.multiarray", name): action
        for core in ("core", "_core")
        for name, action in (("_reconstruct", _empty_array), ("scalar", _scalar))
    },
    ("numpy.core.numeric", "_frombuffer"): _array,
    ("numpy._core.numeric", "_frombuffer"): _array,
    ("numpy", "dtype"): _numpy_dtype,
    **{
        (module, name): _path(pathlib.PureWindowsPath if "Windows" in name else pathlib.PurePosixPath)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}
