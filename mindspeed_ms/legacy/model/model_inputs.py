"""Checks of a language model's inputs."""

import numpy as np

from mindspeed_ms.core.context_parallel import local_position_ids
from mindspeed_ms.core.tensor_parallel.utils import check_integer
from mindspeed_ms.layout.model_description import LEARNED_POSITIONS


def check_inputs(config, tokens, position_ids, loss_mask, labels):
    """Check a model's inputs against each other and against its tables.

    Args:
        config (TransformerConfig): the model.
        tokens (Tensor): ids `[b, s]`.
        position_ids (Optional[Tensor]): `[b, s]`, or `[1, s]` for all samples.
        loss_mask (Optional[Tensor]): `[b, s]`.
        labels (Optional[Tensor]): ids `[b, s]`; values where the mask is 0 do not matter.

    Raises:
        ValueError: an input that is no Tensor of the expected kind and shape, a label that is counted and outside the
            vocabulary, a position outside the table of learned positions.
    """
    _check_kind("tokens", tokens, integer=True)
    if len(tokens.shape) != 2:
        raise ValueError(f"tokens have shape {tuple(tokens.shape)}: expected [batch, sequence].")
    shape = tuple(tokens.shape)
    for name, value in (("position_ids", position_ids), ("labels", labels), ("loss_mask", loss_mask)):
        if value is None:
            continue
        _check_kind(name, value, integer=name != "loss_mask")
        expected = (shape, (1, shape[1])) if name == "position_ids" else (shape,)
        if tuple(value.shape) not in expected:
            raise ValueError(
                f"{name} of shape {tuple(value.shape)} do not fit tokens of shape {shape}: expected the same "
                "shape, [batch, sequence]."
            )
    if labels is not None:
        _check_labels(config, labels, loss_mask)
    if position_ids is not None and config.position_embedding_type in LEARNED_POSITIONS:
        _check_positions(config, position_ids.asnumpy())


def _check_kind(name, value, integer):
    if not hasattr(value, "asnumpy"):
        raise ValueError(f"{name} are a {type(value).__name__}: expected a Tensor.")
    if integer:
        check_integer(name, value)


def _check_labels(config, labels, loss_mask):
    """Raise ValueError for a label outside the vocabulary; the loss would silently take a wrong probability for it."""
    ids = labels.asnumpy()
    outside = (ids < 0) | (ids >= config.vocab_size)
    if loss_mask is not None and outside.any():
        outside &= loss_mask.asnumpy() != 0
    if outside.any():
        row, column = (int(index[0]) for index in np.nonzero(outside))
        place = int(local_position_ids(ids.shape[1]).asnumpy()[0, column])  # in the whole sequence, where ranks hold parts
        raise ValueError(
            f"label {int(ids[row, column])} (sample {row}, position {place}) is outside the vocabulary of "
            f"{config.vocab_size} ids, and its loss_mask is not 0: mask what must not count, or raise "
            "vocab_size."
        )


def _check_positions(config, positions):
    count = config.max_position_embeddings
    smallest, largest = int(positions.min()), int(positions.max())
    if smallest < 0 or largest >= count:
        raise ValueError(
            f"position id {smallest if smallest < 0 else largest} is outside the table of {count} learned "
            "positions: correct position_ids, or raise max_position_embeddings."
        )
