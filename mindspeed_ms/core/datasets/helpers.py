"""Compiled builders of index arrays: equal bit by bit to Megatron-LM's C++ helpers (core_v0.12.1), and faster.

Compilation happens at the first call.
"""

import numpy as np

from mindspeed_ms.core.compiled import compiled

_GATHERED = 4096  # lengths of documents read ahead, so that the processor waits for many of them at once
_FEW, _LANES = 16, 16  # datasets of a blend


def _compiled(function):
    # nnan and nsz let the search of a maximum run in vectors; neither changes the result of a comparison of finite numbers
    return compiled(function, "datasets", nogil=True, error_model="numpy", fastmath={"nnan", "nsz"})


def number_of_samples(tokens, sequence_length, drop_last_partial_sequence=True, add_extra_token_to_sequence=True):
    """Number of samples in a stream of `tokens` tokens.

    With the last partial sequence kept, Megatron rounds a float32 quotient up; beyond 2**24 tokens that may be some samples
    less than there are, which is followed, or more (where Megatron ends with an assertion), which is not.
    """
    usable = max(0, int(tokens) - add_extra_token_to_sequence)
    if drop_last_partial_sequence:
        return usable // sequence_length
    return min(int(np.ceil(np.float32(usable) / np.float32(sequence_length))), -(-usable // sequence_length))


def build_sample_idx(
    sizes,
    document_indices,
    sequence_length,
    num_epochs,
    tokens_per_epoch,
    drop_last_partial_sequence=True,
    add_extra_token_to_sequence=True,
):
    """Sample index: the position in the stream of documents where each sample begins.

    Args:
        sizes (np.ndarray): int32, tokens of each document.
        document_indices (np.ndarray): int32, the documents in the order of the stream, all epochs.
        sequence_length (int): tokens of a sample.
        num_epochs, tokens_per_epoch (int): their product is the number of tokens of the stream.
        drop_last_partial_sequence (bool): no sample for tokens at the end that do not fill one.
        add_extra_token_to_sequence (bool): a sample also needs the token behind it.

    Returns:
        np.ndarray: `[samples + 1, 2]`, position in `document_indices` and first token there, of each sample and of the end;
            int32, or int64 if a document or their number exceeds it.
    """
    extra = int(add_extra_token_to_sequence)
    samples = number_of_samples(num_epochs * tokens_per_epoch, sequence_length, drop_last_partial_sequence, extra)
    largest = max(len(document_indices), int(sizes.max()) if len(sizes) else 0)
    sample_index = np.zeros((samples + 1, 2), np.int32 if largest <= np.iinfo(np.int32).max else np.int64)
    _fill_sample_index(sizes, document_indices, sequence_length, extra, sample_index)
    return sample_index


@_compiled
def _fill_sample_index(sizes, document_indices, sequence_length, extra, sample_index):
    last = len(sample_index) - 1
    lengths = np.empty(_GATHERED, np.int64)
    start, sample = np.int64(0), 1
    needed = np.int64(sequence_length + extra)
    for block in range(0, len(document_indices), _GATHERED):
        if sample > last:
            return
        documents = min(_GATHERED, len(document_indices) - block)
        for place in range(documents):
            lengths[place] = sizes[document_indices[block + place]]
        for place in range(documents):
            end = start + lengths[place]
            while needed <= end and sample <= last:
                sample_index[sample, 0] = block + place
                sample_index[sample, 1] = needed - extra - start
                sample += 1
                needed += sequence_length
            start = end
    if sample <= last:  # the last sample is a partial one
        sample_index[sample, 0] = len(document_indices) - 1
        sample_index[sample, 1] = sizes[document_indices[-1]] - extra


def build_blending_indices(weights, size):
    """Blending indices: each sample of a blend is from the dataset that lags furthest behind its share.

    Args:
        weights (Sequence[float]): shares of the datasets; their sum is 1.
        size (int): samples of the blend.

    Returns:
        tuple[np.ndarray, np.ndarray]: dataset (int16) and sample of that dataset (int64) of each sample.
    """
    return _blend(weights, np.full(len(weights), np.inf), size)


def build_exhaustive_blending_indices(sizes):
    """Blending indices of all samples of the datasets, each in proportion to its size.

    Args:
        sizes (Sequence[int]): samples of the datasets, positive.

    Returns:
        tuple[np.ndarray, np.ndarray]: as `build_blending_indices`.
    """
    total = sum(sizes)
    return _blend([size / total for size in sizes], np.asarray(sizes, np.float64), total)


def _blend(weights, limits, size):
    dataset_index, dataset_sample_index = np.empty(size, np.int16), np.empty(size, np.int64)
    fill = _fill_blend if len(weights) <= _FEW else _fill_blend_of_many
    fill(dataset_index, dataset_sample_index, np.asarray(weights, np.float64), limits)
    return dataset_index, dataset_sample_index


@_compiled
def _fill_blend(dataset_index, dataset_sample_index, weights, limits):
    counts = np.zeros(len(weights), np.float64)  # infinite once a dataset has given all that it may
    for sample in range(len(dataset_index)):
        position = max(np.float64(sample), 1.0)
        furthest, error = 0, weights[0] * position - counts[0]
        for dataset in range(1, len(weights)):
            other = weights[dataset] * position - counts[dataset]
            if other > error:
                furthest, error = dataset, other
        _take(dataset_index, dataset_sample_index, sample, furthest, counts, limits)


@_compiled
def _fill_blend_of_many(dataset_index, dataset_sample_index, weights, limits):
    """`_fill_blend` for many datasets, `_LANES` at a time; ties still go to the first dataset."""
    padded = -(-len(weights) // _LANES) * _LANES
    shares, counts = np.zeros(padded, np.float64), np.full(padded, np.inf)
    shares[: len(weights)] = weights
    counts[: len(weights)] = 0.0
    errors = np.empty(_LANES, np.float64)
    for sample in range(len(dataset_index)):
        position = max(np.float64(sample), 1.0)
        furthest, error = 0, -np.inf
        for first in range(0, padded, _LANES):
            for lane in range(_LANES):
                errors[lane] = shares[first + lane] * position - counts[first + lane]
            for lane in range(8):
                errors[lane] = max(errors[lane], errors[lane + 8])
            for lane in range(4):
                errors[lane] = max(errors[lane], errors[lane + 4])
            largest = max(max(errors[0], errors[1]), max(errors[2], errors[3]))
            if largest > error:
                furthest, error = first, largest
        while shares[furthest] * position - counts[furthest] != error:
            furthest += 1
        _take(dataset_index, dataset_sample_index, sample, furthest, counts, limits)


@_compiled
def _take(dataset_index, dataset_sample_index, sample, dataset, counts, limits):
    dataset_index[sample] = dataset
    dataset_sample_index[sample] = np.int64(counts[dataset])
    counts[dataset] += 1.0
    if counts[dataset] == limits[dataset]:
        counts[dataset] = np.inf
