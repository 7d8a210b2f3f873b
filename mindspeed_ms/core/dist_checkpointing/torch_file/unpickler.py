"""What the names, calls and states in a pickle of torch.save mean: a list of allowed classes, all of them inert.

Nothing is ever imported or called by name: a name becomes a `Global`, and a call of it one of the constructors below. They only
keep plain values, so that no file can run code, and the cost of all of them is bounded by the pickle's own size.
"""

import argparse
import collections
import io
import pathlib
import re
import types

import numpy as np

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.torch_file.objects import Global, Opaque, Size, Storage, TensorReference, shown
from mindspeed_ms.core.dist_checkpointing.torch_file.pickle_machine import PickleMachine, check_key

STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "UntypedStorage": None,
}
_TORCH_CONSTANTS = frozenset(
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex32 complex64 complex128 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 qint8 quint8 qint32 quint4x2 "
    "quint2x4 bits8 bits16 strided sparse_coo sparse_csr contiguous_format preserve_format channels_last channels_last_3d "
    "double float half long int short Tensor".split()
)
_ENUMS = re.compile(r"(megatron|mindspeed|mindspeed_llm|modellink|ascendspeed)(\.[A-Za-z_]\w*)*\.enums")
_CLASS_NAME = re.compile(r"[A-Z]\w*")
_OPAQUE = {
    "torch": "device",
    "signal": "Signals",
    "datetime": "timedelta",
    "torch_npu.npu._format": "Format",
    "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex TensorStorageMetadata ChunkStorageMetadata "
    "BytesStorageMetadata TensorProperties StorageMeta _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.distributed.checkpoint.planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
    "megatron.core.rerun_state_machine": "RerunMode RerunState RerunDiagnostic RerunValidationStatus Caller Call QuickStats",
    "megatron.core.transformer.pipeline_parallel_layer_layout": "PipelineParallelLayerLayout",
}
_OPAQUE_NAMES = frozenset((module, name) for module, names in _OPAQUE.items() for name in names.split())
_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg", "UserDict": "collections"}
_NUMPY_DTYPE = re.compile(r"[iu][1248]|f[248]|b1|c8|c16")
_FACTORIES = {"list": list, "dict": dict, "int": int, "float": float, "set": set, "str": str, "bool": bool}


class Refused(Exception):
    """Reason why a call or a state is not allowed."""


