"""Embedding lookup over a vocabulary that is split between ranks."""

from mindspeed_ms.ops.forms import operator


@operator
def embedding_lookup(weight, ids, vocab_start=0, vocab_end=None, vocab_size=None):
    """Rows of `weight` for the ids that this rank holds, zero rows for the others; differentiable in `weight`.

    The gradient adds rows in the order of the ids, so it is the same on every run.

    Args:
        weight (Tensor): [vocab_end - vocab_start, hidden].
        ids (Tensor): integers of any shape.
        vocab_start, vocab_end: range of ids of the rows; `vocab_end` None means `vocab_start + rows`.
        vocab_size: size of the whole vocabulary; None means `vocab_end`.

    Returns:
        Tensor ids.shape + [hidden], dtype of `weight`.

    Raises:
        ValueError: an id is outside [0, vocab_size); the message names it.
    """
