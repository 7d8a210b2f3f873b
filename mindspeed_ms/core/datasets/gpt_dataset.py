"""GPTDataset: shuffled samples for GPT training from indexed files; names, order and values: Megatron-LM core_v0.12.1."""

import operator
import os
from dataclasses import dataclass

import numpy as np

from mindspeed_ms.core.datasets.documents import document_attention_mask, document_intervals, document_positions
from mindspeed_ms.core.datasets.errors import DatasetError
from mindspeed_ms.core.datasets.gpt_indices import GPTIndices, build_gpt_indices
from mindspeed_ms.core.datasets.index_cache import cached_arrays, content_hash
from mindspeed_ms.core.datasets.indexed_dataset import IndexedDataset
from mindspeed_ms.core.datasets.splits import Split
from mindspeed_ms.core.logging import logger

_NO_PADDING = -1


@dataclass(frozen=True)
class GPTDatasetConfig:
    """Configuration of a GPT dataset: data, sequence length, masks, cache.

    Attributes:
        random_seed (int): of the order of documents and samples.
        sequence_length (int): tokens of a sample.
        blend, blend_per_split: data, see `get_blend_from_list`: of all splits together, or of train, valid and test.
        split (Optional[str]): shares of train, valid and test in the documents of `blend`, such as "969,30,1".
        path_to_cache (Optional[str]): folder of built indices; None: beside the data, blends are not kept.
        mmap_bin_files (bool): map the tokens into memory.
        mock (bool): made-up documents instead of files.
        eod_token_id (int): token that ends a document.
        pad_token_id (Optional[int]): token that has no loss; it also fills up samples. None: there is none.
        vocab_size (Optional[int]): samples with larger ids are an error.
        reset_position_ids (bool): positions begin at 0 in each document.
        reset_attention_mask (bool): no attention across the end of a document.
        eod_mask_loss (bool): no loss where the input is the end of a document.
        create_attention_mask (bool): samples have an `attention_mask`.
        mask_as_intervals (bool): it is int32 `[1, s, 2]`, see `document_intervals`.
        drop_last_partial_validation_sequence (bool): no validation sample for tokens that do not fill one.
        add_extra_token_to_sequence (bool): the last label is the token behind the sample; else it is padding.
    """

    random_seed: int
    sequence_length: int
    eod_token_id: int
    blend: tuple = None
    blend_per_split: tuple = None
    split: str = None
    path_to_cache: str = None
    mmap_bin_files: bool = True
    mock: bool = False
    pad_token_id: int = None
    vocab_size: int = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    create_attention_mask: bool = True
    mask_as_intervals: bool = False
    drop_last_partial_validation_sequence: bool = True
    add_extra_token_to_sequence: bool = True

    def __post_init__(self):
        if self.sequence_length < 1:
            raise DatasetError(f"sequence_length is {self.sequence_length}: expected a positive integer.")


