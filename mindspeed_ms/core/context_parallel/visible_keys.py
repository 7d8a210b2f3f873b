"""VisibleKeys: which keys the queries of this rank's part see, without a `[s, s]` matrix where two numbers per query say it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import Tensor, dtype, mint

from mindspeed_ms import ops
from mindspeed_ms.core import parallel_state
from mindspeed_ms.core.context_parallel.cutting import current_cut, positions_of

_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class VisibleKeys:
    """Keys that each query sees, in positions of the whole sequence: an attention mask of packed documents or any other.

    The queries are those of this rank's group of the ring, in order (all of the sequence without a ring).

    Attributes:
        first, stop (ndarray): int32 `[b or 1, queries]`, first visible key of each query and the one after the last.
        rows (Optional[Tensor]): `[b or 1, 1, queries, s]`, bool or uint8, what is hidden in addition.
    """

    first: Any
    stop: Any
    rows: Any = None

    @classmethod
    def of_documents(cls, lengths, seq_length):
        """Causal attention within packed documents.

        Args:
            lengths (sequence): of each sample the lengths of its documents, in order; what is left of the sequence is one more,
                and zeros do not count.
            seq_length (int): s, of the whole sequence.

        Raises:
            ValueError: lengths that are not positive or exceed the sequence.
        """
        starts = np.zeros((len(lengths), seq_length), np.int32)
        for row, sample in zip(starts, lengths):
            sample = [int(length) for length in sample if length]
            if min(sample, default=1) < 1 or sum(sample) > seq_length:
                raise ValueError(
                    f"actual sequence lengths {sample} (actual_seq_len) do not fit a sequence of {seq_length} tokens: expected "
                    "the length of each document (no running sums), together at most that many tokens."
                )
            ends = np.cumsum(sample)
            for start, stop in zip(ends, [*ends[1:], seq_length]):
                row[start:stop] = start
        return cls.of_starts(starts)

    @classmethod
    def of_starts(cls, starts):
        """Causal attention where `starts` `[b, s]` is the first position of each token's document, in whole sequences."""
        places = _local_positions(starts.shape[1])
        first = np.ascontiguousarray(starts[:, places], np.int32)
        return cls(first, np.broadcast_to((places + 1).astype(np.int32), first.shape))

    @classmethod
    def of_mask(cls, mask):
        """Of a mask Tensor, 1 where a query may not look.

        Args:
            mask (Tensor): `[s, s]`, `[b or 1, s, s]` or `[b or 1, 1, s, s]` of whole sequences, or the s / cp rows of this
                rank's part of them; bool or uint8.

        Raises:
            ValueError: another number of rows.
        """
        length = mask.shape[-1]
        mask = mask.reshape((-1, 1, *mask.shape[-2:]))
        rows = _local_rows(mask, length)
        first, stop = _intervals(rows, length)
        if first is not None:
            return cls(first, stop)
        places = np.zeros((1, rows.shape[2]), np.int32)
        return cls(places, places + np.int32(length), rows)

    @classmethod
    def of_intervals(cls, intervals, length):
        """Of a Tensor that `are_intervals`; of whole sequences, or the rows of this rank's part of them."""
        array = _local_rows(intervals, length).asnumpy()[:, 0].astype(np.int32)
        return cls(array[..., 0], array[..., 1])

    @staticmethod
    def are_intervals(mask, length):
        """Whether a mask Tensor holds the first key that each query sees and the one after the last: integers `[b, 1, s, 2]`.

        The data sets make such masks. A mask for sequences of 2 tokens is a matrix.
        """
        return mask.ndim == 4 and mask.shape[3] == 2 != length and mask.dtype in (dtype.int32, dtype.int64)

    @classmethod
    def of(cls, mask):
        """None, a VisibleKeys or a mask Tensor as None or VisibleKeys."""
        return cls.of_mask(mask) if isinstance(mask, Tensor) else mask

    def within(self, lower, upper, length):
        """(first, stop) with a band besides: query at position i sees i + lower to i + upper only."""
        first, stop = band(lower, upper, length)
        return _checked(np.maximum(first, self.first), np.minimum(stop, self.stop))


def band(lower, upper, length):
    """(first, stop) `[1, queries]` of a band: the query at position i sees positions i + lower to i + upper."""
    places = _local_positions(length)
    return _checked(np.clip(places + lower, 0, length)[None], np.clip(places + (upper + 1), 0, length)[None])


def _checked(first, stop):
    first = np.ascontiguousarray(first, np.int32)
    return first, np.maximum(first, stop).astype(np.int32)


def _local_positions(length):
    return positions_of(current_cut().ring_spans(parallel_state.get_ring_rank(), length))


def _local_rows(mask, length):
    """Rows of a mask `[b or 1, 1, s or s / cp, s]` that belong to this rank's group of the ring."""
    cut = current_cut()
    if mask.shape[2] == length:
        spans = cut.ring_spans(parallel_state.get_ring_rank(), length)
        if spans == [(0, length)]:
            return mask
        array = mask.asnumpy()
        return Tensor.from_numpy(np.concatenate([array[:, :, start:stop] for start, stop in spans], axis=2))
    if mask.shape[2] * cut.size != length:
        raise ValueError(
            f"attention_mask has {mask.shape[2]} rows for {length} keys: expected the whole {length}, or this rank's "
            f"{length // cut.size}."
        )
    group = parallel_state.get_ulysses_group()
    if group.size == 1:
        return mask
    rows = np.ascontiguousarray(np.moveaxis(mask.asnumpy(), 2, 0))
    return Tensor.from_numpy(np.ascontiguousarray(np.moveaxis(np.asarray(group.all_gather(rows)), 0, 2)))


def _intervals(rows, length):
    """(first, stop) of a mask in which every query sees an interval of keys; (None, None) of another."""
    array = rows.asnumpy()[:, 0]
    first, stop = (np.zeros(array.shape[:2], np.int32) for _ in range(2))
    for start in range(0, array.shape[1], _ROWS_AT_ONCE):
        visible = array[:, start : start + _ROWS_AT_ONCE] == 0
        count = visible.sum(axis=-1)
        begin = visible.argmax(axis=-1)
        end = length - visible[..., ::-1].argmax(axis=-1)
        if (count != np.where(count > 0, end - begin, 0)).any():
            return None, None
        first[:, start : start + _ROWS_AT_ONCE] = begin
        stop[:, start : start + _ROWS_AT_ONCE] = np.where(count > 0, end, begin)
    return first, stop


def columns(rows, spans):
    """Columns `spans` of mask rows (Tensor); the rows themselves where that is all of them."""
    if spans == [(0, rows.shape[3])]:
        return rows
    parts = [mint.narrow(rows, 3, start, stop - start) for start, stop in spans]
    return ops.cat(parts, dim=3) if len(parts) > 1 else parts[0].contiguous()
