"""Packing: several samples in one sequence of a fixed length.

Source of the order: upstream's greedy rule. A sequence takes the longest sample that is left, then again and again the longest
one that still fits; of equally long ones the last. One place stays free for padding, as upstream has it; a sample that fills a
sequence completely gets one of its own.
"""

import contextlib
import os

import numpy as np

from mindspeed_ms.tasks.preprocess.handlers.base import IGNORED_LABEL

_LENGTHS_AT_ONCE = 1 << 20


def plan(lengths, seq_length):
    """Plan the packing: samples that share a sequence.

    Args:
        lengths (np.ndarray): of the samples, in [1, seq_length].
        seq_length (int): tokens of a sequence.

    Yields:
        list[int]: samples of one sequence, in order.
    """
    order = np.argsort(lengths, kind="stable")
    borders = np.searchsorted(lengths[order], np.arange(seq_length + 2)).tolist()
    begins, left = borders[:-1], borders[1:]  # samples of length n are order[begins[n] : left[n]], taken from the end
    shorter = [n if left[n] > begins[n] else max(n - 1, 0) for n in range(seq_length + 1)]  # n itself while some are left

    def longest(limit):
        while shorter[limit] != limit:
            shorter[limit] = shorter[shorter[limit]]
            limit = shorter[limit]
        return limit

    def take(length):
        left[length] -= 1
        if left[length] == begins[length]:
            shorter[length] = length - 1
        return int(order[left[length]])

    while length := longest(seq_length):
        sequence, room = [take(length)], seq_length - 1 - length
        while room > 0 and (length := longest(room)):
            sequence.append(take(length))
            room -= length
        yield sequence


def pack(read_path, write_path, seq_length, pad, neat):
    """Write packed sequences from the samples in the files of `input_ids` and `labels`.

    Args:
        read_path (Callable[[str], str]): names such as "labels.bin" and "labels.lengths" to paths of the samples.
        write_path (Callable[[str], str]): the same for the packed files, of the keys input_ids, attention_mask and labels.
        seq_length (int): tokens of a sequence.
        pad (int): id that fills a sequence; its label is masked.
        neat (bool): the attention mask numbers the samples from 1, with 0 for padding; else it is 1 everywhere.

    Returns:
        (int, int): sequences, and tokens that are no padding.
    """
    lengths = np.fromfile(read_path("input_ids.lengths"), np.int32)
    ends = np.cumsum(lengths, dtype=np.int64)
    fill = {"input_ids": pad, "attention_mask": 0 if neat else 1, "labels": IGNORED_LABEL}
    count = 0
    with contextlib.ExitStack() as stack:
        sources = {key: stack.enter_context(open(read_path(f"{key}.bin"), "rb")) for key in ("input_ids", "labels")}
        targets = {key: stack.enter_context(open(write_path(f"{key}.bin"), "wb")) for key in fill}
        for sequence in plan(lengths, seq_length):
            rows = {key: np.full(seq_length, value, np.int32) for key, value in fill.items()}
            position = 0
            for number, sample in enumerate(sequence, 1):
                length = int(lengths[sample])
                place = slice(position, position + length)
                for key, source in sources.items():
                    rows[key][place] = _read(source, int(ends[sample]) - length, length)
                if neat:
                    rows["attention_mask"][place] = number
                position += length
            for key, row in rows.items():
                targets[key].write(row.tobytes())
            count += 1
    for key in fill:
        _write_lengths(write_path(f"{key}.lengths"), count, seq_length)
    return count, int(ends[-1]) if len(ends) else 0


def _read(file, start, length):
    # not mapped: pages of a mapped file would count as memory of this process
    return np.frombuffer(os.pread(file.fileno(), 4 * length, 4 * start), np.int32)


def _write_lengths(path, count, seq_length):
    with open(path, "wb") as file:
        for start in range(0, count, _LENGTHS_AT_ONCE):
            file.write(np.full(min(_LENGTHS_AT_ONCE, count - start), seq_length, np.int32).tobytes())