class GPTDataset:
    """Shuffled samples of some documents of an indexed dataset, equal to Megatron's.

    Args:
        indexed_dataset (IndexedDataset): the files.
        dataset_path (Optional[str]): their prefix.
        indexed_indices (np.ndarray): int32, the documents (sequences of the files) that are used.
        num_samples (Optional[int]): samples needed at least, over as many epochs as needed; None: one epoch.
        index_split (Split): which split this is.
        config (GPTDatasetConfig): form of the samples.

    A sample is a dict of arrays: `tokens`, `labels`, `position_ids` int64 `[s]`, `loss_mask` float32 `[s]`, and, with
    `create_attention_mask`, `attention_mask` bool `[1, s, s]`, True where a query may not look. An array that is equal in all
    samples is shared and read-only.

    Raises:
        DatasetError: samples are wanted, but there are no documents.
    """

    def __init__(self, indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config):
        self.dataset = indexed_dataset
        self.dataset_path = dataset_path
        self.indices = indexed_indices
        self.num_samples = num_samples
        self.index_split = index_split
        self.config = config
        self._padding = _NO_PADDING if config.pad_token_id is None else config.pad_token_id
        if num_samples and not len(indexed_indices):
            raise DatasetError(
                f"{self.name()}: {num_samples} samples are wanted, but the split leaves none of the "
                f"{len(indexed_dataset)} documents to it. Give more documents, a larger share "
                "(--split), or evaluate nothing (--eval-iters 0)."
            )
        self.document_index, self.sample_index, self.shuffle_index = self._indices()
        self._shared_mask = self._shared_positions = None

    def name(self):
        """Name of this dataset in messages."""
        return f"{self.index_split.name} data of {self.dataset_path or 'the made-up documents'}"

    def _indices(self):
        config, lengths = self.config, self.dataset.sequence_lengths
        settings = {
            "num_samples": self.num_samples,
            "sequence_length": config.sequence_length,
            "random_seed": config.random_seed,
            "add_extra_token_to_sequence": config.add_extra_token_to_sequence,
            "drop_last_partial_sequence": (self.index_split != Split.valid or config.drop_last_partial_validation_sequence),
        }

        def build():
            logger.info("building the index of the %s", self.name())
            try:
                return build_gpt_indices(lengths, self.indices, **settings)._asdict()
            except DatasetError as error:
                raise DatasetError(f"{self.name()}: {error}") from error

        path = config.path_to_cache
        if path is None and not config.mock:
            path = os.path.join(self.dataset_path, "cache", f"{type(self).__name__}_indices")
        key = content_hash(settings, lengths[self.indices], self.indices) if path else ""
        arrays = cached_arrays(
            path,
            f"{key}-{type(self).__name__}-{self.index_split.name}",
            {"dataset_path": self.dataset_path, **settings},
            build,
            must_be_written=config.path_to_cache is not None,
        )
        return GPTIndices(**arrays)

    def __len__(self):
        return len(self.sample_index) - 1

    def __getitem__(self, index):
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of the {self.name()}, which has {len(self)}")
        text = self._text(int(self.shuffle_index[index]))
        if self.config.add_extra_token_to_sequence:
            tokens, labels = text[:-1].copy(), text[1:]
        else:
            tokens, labels = text, np.append(text[1:], self._padding)
        ends = np.flatnonzero(tokens == self.config.eod_token_id)
        loss_mask = np.ones(len(tokens), np.float32)
        if self.config.eod_mask_loss:
            loss_mask[ends] = 0.0
        loss_mask[labels == self._padding] = 0.0
        sample = {"tokens": tokens, "labels": labels}
        for ids in sample.values():
            ids[ids == self._padding] = 0  # any id that the embedding knows
            self._check_ids(index, ids)
        if self.config.create_attention_mask:
            sample["attention_mask"] = self._attention_mask(ends)
        return {**sample, "loss_mask": loss_mask, "position_ids": self._position_ids(ends)}

    def _text(self, sample):
        """Tokens (int64) of a sample, on request with the token behind it, filled up with padding."""
        extra = int(self.config.add_extra_token_to_sequence)
        first, offset = map(int, self.sample_index[sample])
        last, end = map(int, self.sample_index[sample + 1])
        if first == last:
            parts = [self.dataset.get(self.document_index[first], offset, end - offset + extra)]
        else:
            parts = [self.dataset.get(self.document_index[first], offset)]
            parts += [self.dataset.get(self.document_index[place]) for place in range(first + 1, last)]
            parts.append(self.dataset.get(self.document_index[last], 0, end + extra))
        text = np.full(self.config.sequence_length + extra, self._padding, np.int64)
        length = sum(map(len, parts))
        np.concatenate(parts, out=text[:length], casting="unsafe")
        return text

    def _check_ids(self, index, ids):
        vocab_size = self.config.vocab_size
        if vocab_size is not None and len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
            raise DatasetError(
                f"sample {index} of the {self.name()} has token id {wrong}: the model's vocabulary has "
                f"{vocab_size} ids. Was the data preprocessed with another tokenizer?"
            )

    def _attention_mask(self, ends):
        mask_of = document_intervals if self.config.mask_as_intervals else document_attention_mask
        if self.config.reset_attention_mask:
            return mask_of(self.config.sequence_length, ends)
        if self._shared_mask is None:
            self._shared_mask = _read_only(mask_of(self.config.sequence_length))
        return self._shared_mask

    def _position_ids(self, ends):
        if self.config.reset_position_ids:
            return document_positions(self.config.sequence_length, ends, np.int64)
        if self._shared_positions is None:
            self._shared_positions = _read_only(document_positions(self.config.sequence_length, dtype=np.int64))
        return self._shared_positions


def _read_only(array):
    array.setflags(write=False)
    return array


def open_indexed_dataset(prefix, config):
    """The IndexedDataset of a prefix, or with `config.mock` made-up documents."""
    return MockGPTLowLevelDataset(config) if config.mock else IndexedDataset(prefix, mmap=config.mmap_bin_files)


class MockGPTLowLevelDataset:
    """Megatron's made-up documents: 100000 of 1 to 4095 tokens, which count up from 1 and end with the end of document.

    With a smaller vocabulary (`config.vocab_size`), the tokens begin at 1 again at its end.
    """

    size = 100_000
    longest = 4096

    def __init__(self, config):
        self.sequence_lengths = np.random.default_rng(seed=0).integers(1, self.longest, self.size, np.int32)
        counted = np.arange(self.longest, dtype=np.int64)
        self._tokens = 1 + counted % max(1, (config.vocab_size or self.longest) - 1)
        self._eod = config.eod_token_id

    def __len__(self):
        return self.size

    def get(self, idx, offset=0, length=None):
        """Part of a document, as `IndexedDataset.get`."""
        end = int(self.sequence_lengths[idx])
        stop = end if length is None else offset + length
        return np.append(self._tokens[: end - 1], self._eod)[offset:stop]
