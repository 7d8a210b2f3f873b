"""TokenDataset: language-modelling samples cut from one array of tokens, in memory or mapped from disk.

This is the small dataset of the first example. It supports neither Megatron's indexed files nor blending.
"""

import numpy as np

from mindspeed_ms.core.datasets.documents import document_attention_mask, document_intervals, document_positions


class TokenDataset:
    """Sample `i` holds the tokens `[i * s, (i + 1) * s]`: neighbouring samples share the token at their border.

    Args:
        tokens (np.ndarray): token ids, one-dimensional, documents one after the other.
        sequence_length (int): s.
        end_of_document (Optional[int]): id that ends a document; needed by the three options below.
        reset_position_ids (bool): count positions from 0 behind each end of document.
        reset_attention_mask (bool): no attention across an end of document; samples then carry `attention_mask`.
        eod_mask_loss (bool): no loss where the input is an end of document.
        mask_as_intervals (bool): the mask is int32 `[1, s, 2]`, see `document_intervals`.

    A sample is a dict of arrays: `tokens`, `labels` and `position_ids` int32 `[s]`, `loss_mask` float32 `[s]`, and, if asked
    for, `attention_mask` bool `[1, s, s]`, True where a query may not look.

    Raises:
        ValueError: too few tokens for one sample, an option that lacks `end_of_document`.
    """

    def __init__(
        self,
        tokens,
        sequence_length,
        end_of_document=None,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        mask_as_intervals=False,
    ):
        if sequence_length < 1:
            raise ValueError(f"sequence_length is {sequence_length}: expected a positive integer.")
        if len(tokens) <= sequence_length:
            raise ValueError(
                f"the data has {len(tokens)} tokens, too few for one sample of {sequence_length} and its labels: "
                f"expected at least {sequence_length + 1}. Give more text or lower seq_length."
            )
        if end_of_document is None and (reset_position_ids or reset_attention_mask or eod_mask_loss):
            raise ValueError("reset_position_ids, reset_attention_mask and eod_mask_loss need the id that ends a document.")
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.end_of_document = end_of_document
        self.reset_position_ids = reset_position_ids
        self.reset_attention_mask = reset_attention_mask
        self.eod_mask_loss = eod_mask_loss
        self._mask_of = document_intervals if mask_as_intervals else document_attention_mask

    def __len__(self):
        return (len(self.tokens) - 1) // self.sequence_length

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self.sequence_length
        text = np.asarray(self.tokens[start : start + self.sequence_length + 1], np.int32)
        tokens = text[:-1]
        ends = np.flatnonzero(tokens == self.end_of_document) if self.end_of_document is not None else ()
        sample = {
            "tokens": tokens,
            "labels": text[1:],
            "position_ids": document_positions(self.sequence_length, ends if self.reset_position_ids else ()),
            "loss_mask": np.ones(self.sequence_length, np.float32),
        }
        if self.eod_mask_loss:
            sample["loss_mask"][ends] = 0.0
        if self.reset_attention_mask:
            sample["attention_mask"] = self._mask_of(self.sequence_length, ends)
        return sample
