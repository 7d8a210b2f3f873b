"""Ascend form of the embedding lookup over a vocabulary that is split between ranks."""

from mindspore import mint

from mindspeed_ms.core import autograd
from mindspeed_ms.ops import checks


def embedding_lookup(weight, ids, vocab_start=0, vocab_end=None, vocab_size=None):
    """See `ops.embedding_lookup`."""
    vocab_end, vocab_size = checks.embedding_range(weight, vocab_start, vocab_end, vocab_size)
    _check_ids(ids, vocab_size)
    if vocab_start == 0 and vocab_end == vocab_size:
        return mint.nn.functional.embedding(ids, weight)
    outside = mint.logical_or(ids < vocab_start, ids >= vocab_end)
    rows = mint.nn.functional.embedding(mint.where(outside, mint.zeros_like(ids), ids - vocab_start), weight)
    return mint.where(mint.unsqueeze(outside, -1), mint.zeros_like(rows), rows)


@autograd.no_grad()
def _check_ids(ids, vocab_size):
    # the operator's behaviour is undefined for such ids, so the one wait for the device is worth it
    smallest, largest = int(mint.min(ids).asnumpy()), int(mint.max(ids).asnumpy())
    if smallest < 0 or largest >= vocab_size:
        raise ValueError(
            f"token id {smallest if smallest < 0 else largest} is outside the vocabulary of {vocab_size} ids: the "
            "data was made with another tokenizer, or vocab_size is too small."
        )
