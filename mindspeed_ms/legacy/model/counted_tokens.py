"""Tokens that the loss counts, for a head that need not compute the logits of others."""

import numpy as np

from mindspeed_ms import ops
from mindspeed_ms.core import storage


def counted_tokens(hidden, labels, loss_mask):
    """Hidden states, labels and mask of the tokens whose mask is not 0, or of the first token if there is none.

    The masked mean over them is that over all tokens: of question-answer pairs only the answers go through the head.

    Args:
        hidden (Tensor): `[s, b, h]`; labels, loss_mask (Tensor): `[b, s]`.

    Returns:
        tuple: `[1, n, h]`, `[n, 1]`, `[n, 1]`; the arguments if every token counts.
    """
    mask = storage.host_array(loss_mask.contiguous()).reshape(loss_mask.shape)
    places = np.flatnonzero(mask.T)  # in the order of the hidden states
    if places.size == mask.size:
        return hidden, labels, loss_mask
    places = places if places.size else np.zeros(1, np.int64)
    sample, position = places % len(mask), places // len(mask)
    rows = ops.permute(hidden.reshape(-1, hidden.shape[-1]), storage.from_array(places.astype(np.int32)))
    labels_of_all = storage.host_array(labels.contiguous()).reshape(labels.shape)
    picked = (np.ascontiguousarray(values[sample, position][:, None]) for values in (labels_of_all, mask))
    return rows.reshape(1, *rows.shape), *map(storage.from_array, picked)
