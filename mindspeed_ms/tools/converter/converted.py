"""ConvertedReader: a checkpoint with weights of another dtype, a padded vocabulary, or without its optimizer."""

from dataclasses import replace
from math import prod

import numpy as np

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.manifest import OPTIMIZER_PREFIX, StoredTensor, optimizer_key
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader, numpy_dtype
from mindspeed_ms.core.dist_checkpointing.slices import ordered_ranges
from mindspeed_ms.layout.sharding import FlatSlice, ParameterSharding

_BLOCK_ELEMENTS = 1 << 18


class ConvertedReader(CheckpointReader):
    """Reader of the converted tensors of a checkpoint, from its own files.

    Args:
        source (CheckpointReader): of the checkpoint; closed together with this one.
        args (dict): configuration instead of the checkpoint's.
        dtype (Optional[str]): of all weights; None: as they are. It comes from the optimizer's float32 copies where there are
            any; those go with it, unless the weights are float32 then.
        vocabulary_rows (Optional[int]): rows of the tensors of the vocabulary; further ones are copies of the last row.
        with_optimizer (bool): the optimizer's state too.
        vocab_size (Optional[int]): rows that are no padding.
    """

    def __init__(self, source, args, dtype=None, vocabulary_rows=None, with_optimizer=True, vocab_size=None):
        self.source, tensors = source, {}
        for key, stored in source.manifest.tensors.items():
            is_weight = not key.startswith(OPTIMIZER_PREFIX)
            if not is_weight and not with_optimizer:
                continue
            shape = stored.shape
            if vocabulary_rows is not None and stored.grouping == "vocab":
                shape = (vocabulary_rows, *shape[1:])
            kind = dtype if dtype is not None and is_weight else stored.dtype
            tensors[key] = StoredTensor(shape, kind, stored.grouping, stored.pieces)
        self._from = self._weights_of_masters(tensors, dtype)
        if dtype in ("bfloat16", "float16"):  # float32 weights become the optimizer's
            for key in [key for key in tensors if optimizer_key("exp_avg", key) in tensors]:
                master, stored = optimizer_key("fp32_param", key), source.manifest.tensors[key]
                if master not in tensors and stored.dtype == "float32":
                    tensors[master] = StoredTensor(stored.shape, stored.dtype, stored.grouping, stored.pieces)
                    self._from[master] = key
        manifest = replace(source.manifest, tensors=tensors, args=args, vocab_size=vocab_size)
        if not with_optimizer:
            manifest.states = {**manifest.states, "optimizer": None, "opt_param_scheduler": None}
        super().__init__(source.folder, manifest)

    def _weights_of_masters(self, tensors, dtype):
        """{weight: float32 copy that holds its values}; float32 weights replace their copies in `tensors`."""
        found = {}
        for key, stored in self.source.manifest.tensors.items():
            master = optimizer_key("fp32_param", key)
            if dtype not in (None, stored.dtype) and master in self.source.manifest.tensors:
                found[key] = master
                if dtype == self.source.tensor(master).dtype:
                    tensors.pop(master, None)
        return found

    def close(self):
        """Close all files."""
        super().close()
        self.source.close()

    def read(self, key, wanted, out, on_part=None):
        """Read a slice of a converted tensor, see CheckpointReader.

        Raises:
            CheckpointError: also for values that the new dtype cannot hold.
        """
        stored, key = self.tensor(key), self._from.get(key, key)
        given = self.source.tensor(key)
        values = out if given.dtype == stored.dtype else np.empty(out.size, numpy_dtype(given.dtype))
        missing = self.source.read(key, wanted, values, on_part)
        if missing and stored.shape != given.shape:
            self._fill(key, given, wanted, values)
            missing = []
        if values is not out:
            cast(values, given.dtype, out, stored.dtype, f"{self.folder}: {key}")
        return missing

    def _fill(self, key, given, wanted, values):
        """Fill the rows that are not stored with the last stored one."""
        rows, width = given.shape[0], prod(given.shape[1:])
        last = np.empty(width, values.dtype)
        self.source.read(key, FlatSlice(ParameterSharding(given.shape, 0, ((rows - 1, rows),)), 0, width), last)
        for start, stop, offset in ordered_ranges(wanted).tolist():
            first = max(start, rows * width)
            if first < stop:
                values[offset + first - start : offset + stop - start] = last[np.arange(first, stop) % width]


def cast(values, dtype, out, wanted, what):
    """Convert values (1-D; bfloat16: uint16 bits) to another dtype block by block, rounding to the nearest.

    Raises:
        CheckpointError: a finite value that becomes infinite; `what` names its tensor.
    """
    for start in range(0, values.size, _BLOCK_ELEMENTS):
        block = slice(start, start + _BLOCK_ELEMENTS)
        if not _cast(values[block], dtype, out[block], wanted):
            raise CheckpointError(f"{what} has values that {wanted} cannot hold: choose another --params-dtype.")


def _cast(values, dtype, out, wanted):
    """Whether `out` holds the values now: False if a finite one became infinite."""
    exact = values
    if dtype == "bfloat16":
        exact = (values.astype(np.uint32) << 16).view(np.float32)
    if wanted == "bfloat16":
        bits = exact.astype(np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        out[...] = np.where(np.isnan(exact), (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)
        is_finite = (out & np.uint16(0x7F80)) != np.uint16(0x7F80)
    else:
        with np.errstate(over="ignore"):
            out[...] = exact.astype(wanted)
        is_finite = np.isfinite(out)
    return np.all(is_finite | ~np.isfinite(exact))
