"""EosMask: position ids and attention mask of packed documents, from the end-of-document tokens."""

from mindspore import Tensor, dtype, nn, ops


class EosMask(nn.Cell):
    """Position ids and mask of `[b, s]` token ids; `eod_token_id` ends a document and belongs to it.

    Args:
        batch_size, seq_length (int): usual shape of the ids; any other shape works as well.
        eod_token_id (int): id that ends a document; 0 is an id like any other.
        reset_position_ids (bool): count positions from 0 in each document.

    Input: ids `[b, s]`. Outputs: int32 position ids `[b, s]`, and a uint8 mask `[b, s, s]` with 1 where query i may not
    look at key j: j is later, or in another document.

    Raises:
        ValueError: `eod_token_id` is no integer, or the ids are not two-dimensional.
    """

    def __init__(self, batch_size, seq_length, eod_token_id, reset_position_ids=False):
        super().__init__()
        if isinstance(eod_token_id, bool) or not isinstance(eod_token_id, int):
            raise ValueError(f"EosMask: eod_token_id must be an integer, but got {eod_token_id!r}.")
        self.batch_size, self.seq_length = batch_size, seq_length
        self.eod_token_id = eod_token_id
        self.reset_position_ids = reset_position_ids
        self._causal = {}

    def construct(self, input_ids):
        """See the class."""
        if input_ids.ndim != 2:
            raise ValueError(f"EosMask needs ids of shape [b, s], but got {tuple(input_ids.shape)}.")
        batch, length = input_ids.shape
        positions, causal = self._tables(length)
        # float32 counts exactly up to 2^24 documents, and its cumulative sum exists on every device
        ends = (input_ids == self.eod_token_id).astype(dtype.float32)
        document = ops.cumsum(ends, 1) - ends
        same = document.reshape((batch, length, 1)) == document.reshape((batch, 1, length))
        allowed = ops.logical_and(same, causal)
        mask = ops.logical_not(allowed).astype(dtype.uint8)
        if not self.reset_position_ids:
            return ops.tile(positions, (batch, 1)), mask
        # a query sees exactly the tokens of its document up to itself
        within = allowed.astype(dtype.float32).sum(-1) - 1.0
        return within.astype(dtype.int32), mask

    def _tables(self, length):
        """Tables of positions `[1, s]` and of the lower triangle `[1, s, s]`."""
        if length not in self._causal:
            positions = Tensor(list(range(length)), dtype.int32)
            causal = positions.reshape((1, length, 1)) >= positions.reshape((1, 1, length))
            self._causal[length] = positions.reshape((1, length)), causal
        return self._causal[length]
