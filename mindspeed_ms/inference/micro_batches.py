"""Batches and micro-batches of sequences of different length; no MindSpore."""

from dataclasses import dataclass

_MOST_PADDING = 1.25
"""Longest row of a batch, relative to the shortest."""


@dataclass(frozen=True)
class Row:
    """Piece of a sequence that enters in one forward.

    Attributes:
        number (int): of its sequence among those of the call; -1: an empty row that fills a batch.
        slot, start (int): cache slot; position of its first token.
        ids (tuple[int]): tokens; none in an empty row.
        is_last (bool): the sequence ends with it.
    """

    number: int
    slot: int = 0
    start: int = 0
    ids: tuple = ()
    is_last: bool = False


EMPTY_ROW = Row(-1)


def rows_of(number, slot, start, ids, chunk):
    """Rows of at most `chunk` tokens of one sequence: list[Row]."""
    cuts = range(0, len(ids), chunk)
    return [Row(number, slot, start + cut, tuple(ids[cut : cut + chunk]), cut + chunk >= len(ids)) for cut in cuts]


def rounds_of(sequences):
    """First rows of all sequences, then their second rows, ...: list of lists. A row needs those before it in the cache.

    Args:
        sequences (list[list[Row]]): rows of each.
    """
    count = max(map(len, sequences), default=0)
    return [[rows[number] for rows in sequences if number < len(rows)] for number in range(count)]


def batches_of_similar_length(rows, most_tokens):
    """Batches of rows of similar length, with at most `most_tokens` tokens if several rows: list[list[Row]]."""
    batches = []
    for row in sorted(rows, key=lambda row: len(row.ids)):
        batch = batches[-1] if batches else []
        fits = batch and len(row.ids) <= _MOST_PADDING * len(batch[0].ids) and len(row.ids) * (len(batch) + 1) <= most_tokens
        if fits or (batch and len(row.ids) == 1):
            batch.append(row)
        else:
            batches.append([row])
    return batches


def micro_batches_of(batch, stages, is_interleaved):
    """Micro-batches of equal size for a pipeline: list[list[Row]], filled up with empty rows.

    Args:
        batch (list[Row]): rows.
        stages (int): pipeline stages: with one there is one micro-batch.
        is_interleaved (bool): the schedule needs a multiple of `stages` micro-batches.
    """
    size = -(-len(batch) // stages)
    parts = [batch[first : first + size] for first in range(0, len(batch), size)]
    parts[-1] = parts[-1] + [EMPTY_ROW] * (size - len(parts[-1]))
    missing = -len(parts) % stages if is_interleaved else 0
    return parts + [[EMPTY_ROW] * size] * missing
