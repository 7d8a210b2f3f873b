"""EosMask: position ids and attention mask of packed documents, from the end-of-document tokens."""

from mindspore import Tensor, dtype, nn

from mindspeed_ms import ops


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
        self._tables = {}

    def construct(self, input_ids):
        """See the class."""
        if input_ids.ndim != 2:
            raise ValueError(f"EosMask needs ids of shape [b, s], but got {tuple(input_ids.shape)}.")
        in_document, mask = ops.document_mask(input_ids, self.eod_token_id)
        return (in_document if self.reset_position_ids else self._positions(*input_ids.shape)), mask

    def _positions(self, batch, length):
        """Positions from 0 in each row, `[b, s]`."""
        if (batch, length) not in self._tables:
            self._tables[batch, length] = Tensor([list(range(length))] * batch, dtype.int32)
        return self._tables[batch, length]
