"""Checks of all samples of prepared instruction data, before anything is built: each stage's own, by the stored ids alone."""

import numpy as np

from mindspeed_ms.core.datasets.indexed_dataset import IndexedDataset
from mindspeed_ms.core.datasets.instruction_builder import dataset_class_of
from mindspeed_ms.core.datasets.instruction_files import InstructionDataError, InstructionFiles, field_prefix
from mindspeed_ms.core.datasets.prompt_dataset import PromptDataset
from mindspeed_ms.core.datasets.sft_dataset import PairwiseDataset, ProcessRewardDataset
from mindspeed_ms.core.datasets.splits import get_blend_from_list
from mindspeed_ms.core.datasets.turns import IGNORE_INDEX

_OPTIONS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_LOOKED_AT = 100  # samples that are read to tell conversations from step rewards
_AGAIN = "mend the record and preprocess again"


def check_samples(all_config):
    """Check the prepared instruction data of a configuration.

    Raises:
        InstructionDataError: a pair with equal answers, an empty answer, or one that is longer than the sequence; conversations
            where step rewards are expected, and the other way round.
    """
    settings, kind = all_config.dataset_config, dataset_class_of(all_config)
    for option in _OPTIONS:
        for prefix in (get_blend_from_list(getattr(settings, option)) or ((), None))[0]:
            files = InstructionFiles(prefix, kind.fields, settings.mmap_bin_files)
            if kind is PairwiseDataset:
                _check_pairs(files, all_config.model_config.seq_length)
            elif kind is ProcessRewardDataset:
                _check_steps(files)
            elif kind is PromptDataset:
                _check_prompts(files, all_config)
            else:
                _check_conversations(files)


def _check_pairs(files, length):
    for number in range(len(files)):
        sample = files[number]
        if np.array_equal(sample["chosen_input_ids"], sample["rejected_input_ids"]):
            raise _error(files, number, "has equal answers, which say nothing about preference")
        for kind in ("chosen", "rejected"):
            answer = np.count_nonzero(sample[f"{kind}_labels"][1:] != IGNORE_INDEX)
            if not answer:
                raise _error(files, number, f"has an empty {kind} answer")
            if answer >= length:
                raise InstructionDataError(
                    f"pair {number} of {files.path_prefix}: the {kind} answer has {answer} tokens, which leaves nothing of the "
                    f"question at seq_length {length}: raise it (--seq-length), or preprocess with --seq-length {length}."
                )


def _error(files, number, text):
    return InstructionDataError(f"pair {number} of {files.path_prefix} {text}: {_AGAIN}.")


def _are_steps(files):
    """Whether what is learnt stands at one and the same id, the placeholder, and is another id there."""
    ids, labels = [], []
    for number in range(min(len(files), _LOOKED_AT)):
        sample = files[number]
        here = sample["labels"] != IGNORE_INDEX
        ids.append(sample["input_ids"][here])
        labels.append(sample["labels"][here])
    ids, labels = np.concatenate(ids), np.concatenate(labels)
    return len(np.unique(ids)) == 1 and bool((ids != labels).all())


def _check_conversations(files):
    if _are_steps(files):
        raise InstructionDataError(
            f"{files.path_prefix} holds step rewards, whose labels stand at placeholders: train them with --stage prm."
        )


def _check_prompts(files, all_config):
    length, vocabulary = all_config.model_config.seq_length, all_config.model_config.vocab_size
    wanted, stage = all_config.training_config.max_new_tokens, all_config.training_config.stage
    if IndexedDataset.exists(field_prefix(files.path_prefix, "labels")):
        raise InstructionDataError(
            f"{files.path_prefix} holds conversations with answers, and stage {stage} generates them: preprocess with "
            "--handler-name PPOAlpacaStyleInstructionHandler, or name the raw records."
        )
    for number in range(len(files)):
        ids = files[number]["input_ids"]
        place = f"prompt {number} of {files.path_prefix}"
        if not len(ids):
            raise InstructionDataError(f"{place} is empty: {_AGAIN}.")
        if len(ids) + (wanted or 1) > length:
            room = f"and max_new_tokens (--max-new-tokens) is {wanted}, " if wanted else "which leaves no room for an answer "
            raise InstructionDataError(
                f"{place} has {len(ids)} tokens, {room}at seq_length {length}: raise it (--seq-length), or shorten the prompt."
            )
        if int(ids.max()) >= vocabulary:
            raise InstructionDataError(
                f"{place} has the id {int(ids.max())}, but the model's vocabulary has {vocabulary} ids: preprocess with the "
                "model's tokenizer, or raise vocab_size."
            )


def _check_steps(files):
    if not _are_steps(files):
        raise InstructionDataError(
            f"{files.path_prefix} holds no step rewards: labels are expected at one placeholder alone. Conversations are "
            "trained with --stage sft; step rewards are written by AlpacaStyleProcessRewardHandler."
        )
