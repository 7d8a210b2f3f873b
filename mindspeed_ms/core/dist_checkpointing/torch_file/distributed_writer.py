"""Writes folders of torch.distributed.checkpoint (Megatron's format `torch_dist`): see `distributed` for what is in them."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mindspeed_ms.core.dist_checkpointing import durable
from mindspeed_ms.core.dist_checkpointing.torch_file.distributed import FORMAT_FILE, METADATA_FILE
from mindspeed_ms.core.dist_checkpointing.torch_file.objects import Global, Opaque, Size
from mindspeed_ms.core.dist_checkpointing.torch_file.pickler import Pickler
from mindspeed_ms.core.dist_checkpointing.torch_file.writer import write_archives

_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class EntryToWrite:
    """Part of a tensor, or an object.

    Attributes:
        key (str): of the tensor or object.
        value: `TensorToWrite` of the part's sizes, or any tree.
        offsets (Optional[tuple[int]]): of the part in the tensor; None: an object.
        shape (tuple[int]): of the whole tensor, as stored.
        flat_of (Optional[tuple[int]]): see `DistributedTensor`.
    """

    key: str
    value: object
    offsets: tuple | None = None
    shape: tuple = ()
    flat_of: tuple | None = None


def write_distributed(folder, files, workers=1):
    """Write all files of a folder, `.metadata` last.

    Args:
        folder (str): existing and empty.
        files (list[list[EntryToWrite]]): content of `__0_0.distcp`, `__1_0.distcp`, ...; none empty.
        workers (int): files at a time.

    Raises:
        CheckpointError, OSError: as of `write_torch_file`.
    """
    names = [f"__{number}_0.distcp" for number in range(len(files))]
    with ThreadPoolExecutor(workers) as pool:
        paths = [os.path.join(folder, name) for name in names]
        written = list(pool.map(lambda path, entries: write_archives(path, (one.value for one in entries)), paths, files))
    described, places, flat = {}, {}, {}
    for name, entries, spans in zip(names, files, written):
        for entry, (start, length) in zip(entries, spans):
            offset = None if entry.offsets is None else Size(entry.offsets)
            index = _made(_METADATA, "MetadataIndex", fqn=entry.key, offset=offset, index=None)
            places[index] = _made(_FILES, "_StorageInfo", relative_path=name, offset=start, length=length)
            if entry.offsets is None:
                described[entry.key] = _made(_METADATA, "BytesStorageMetadata")
                continue
            if entry.key not in described:
                described[entry.key] = _tensor(entry)
                flat[entry.key] = {"nd_reformulated_orig_global_shape": entry.flat_of} if entry.flat_of else {}
            described[entry.key].state["chunks"].append(
                _made(_METADATA, "ChunkStorageMetadata", offsets=offset, sizes=Size(entry.value.shape))
            )
    state = {"state_dict_metadata": described, "planner_data": None, "storage_data": places, "storage_meta": None}
    metadata = _made(_METADATA, "Metadata", **state, mcore_data=flat)
    durable.replace_file(os.path.join(folder, FORMAT_FILE), json.dumps(_FORMAT).encode())
    durable.replace_file(os.path.join(folder, METADATA_FILE), bytes(Pickler().dump(metadata).data))


def _tensor(entry):
    encoding = Opaque(_METADATA, "_MEM_FORMAT_ENCODING", (0,))  # contiguous
    properties = (Global("torch", entry.value.dtype), Global("torch", "strided"), False, encoding, False)
    return _made(
        _METADATA,
        "TensorStorageMetadata",
        properties=Opaque(_METADATA, "TensorProperties", (), properties, "new"),
        size=Size(entry.shape),
        chunks=[],
    )


def _made(module, name, **state):
    return Opaque(module, name, (), state or None, "new")
