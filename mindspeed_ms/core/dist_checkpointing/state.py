"""Sharded state of this rank: tensors of the model and its optimizer with their global names and slices.

Read from the parameters themselves (`Parameter.description`, names with the global layer index) and from the optimizer's
pieces, so every layout and any new kind of parallelism is described without a word here.
"""

from dataclasses import dataclass
from typing import Any

from mindspeed_ms.core.device import dtype_name
from mindspeed_ms.core.dist_checkpointing.manifest import DTYPE_BYTES, optimizer_key, whole_slice
from mindspeed_ms.core.distributed import ShardedModel, unwrap_model
from mindspeed_ms.core.tensor_parallel.cell import description_of, global_name
from mindspeed_ms.layout.sharding import FlatSlice


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
    """ShardedTensor of everything that the chunks (ShardedModel or plain cells) hold; sharded parameters (z3) as this
    rank's pieces."""
    for chunk in model:
        pieces = chunk.parameter_pieces() if isinstance(chunk, ShardedModel) else {}
        for name, param in unwrap_model(chunk).parameters_and_names():
            key, grouping = global_name(name, param), description_of(param).grouping
            if id(param) in pieces:
                shape, held = pieces[id(param)]
                sharding = _sharding_of(param, shape)
                for start, stop, tensor in held:
                    yield ShardedTensor(key, FlatSlice(sharding, start, stop), tensor, grouping, name)
            else:
                yield ShardedTensor(key, whole_slice(_sharding_of(param, param.shape)), param, grouping, name)


def optimizer_tensors(optimizer):
    """ShardedTensors of all moments and masters of this rank's optimizer."""
    for piece, state in optimizer.pieces_with_states():
        key, grouping = global_name(piece.name, piece.param), description_of(piece.param).grouping
        part = FlatSlice(_sharding_of(piece.param, piece.shape), piece.offset, piece.offset + piece.stop - piece.start)
        for name, tensor in state.items():
            yield ShardedTensor(optimizer_key(name, key), part, tensor, grouping, f"{name}.{piece.name}")


def _sharding_of(param, shape):
    sharding = description_of(param, shape).sharding
    if sharding.local_shape != tuple(shape):
        raise ValueError(f"{param.name} has shape {tuple(shape)}, but its description says {sharding.local_shape}.")
    return sharding