class TorchObjects:
    """Constructors for one file.

    Args:
        path (str): for messages and tensors.

    Attributes:
        machine (PickleMachine): that reads the file; what it has read bounds what constructors may copy.
        storages (dict[str, Storage]): by key.
    """

    def __init__(self, path):
        self.path, self.machine, self.storages, self._spent = path, None, {}, 0

    def find(self, module, name):
        """The `Global` of an allowed name."""
        found = Global(_MODULES.get(module, module), name)
        pair = (found.module, found.name)
        if pair in _CALLS or pair in _NAMES or pair in _OPAQUE_NAMES or _is_enum(*pair):
            return found
        if pair[0].startswith("torch.nn.modules.") or pair[0] == "__torch__":
            kind = "it holds a whole module, not the state dict of one"
        else:
            kind = "it is not one of the classes that checkpoints consist of"
        raise CheckpointError(f"{self.path} is refused: its pickle names {found}, and {kind}. Nothing of it was run.")

    def call(self, callee, arguments, made_by="call"):
        """Result of a constructor."""
        if type(callee) is not Global or type(arguments) is not tuple:
            raise CheckpointError(
                f"{self.path} is refused: its pickle calls {shown(type(callee).__name__)}, which is no class."
            )
        self.spend(1 + sum(len(value) for value in arguments if hasattr(value, "__len__")))
        pair = (callee.module, callee.name)
        try:
            if pair in _CALLS:
                return _CALLS[pair](self, *arguments)
            if pair in _OPAQUE_NAMES or _is_enum(*pair):
                return Opaque(*pair, arguments, made_by=made_by)
            raise Refused("it cannot be called")
        except (Refused, TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"{self.path} is refused: its pickle calls {callee} wrongly: {shown(error)}.") from error

    def new(self, cls, arguments):
        """Result of `cls.__new__`."""
        return self.call(cls, arguments, "new")

    def build(self, target, state):
        """Give an object its state."""
        self.spend(len(state) if hasattr(state, "__len__") else 1)
        try:
            for kind, action in _STATES:
                if isinstance(target, kind):
                    return action(self, target, state)
            raise Refused("it has no state")
        except (Refused, TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            name = target if isinstance(target, Global) else type(target).__name__
            raise CheckpointError(
                f"{self.path} is refused: its pickle sets a wrong state of {name}: {shown(error)}."
            ) from error

    def persistent(self, identity):
        """Storage of a tensor."""
        if type(identity) is not tuple or len(identity) not in (5, 6) or identity[0] != "storage":
            raise CheckpointError(f"{self.path} is refused: its pickle refers to something that is no storage.")
        _, kind, key, location, numel = identity[:5]
        if type(kind) is not Global or kind.name not in STORAGES or type(key) is not str or type(location) is not str:
            raise CheckpointError(f"{self.path} is refused: its pickle has a storage of unknown kind {shown(kind)}.")
        if len(identity) == 6 and identity[5] is not None:
            raise CheckpointError(f"{self.path} is refused: storage {shown(key)} is a view of another one.")
        new = Storage(key, STORAGES[kind.name], _size(numel), location)
        known = self.storages.setdefault(key, new)
        if (known.dtype, known.numel) != (new.dtype, new.numel):
            raise CheckpointError(f"{self.path} is refused: its storage {shown(key)} has two dtypes or sizes.")
        return known

    def spend(self, count):
        """Count what constructors copy; a file that copies much more than it holds is refused."""
        self._spent += count
        self.check_expanded(self._spent)

    def check_expanded(self, count):
        """Refuse a file whose tree has `count` parts, shared ones counted each time, if that is far more than its size."""
        if count > 16 * self.machine.consumed + (1 << 20):
            raise CheckpointError(f"{self.path} is refused: its pickle expands to much more than its own size.")


def read_pickle(path, data, position=0):
    """Read one pickle at `position` of `data` (bytes or mmap): (object, TorchObjects, position after it)."""
    objects = TorchObjects(path)
    objects.machine = PickleMachine(path, data, objects, position)
    return objects.machine.run(), objects, objects.machine.position


def _is_enum(module, name):
    return bool(_ENUMS.fullmatch(module) and _CLASS_NAME.fullmatch(name))


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
    if dtype is None and storage.dtype is None:
        raise Refused("a tensor without a dtype")
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
    if factory is not None and (factory.module != "builtins" or factory.name not in _FACTORIES):
        raise Refused(f"factory {factory}")
    return collections.defaultdict(factory and _FACTORIES[factory.name])


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
    if not _is_opaque(_typed(cls, Global)) or not _typed(name, str).isidentifier() or name.startswith("_"):
        raise Refused(f"{shown(name)} of {cls}")
    return Opaque(cls.module, cls.name, (name,), made_by="getattr")


def _is_opaque(name):
    return (name.module, name.name) in _OPAQUE_NAMES or _is_enum(name.module, name.name)


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


_STATES = [
    (argparse.Namespace, _set_attributes),
    (types.SimpleNamespace, _set_attributes),
    (collections.OrderedDict, _set_metadata),
    (np.ndarray, _set_array_state),
    (np.dtype, _set_dtype_state),
    (io.BytesIO, _set_stream),
    (Opaque, _set_opaque_state),
]
_CALLS = {
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
_NAMES = {
    *(("torch", name) for name in (*STORAGES, *_TORCH_CONSTANTS)),
    ("torch.storage", "UntypedStorage"),
    ("torch.nn.parameter", "Parameter"),
    ("numpy", "ndarray"),
    ("builtins", "object"),
    *(("builtins", name) for name in _FACTORIES),
}
