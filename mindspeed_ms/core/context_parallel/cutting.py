"""Cutting of batches along the sequence: the one place where whole sequences become this rank's part of them.

Which positions a rank holds is said by `layout.sequence.SequenceCut`.
"""

import functools
import zlib

import numpy as np
from mindspore import Tensor, mint

from mindspeed_ms import ops
from mindspeed_ms.core import parallel_state
from mindspeed_ms.layout.sequence import SequenceCut

SEQUENCE_ENTRIES = ("tokens", "input_ids", "labels", "loss_mask", "position_ids", "tokentype_ids")
"""Entries `[b, s]` of a batch that are cut; others go to every rank as they are."""
_MARK = "_context_parallel_part"


def current_cut():
    """SequenceCut of the initialised groups."""
    return SequenceCut(parallel_state.get_ulysses_world_size(), parallel_state.get_ring_world_size())


def cut_along(tensor, axis=1):
    """This rank's part of a Tensor with whole sequences along `axis`.

    Raises:
        LayoutError: the length cannot be cut; says how much padding is needed.
    """
    spans = current_cut().spans(parallel_state.get_context_parallel_rank(), tensor.shape[axis])
    parts = [mint.narrow(tensor, axis, start, stop - start) for start, stop in spans]
    return ops.cat(parts, dim=axis) if len(parts) > 1 else parts[0].contiguous()


def whole_along(array, axis=1):
    """Whole sequences (ndarray) of the parts that the ranks hold along `axis`; a collective of the context-parallel group."""
    group = parallel_state.get_context_parallel_group()
    parts = np.asarray(group.all_gather(np.ascontiguousarray(np.moveaxis(array, axis, 0))))
    length = parts.shape[0]
    whole, share = np.empty_like(parts), length // group.size
    for rank in range(group.size):
        offset = rank * share
        for start, stop in current_cut().spans(rank, length):
            whole[start:stop] = parts[offset : offset + stop - start]
            offset += stop - start
    return np.moveaxis(whole, 0, axis)


def get_batch_on_this_cp_rank(batch, seq_length=None):
    """Cut a batch of whole sequences to this rank's part, under Megatron's name; what is a part already stays.

    Args:
        batch (dict): Tensors or arrays; `SEQUENCE_ENTRIES` are cut. An attention mask stays whole: each algorithm takes from it
            what it needs.
        seq_length (Optional[int]): length of whole sequences, if all have the same: a batch of a rank's share of it, which is
            not the same on all ranks, is their parts. None: what was not cut here is whole.

    Returns:
        dict: the batch itself without context parallelism.

    Raises:
        LayoutError: a length that cannot be cut.
    """
    ranks = parallel_state.get_context_parallel_world_size()
    if ranks == 1:
        return batch
    entries = {name: value for name, value in batch.items() if name in SEQUENCE_ENTRIES and _is_whole(value)}
    may_be_parts = seq_length and {value.shape[1] * ranks for value in entries.values()} == {seq_length}
    if may_be_parts and not _is_same_on_all_ranks(entries):
        return batch
    return {name: _part_of(value) if name in entries else value for name, value in batch.items()}


def marked_like(rows, batch):
    """`rows`, some of a batch's, noted as a part of their sequences if the batch (Tensor) is."""
    if getattr(batch, _MARK, False):
        setattr(rows, _MARK, True)
    return rows


def _is_whole(value):
    """Whether a value `[b, s]` was not cut here."""
    return hasattr(value, "shape") and len(value.shape) == 2 and not getattr(value, _MARK, False)


def _is_same_on_all_ranks(entries):
    """Whether all ranks of the context-parallel group were given the same values, hence no parts."""
    digest = 0
    for value in entries.values():
        array = value.asnumpy() if isinstance(value, Tensor) else np.asarray(value)
        digest = zlib.crc32(np.ascontiguousarray(array).tobytes(), digest)
    digests = np.asarray(parallel_state.get_context_parallel_group().all_gather(np.array([digest], np.int64)))
    return len(set(digests.tolist())) == 1


def _part_of(value):
    tensor = value if isinstance(value, Tensor) else Tensor.from_numpy(np.ascontiguousarray(value))
    part = cut_along(tensor)
    setattr(part, _MARK, True)
    return part


def local_position_ids(length):
    """Positions in the whole sequence of this rank's `length` tokens, int32 `[1, length]`."""
    rank, cut = parallel_state.get_context_parallel_rank(), current_cut()
    return _position_ids(cut, rank, length * cut.size)


@functools.lru_cache(maxsize=32)
def _position_ids(cut, rank, length):
    return Tensor.from_numpy(positions_of(cut.spans(rank, length)).astype(np.int32).reshape(1, -1))


def positions_of(spans):
    """Array of all positions in `spans`."""
    return np.concatenate([np.arange(start, stop) for start, stop in spans])
