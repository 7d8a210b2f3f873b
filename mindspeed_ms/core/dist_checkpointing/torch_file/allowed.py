"""Names that a pickle of torch.save may have: storages, dtypes, and the classes whose objects are kept as `Opaque`."""

import re

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
FACTORIES = {"list": list, "dict": dict, "int": int, "float": float, "set": set, "str": str, "bool": bool}
NAMES = {
    *(("torch", name) for name in (*STORAGES, *_TORCH_CONSTANTS)),
    *(("torch.cuda", name) for name in STORAGES),
    ("torch.storage", "UntypedStorage"),
    ("torch.nn.parameter", "Parameter"),
    ("numpy", "ndarray"),
    ("builtins", "object"),
    *(("builtins", name) for name in FACTORIES),
}


def is_opaque(name):
    """Whether objects of the class `name` (Global, or Opaque of it) are kept as `Opaque`."""
    is_enum = _ENUMS.fullmatch(name.module) and _CLASS_NAME.fullmatch(name.name)
    return bool(is_enum) or (name.module, name.name) in _OPAQUE_NAMES


def is_member(name):
    """Whether `name` can be that of an enum's member."""
    return type(name) is str and name.isidentifier() and not name.startswith("_")
