"""Index arrays of a GPT dataset (document, sample and shuffle index), equal to Megatron-LM core_v0.12.1's bit by bit.

Documents are shuffled over all epochs and form one stream of tokens; samples are cut from it one after the other; then the
samples are shuffled. If less than 80 % of the last epoch is needed, it is shuffled apart from the others, so that no document
is seen much more often than the rest.
"""

from typing import NamedTuple

import numpy as np

from mindspeed_ms.core.datasets.errors import DatasetError
from mindspeed_ms.core.datasets.helpers import build_sample_idx, number_of_samples

_SEPARATE_BELOW = 0.80  # of an epoch's samples


class GPTIndices(NamedTuple):
    """Index arrays of a GPT dataset."""

    document_index: np.ndarray
    """int32, documents in the order of the stream, all epochs"""
    sample_index: np.ndarray
    """int32 or int64 `[samples + 1, 2]`: position in document_index and token there at which a sample begins"""
    shuffle_index: np.ndarray
    """uint32 (int64 from 2**32 - 2 samples on): the sample of each place in the order of training"""


def build_gpt_indices(
    sequence_lengths,
    documents,
    num_samples,
    sequence_length,
    random_seed,
    add_extra_token_to_sequence=True,
    drop_last_partial_sequence=True,
):
    """Build the index arrays of a GPT dataset.

    Args:
        sequence_lengths (np.ndarray): int32, tokens of every document of the files.
        documents (np.ndarray): int32, those that are used.
        num_samples (Optional[int]): samples needed at least; None: those of one epoch.
        sequence_length (int): tokens of a sample.
        random_seed (int): of numpy's RandomState.
        add_extra_token_to_sequence (bool): a sample needs one token more, its last label.
        drop_last_partial_sequence (bool): no sample for tokens at the end that do not fill one.

    Returns:
        GPTIndices

    Raises:
        DatasetError: samples are wanted from documents without any token.
    """
    extra = int(add_extra_token_to_sequence)
    tokens_per_epoch = int(np.sum(sequence_lengths[documents], dtype=np.int64))
    epochs = number_of_epochs(num_samples, tokens_per_epoch, sequence_length, extra)
    before_last = number_of_samples((epochs - 1) * tokens_per_epoch, sequence_length, add_extra_token_to_sequence=extra)
    per_epoch = number_of_samples(tokens_per_epoch, sequence_length, add_extra_token_to_sequence=extra)
    separate = epochs > 1 and num_samples - before_last < int(_SEPARATE_BELOW * per_epoch)

    random_state = np.random.RandomState(random_seed)
    document_index = _shuffled_documents(documents, epochs - separate, random_state)
    if separate:
        document_index = np.concatenate([document_index, _shuffled_documents(documents, 1, random_state)])
    sample_index = build_sample_idx(
        sequence_lengths,
        document_index,
        sequence_length,
        epochs,
        tokens_per_epoch,
        drop_last_partial_sequence,
        add_extra_token_to_sequence,
    )
    samples = len(sample_index) - 1
    shuffle_index = _shuffled_samples(before_last if separate else samples, samples, random_state)
    return GPTIndices(document_index, sample_index, shuffle_index)


def number_of_epochs(num_samples, tokens_per_epoch, sequence_length, extra):
    """Number of passes over the documents that `num_samples` samples need.

    Raises:
        DatasetError: the documents have no tokens.
    """
    if num_samples is None:
        return 1
    wanted = num_samples * sequence_length + extra
    if tokens_per_epoch == 0:
        if num_samples:
            raise DatasetError(f"{num_samples} samples of {sequence_length} tokens are wanted, but there is not one token.")
        return 1
    return max(1, -(-wanted // tokens_per_epoch))


def _shuffled_documents(documents, epochs, random_state):
    document_index = np.tile(np.asarray(documents, np.int32), epochs)
    random_state.shuffle(document_index)
    return document_index


def _shuffled_samples(first, samples, random_state):
    """Shuffle index: samples [0, first) shuffled, then [first, samples) shuffled."""
    shuffle_index = np.arange(samples, dtype=np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64)
    random_state.shuffle(shuffle_index[:first])
    if first < samples:
        random_state.shuffle(shuffle_index[first:])
    return shuffle_index
