"""EosMask: position ids and attention mask of packed documents, from the end-of-document tokens."""

import numpy as np
from mindspore import Tensor, dtype, nn

from mindspeed_ms import ops
from mindspeed_ms.core import parallel_state
from mindspeed_ms.core.context_parallel import VisibleKeys, local_position_ids, whole_along


class EosMask(nn.Cell):
    """Position ids and mask of `[b, s]` token ids; `eod_token_id` ends a document and belongs to it.

    Args:
        batch_size, seq_length (int): usual shape of the ids; any other shape works as well.
        eod_token_id (int): id that ends a document; 0 is an id like any other.
        reset_position_ids (bool): count positions from 0 in each document.

    Input: ids `[b, s]`. Outputs: int32 position ids `[b, s]`, and a uint8 mask `[b, s, s]` with 1 where query i may not
    look at key j: j is later, or in another document. Under context parallelism the ids are this rank's part of the sequences;
    the position ids are those of the part, and the mask is `VisibleKeys`, which needs no `[s, s]`.

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
        if parallel_state.model_parallel_is_initialized() and parallel_state.get_context_parallel_world_size() > 1:
            return self._of_parts(input_ids)
        in_document, mask = ops.document_mask(input_ids, self.eod_token_id)
        return (in_document if self.reset_position_ids else self._positions(*input_ids.shape)), mask

    def _of_parts(self, input_ids):
        """Position ids of this rank's part of the sequences, and the mask as `VisibleKeys`."""
        ends = whole_along(input_ids.asnumpy()) == self.eod_token_id
        places = np.arange(ends.shape[1], dtype=np.int32)
        follows = np.zeros_like(ends)
        follows[:, 1:] = ends[:, :-1]
        starts = np.maximum.accumulate(np.where(follows, places, 0), axis=1)
        positions = local_position_ids(input_ids.shape[1])
        if self.reset_position_ids:
            local = positions.asnumpy()[0]
            positions = Tensor.from_numpy(np.ascontiguousarray(local - starts[:, local], np.int32))
        return positions, VisibleKeys.of_starts(starts)

    def _positions(self, batch, length):
        """Positions from 0 in each row, `[b, s]`."""
        if (batch, length) not in self._tables:
            self._tables[batch, length] = Tensor([list(range(length))] * batch, dtype.int32)
        return self._tables[batch, length]
