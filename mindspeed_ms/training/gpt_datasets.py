"""Megatron's GPT datasets of a configuration. Source of the rules: Megatron's pretrain_gpt and arguments."""

import os

from mindspeed_ms.core.datasets.blended_megatron_dataset_builder import build_train_valid_test_datasets, check_split
from mindspeed_ms.core.datasets.errors import DatasetError
from mindspeed_ms.core.datasets.fingerprint import of_indexed_files
from mindspeed_ms.core.datasets.gpt_dataset import GPTDatasetConfig
from mindspeed_ms.core.datasets.indexed_dataset import IndexedDataset, get_bin_path, get_idx_path
from mindspeed_ms.core.datasets.instruction_builder import build_instruction_datasets, dataset_class_of, stored_training_samples
from mindspeed_ms.core.datasets.instruction_files import field_prefix
from mindspeed_ms.core.datasets.splits import DEFAULT_SPLIT, get_blend_from_list
from mindspeed_ms.training import same_data
from mindspeed_ms.training.initialize import get_all_config


def train_valid_test_datasets_provider(train_val_test_num_samples):
    """Datasets provider for `pretrain`: GPT datasets, or with `is_instruction_dataset` those of conversations.

    Args:
        train_val_test_num_samples (tuple[int, int, int]): samples that are needed; no training samples: one epoch.

    Returns:
        list[Optional[dataset]]: training, validation, test; None where there is nothing to read.

    Raises:
        FileNotFoundError, DatasetError: files are missing, damaged or too short, or named in a way that cannot be.
    """
    return build_datasets(get_all_config(), used(get_all_config(), train_val_test_num_samples))


def build_datasets(all_config, train_val_test_num_samples):
    """`train_valid_test_datasets_provider` for a given configuration."""
    if is_instruction_data(all_config):
        return build_instruction_datasets(all_config, train_val_test_num_samples)
    train, valid, test = train_val_test_num_samples
    datasets = build_train_valid_test_datasets([train or None, valid, test], gpt_dataset_config(all_config))
    if datasets[0] is None or not len(datasets[0]):
        reason = (
            "the split leaves no documents to it"
            if datasets[0] is None
            else (f"its documents have too few tokens for one sample of seq_length {all_config.model_config.seq_length}")
        )
        raise DatasetError(f"there is no training data: {reason}. Give more data (--data-path) or another split (--split).")
    return [
        dataset if dataset is not None and len(dataset) and wanted else None
        for dataset, wanted in zip(datasets, (True, valid, test))
    ]


def gpt_dataset_config(all_config):
    """`GPTDatasetConfig` of an AllConfig."""
    settings, model = all_config.dataset_config, all_config.model_config
    each = tuple(get_blend_from_list(words) for words in _per_split(settings))
    check_masks(settings)
    return GPTDatasetConfig(
        random_seed=all_config.training_config.random_seed,
        sequence_length=model.seq_length,
        blend=get_blend_from_list(settings.data_path),
        blend_per_split=each if any(each) else None,
        split=settings.split,
        path_to_cache=settings.data_cache_path,
        mmap_bin_files=settings.mmap_bin_files,
        mock=settings.mock_data,
        eod_token_id=settings.eos_token_id,
        pad_token_id=settings.pad_token_id,
        vocab_size=model.vocab_size,
        reset_position_ids=settings.reset_position_ids,
        reset_attention_mask=settings.reset_attention_mask,
        eod_mask_loss=settings.eod_mask_loss,
        create_attention_mask=settings.reset_attention_mask,  # a causal mask is what the model applies without one
        mask_as_intervals=takes_intervals(all_config),
    )


def takes_intervals(all_config):
    """Whether masks of packed documents are two numbers per query: over cut sequences no attention needs `[s, s]`."""
    return all_config.parallel_config.context_parallel_size > 1 and all_config.model_config.seq_length > 2


def check_masks(settings):
    """Raise DatasetError if a `dataset_config` (DatasetConfig) needs attention masks and switches them off."""
    if settings.reset_attention_mask and not settings.create_attention_mask_in_dataloader:
        raise DatasetError(
            "reset_attention_mask needs attention masks, which create_attention_mask_in_dataloader False "
            "(--no-create-attention-mask-in-dataloader) switches off: leave one of them out."
        )


