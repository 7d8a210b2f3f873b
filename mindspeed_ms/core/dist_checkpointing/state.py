"""Sharded state of this rank: tensors of the model and its optimizer with their global names and slices.

Read from the parameters themselves (`Parameter.description`, names with the global layer index) and from the optimizer's
pieces, so every layout and any new kind of parallelism is described without a word here.
"""

from dataclasses import dataclass
from typing import Any

from mindspeed_ms.core.device import dtype_name
from mindspeed_ms.core.dist_checkpointing.manifest import DTYPE_BYTES, optimizer_key, whole_slice
from mindspeed_ms.core.tensor_parallel.cell import global_name
from mindspeed_ms.layout.sharding import FlatSlice, ParameterSharding


@dataclass(frozen=True)
class ShardedTensor:
    """Local tensor and the slice of a global tensor that it holds.

    Attributes:
        key (str): global, see `manifest`.
        slice (FlatSlice): the elements that it holds, in order.
        tensor (Tensor): contiguous; reading it saves, writing it loads.
        grouping (Optional[str]): see `layout.ParameterDescription`.
        local_name (str): in this rank's model; another one for the copy of a tied embedding.
    """

    key: str
    slice: FlatSlice
    tensor: Any
    grouping: str | None = None
    local_name: str = ""

    @property
    def dtype(self):
        """Name of the tensor's dtype."""
        return dtype_name(self.tensor.dtype)

    @property
    def nbytes(self):
        """Bytes of the local elements."""
        return (self.slice.stop - self.slice.start) * DTYPE_BYTES[self.dtype]


def model_tensors(model):
    """ShardedTensors of all parameters of the chunks (wrapped or plain cells); sharded ones (z3) as this rank's parts."""
    for chunk in model:
        parts = _sharded_parts(chunk)
        for name, param in getattr(chunk, "module", chunk).parameters_and_names():
            key, grouping = global_name(name, param), getattr(param, "grouping", None)
            if id(param) in parts:
                for piece, tensor in parts[id(param)]:
                    yield ShardedTensor(key, piece, tensor, grouping, name)
            else:
                yield ShardedTensor(key, whole_slice(_sharding_of(param, param.shape)), param, grouping, name)


def optimizer_tensors(optimizer):
    """ShardedTensors of all moments and masters of this rank's optimizer."""
    for piece, state in optimizer.pieces_with_states():
        key, grouping = global_name(piece.name, piece.param), getattr(piece.param, "grouping", None)
        part = FlatSlice(_sharding_of(piece.param, piece.shape), piece.offset, piece.offset + piece.stop - piece.start)
        for name, tensor in state.items():
            yield ShardedTensor(optimizer_key(name, key), part, tensor, grouping, f"{name}.{piece.name}")


def _sharding_of(param, shape):
    sharding = getattr(param, "sharding", None) or ParameterSharding.replicated(tuple(shape))
    if sharding.local_shape != tuple(shape):
        raise ValueError(f"{param.name} has shape {tuple(shape)}, but its description says {sharding.local_shape}.")
    return sharding


def _sharded_parts(chunk):
    """{id of parameter: [(slice, tensor)]} of parameters that this rank holds in part; it may hold no part of one."""
    parts = {}
    for buffer in getattr(chunk, "buffers", ()):
        if not buffer.ddp_config.shards_params:
            continue
        for placed in buffer.layout.parameters:
            param = buffer.params[placed.index]
            sharding = _sharding_of(param, buffer.shapes[placed.index])
            held = parts.setdefault(id(param), [])
            for shard_start, shard_stop in buffer.shard_ranges():
                start, stop = max(placed.start, shard_start), min(placed.stop, shard_stop)
                if start < stop:
                    piece = FlatSlice(sharding, start - placed.start, stop - placed.start)
                    held.append((piece, buffer.slice_param(start, stop)))
    return parts
