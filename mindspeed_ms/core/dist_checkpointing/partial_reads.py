"""Verification of stored pieces that ranks read in parts: the additive check sums of the parts against the piece's."""

from mindspeed_ms.core import comm
from mindspeed_ms.core.dist_checkpointing.agreement import on_all_ranks
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.multilinear import to_text
from mindspeed_ms.core.dist_checkpointing.slices import remainder


class PartialReads:
    """Check sums of pieces that the ranks read in parts; all ranks construct it and call `check` together.

    Args:
        tensors (list[ShardedTensor]): what this rank fills. Slices of one key are equal or have no element in common.
    """

    def __init__(self, tensors):
        self._holders = {}  # key: {slice: (rank, place in its list) of the first that fills it}, whose reading counts
        for rank, slices in enumerate(comm.world_group().all_gather_object([(tensor.key, tensor.slice) for tensor in tensors])):
            for place, (key, part) in enumerate(slices):
                self._holders.setdefault(key, {}).setdefault(part, (rank, place))
        self._sums = {}

    def recorder(self, tensor, place, source):
        """Callback `on_part` for reads of `source` for tensor `place` of this rank; None if another rank reads the same."""
        if self._holders[tensor.key][tensor.slice] != (comm.get_rank(), place):
            return None

        def record(number, elements, total):
            before = self._sums.get((tensor.key, source, number), (0, 0))
            self._sums[tensor.key, source, number] = before[0] + elements, before[1] + total

        return record

    def check(self, doing, reader):
        """Compare the parts' sums with the check sums of the pieces; parts that no rank has read are read now.

        Args:
            doing (str): start of the message.
            reader (CheckpointReader): of the checkpoint.

        Raises:
            CheckpointError: on all ranks: a piece is damaged or cannot be read.
        """
        sums = {}
        for part in comm.world_group().all_gather_object(self._sums):
            for place, (elements, total) in part.items():
                before = sums.get(place, (0, 0))
                sums[place] = before[0] + elements, before[1] + total
        unread = [place for place in sorted(sums) if sums[place][0] < _elements(reader, place)]
        for rest in on_all_ranks(doing, self._sums_of_rest, reader, unread[comm.get_rank() :: comm.get_world_size()]):
            for place, total in rest:
                sums[place] = _elements(reader, place), sums[place][1] + total
        damaged = sorted(
            {
                reader.damaged(key, number)
                for (_, key, number), (_, total) in sums.items()
                if reader.tensor(key).pieces[number].multilinear not in ("", to_text(total))
            }
        )
        if damaged:
            raise CheckpointError(f"{doing}: {' '.join(damaged[:5])}{' ...' if len(damaged) > 5 else ''}")

    def _sums_of_rest(self, reader, places):
        return [
            (
                (wanted, key, number),
                reader.sum_of_runs(
                    key, number, remainder(reader.tensor(key).pieces[number].slice, list(self._holders[wanted]))
                ),
            )
            for wanted, key, number in places
        ]


def _elements(reader, place):
    part = reader.tensor(place[1]).pieces[place[2]].slice
    return part.stop - part.start