def is_instruction_data(all_config):
    """Whether the data are conversations, pairs of answers or step rewards."""
    return all_config.dataset_config.is_instruction_dataset or all_config.dataset_config.is_pairwise_dataset


def names_indexed_files(all_config):
    """Whether the data is mock data, weighted, instruction data, or named by prefixes of indexed files."""
    settings = all_config.dataset_config
    blends = [get_blend_from_list(words) for words in (settings.data_path, *_per_split(settings))]
    return (
        settings.mock_data
        or is_instruction_data(all_config)
        or any(blend and (blend[1] or any(_exists(prefix) for prefix in blend[0])) for blend in blends)
    )


def check_files(all_config):
    """Open all named files, before anything is built, and check that each split that is used has documents.

    Raises:
        FileNotFoundError, DatasetError: as the provider.
    """
    if is_instruction_data(all_config):
        build_instruction_datasets(all_config, (1, 1, 1))
        return
    config = gpt_dataset_config(all_config)
    for blend in (config.blend, *(config.blend_per_split or ())):
        for prefix in blend[0] if blend else ():
            IndexedDataset(prefix)
    for prefix in config.blend[0] if config.blend else ():
        check_split(prefix, config.split, (True, *[evaluates(all_config)] * 2))


def evaluates(all_config):
    """Whether the run evaluates anything, so that it needs validation and test data."""
    training = all_config.training_config
    return bool(training.eval_iters and (training.eval_interval or training.skip_train))


def used(all_config, train_val_test_num_samples):
    """`train_val_test_num_samples`, with 0 for data that the run never evaluates."""
    train, valid, test = train_val_test_num_samples
    return (train, valid, test) if evaluates(all_config) else (train, 0, 0)


def fingerprint(all_config=None):
    """Fingerprint of tokenizer and indexed files, see `same_data`; by default of the configuration of this process.

    Raises:
        FileNotFoundError, DatasetError: files are missing or damaged.
    """
    all_config = all_config or get_all_config()
    settings = all_config.dataset_config
    if settings.mock_data:
        part = {"of": "mock_data", "path": "made-up documents", "documents": 0, "tokens": 0, "hash": ""}
        return same_data.fingerprint(all_config, "mock", [part], None)
    parts = []
    for of in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        prefixes, weights = get_blend_from_list(getattr(settings, of)) or ((), None)
        if is_instruction_data(all_config):
            fields = dataset_class_of(all_config).fields
            prefixes = [field_prefix(prefix, field) for prefix in prefixes for field in fields]
        parts += same_data.with_shares(of, [of_indexed_files(prefix) for prefix in prefixes], weights)
    if is_instruction_data(all_config):
        kind = "pairs of answers" if settings.is_pairwise_dataset else "conversations"
        return same_data.fingerprint(all_config, kind, parts, settings.split or "1" if settings.data_path else None)
    split = settings.split or DEFAULT_SPLIT if settings.data_path else None
    return same_data.fingerprint(all_config, "indexed", parts, split)


def fingerprint_of_own_program(all_config, brings_data):
    """Fingerprint of a run whose own program provides the data: of the tokenizer, and of the indexed files that are named.

    Args:
        brings_data (bool): the program passes a loader, whatever the configuration names.
    """
    settings = all_config.dataset_config
    if not brings_data and (settings.data_path or settings.train_data_path) and names_indexed_files(all_config):
        return fingerprint(all_config)
    return {"tokenizer": same_data.of_tokenizer(all_config), "data": None}


def samples_per_epoch(all_config):
    """Samples of a pass over instruction data; None for documents, of which one dataset is one pass."""
    return stored_training_samples(all_config) if is_instruction_data(all_config) else None


train_valid_test_datasets_provider.fingerprint = fingerprint
train_valid_test_datasets_provider.samples_per_epoch = samples_per_epoch


def _per_split(settings):
    return settings.train_data_path, settings.valid_data_path, settings.test_data_path


def _exists(prefix):
    """Whether indexed files have this prefix, or this name with .bin or .idx: a mistake that the builder reports."""
    stem, ending = os.path.splitext(prefix)
    if ending in (".bin", ".idx") and IndexedDataset.exists(stem):
        return True
    return os.path.isfile(get_idx_path(prefix)) or os.path.isfile(get_bin_path(prefix))
