"""Output layer on the tokens that the loss mask counts: logits of the others are not computed."""

import numpy as np

from mindspeed_ms import ops
from mindspeed_ms.core import storage


def counted_tokens(hidden, labels, loss_mask, as_sequence=False):
    """Hidden states, labels and mask of the tokens whose mask is not 0, or of the first token if there is none.

    The masked mean over them is that over all tokens: of question-answer pairs only the answers go through the head.

    Args:
        hidden (Tensor): `[s, b, h]`; labels, loss_mask (Tensor): `[b, s]`.
        as_sequence (bool): give them as the tokens of one sample, for a loss in chunks of the sequence; otherwise as samples of
            one token, whose losses are added up in double precision.

    Returns:
        tuple: `[1, n, h]`, `[n, 1]`, `[n, 1]`, or `[n, 1, h]`, `[1, n]`, `[1, n]`; the arguments if every token counts.
    """
    mask = storage.host_array(loss_mask.contiguous()).reshape(loss_mask.shape)
    places = np.flatnonzero(mask.T)  # in the order of the hidden states
    if places.size == mask.size:
        return hidden, labels, loss_mask
    places = places if places.size else np.zeros(1, np.int64)
    sample, position = places % len(mask), places // len(mask)
    rows = ops.permute(hidden.reshape(-1, hidden.shape[-1]), storage.from_array(places.astype(np.int32)))
    labels_of_all = storage.host_array(labels.contiguous()).reshape(labels.shape)
    shape = (1, -1) if as_sequence else (-1, 1)
    picked = (storage.from_array(values[sample, position].reshape(shape)) for values in (labels_of_all, mask))
    return rows.reshape(*shape[::-1], rows.shape[1]), *picked
