"""RegroupedReader: experts of a checkpoint in the form of SequentialMLP (`local_experts.N`) or GroupedMLP (`weight1`)."""

import re
from dataclasses import replace

import numpy as np

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import StoredTensor, whole_slice
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader, numpy_dtype
from mindspeed_ms.layout.sharding import ParameterSharding

_PAIRS = {"mapping": "weight1", "projection": "weight2"}
_SINGLE = re.compile(r"(.+\.mlp\.experts)\.local_experts\.(\d+)\.(mapping|projection)\.(weight|bias)")
_GROUPED = re.compile(r"(.+\.mlp\.experts)\.(weight[12])")


def in_form_of(reader, all_config):
    """The reader of a checkpoint, or of its experts in the form that a configuration has (moe_grouped_gemm).

    Args:
        reader (CheckpointReader): of a checkpoint in any form.
        all_config (Optional[AllConfig]): the model that reads; None: as they are.

    Raises:
        CheckpointError: the checkpoint lacks an expert, or they have biases, which GroupedMLP does not have.
    """
    if all_config is None or all_config.moe_config.num_experts == 1:
        return reader
    grouped = bool(all_config.moe_config.moe_grouped_gemm)
    other = _SINGLE if grouped else _GROUPED
    return RegroupedReader(reader, grouped) if any(map(other.fullmatch, reader.manifest.tensors)) else reader


class RegroupedReader(CheckpointReader):
    """Reader of a checkpoint whose experts have the other form; rows and columns of an expert are swapped in `weight1/2`.

    Args:
        source (CheckpointReader): of the checkpoint; closed together with this one.
        grouped (bool): experts in one tensor; else one by one.
    """

    def __init__(self, source, grouped):
        self.source, self._places = source, {}
        tensors = {}
        for key, stored in source.manifest.tensors.items():
            found = (_SINGLE if grouped else _GROUPED).fullmatch(key)
            if found is None:
                tensors[key] = stored
            elif grouped:
                self._join(tensors, key, stored, found)
            else:
                self._part(tensors, key, stored, found)
        if grouped:
            self._check(tensors)
        args = source.manifest.args
        if "moe_config" in args:
            args = {**args, "moe_config": {**args["moe_config"], "moe_grouped_gemm": grouped}}
        super().__init__(source.folder, replace(source.manifest, tensors=tensors, args=args))

    def _join(self, tensors, key, stored, found):
        start, expert, name, end = found.groups()
        if end == "bias":
            raise CheckpointError(
                f"{self.source.folder} has {key}, and experts in one tensor (Megatron's GroupedMLP: --moe-grouped-gemm, "
                "--experts grouped) have no biases: leave that away."
            )
        joined = f"{start}.{_PAIRS[name]}"
        members = self._places.setdefault(joined, {})
        members[int(expert)] = key
        shape = (len(members), *stored.shape[::-1])
        pieces = tensors[joined].pieces if joined in tensors else []
        tensors[joined] = StoredTensor(shape, stored.dtype, stored.grouping, pieces + stored.pieces)

    def _check(self, tensors):
        """Raise CheckpointError if an expert is missing or of another kind than the others."""
        for joined, members in self._places.items():
            if set(members) != set(range(len(members))):
                missing = next(expert for expert in range(max(members)) if expert not in members)
                raise CheckpointError(f"{self.source.folder} has no expert {missing} of {joined.rpartition('.')[0]}.")
            for key in members.values():
                stored = self.source.tensor(key)
                if (stored.shape[::-1], stored.dtype) != (tensors[joined].shape[1:], tensors[joined].dtype):
                    raise CheckpointError(f"{self.source.folder}: {key} is {stored.dtype} {list(stored.shape)}, unlike others.")

    def _part(self, tensors, key, stored, found):
        start, name = found.groups()
        inside = next(one for one, other in _PAIRS.items() if other == name)
        for expert in range(stored.shape[0]):
            single = f"{start}.local_experts.{expert}.{inside}.weight"
            self._places[single] = key, expert
            tensors[single] = StoredTensor(stored.shape[:0:-1], stored.dtype, stored.grouping, stored.pieces)

    def close(self):
        """Close all files."""
        super().close()
        self.source.close()

    def read(self, key, wanted, out, on_part=None):
        """Read a slice of a tensor, see CheckpointReader; holds the rank's whole part of a regrouped one."""
        place = self._places.get(key)
        if place is None:
            return self.source.read(key, wanted, out, on_part)
        sharding, dtype = wanted.sharding, numpy_dtype(self.tensor(key).dtype)
        if isinstance(place, dict):
            values = np.stack([self._expert(place[expert], _of_one(sharding), dtype).T for expert in _experts(sharding)])
        else:
            experts = self.source.tensor(place[0]).shape[0]
            values = self._expert(place[0], _of_all(sharding, experts, place[1]), dtype)[0].T
        out[...] = values.reshape(-1)[wanted.start : wanted.stop]
        return []

    def _expert(self, key, sharding, dtype):
        values = np.empty(sharding.local_shape, dtype)
        missing = self.source.read(key, whole_slice(sharding), values.reshape(-1))
        if missing:
            raise CheckpointError(f"{self.folder} stores no elements {missing[0][0]} to {missing[0][1]} of {key}.")
        return values


def _experts(sharding):
    """Numbers of the experts in a part of a tensor [experts, rows, columns]."""
    if sharding.axis == 0:
        return [expert for start, stop in sharding.ranges for expert in range(start, stop)]
    return range(*(sharding.leading or (0, sharding.global_shape[0])))


def _of_one(sharding):
    """Part of the tensor [columns, rows] of one expert in a part of [experts, rows, columns]."""
    shape = sharding.global_shape[:0:-1]
    if sharding.axis in (None, 0):
        return ParameterSharding.replicated(shape)
    return ParameterSharding(shape, 2 - sharding.axis, sharding.ranges)


def _of_all(sharding, experts, expert):
    """Part of [experts, rows, columns] that is a part of the tensor [columns, rows] of one expert."""
    columns, rows = sharding.global_shape
    axis, ranges = (2, ((0, columns),)) if sharding.axis is None else (2 - sharding.axis, sharding.ranges)
    return ParameterSharding((experts, rows, columns), axis, ranges, (expert, expert + 1))
