"""Indexed files of instruction data, as preprocessing writes them: one per field, one sequence per sample."""

import glob
import os

import numpy as np

from mindspeed_ms.core.datasets.errors import DatasetError
from mindspeed_ms.core.datasets.indexed_dataset import IndexedDataset

SFT_FIELDS = ("input_ids", "labels", "attention_mask")
PROMPT_FIELDS = ("input_ids", "attention_mask")
PAIRWISE_FIELDS = ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels")
_OTHER_KINDS = (
    (PAIRWISE_FIELDS, "pairs of answers", "--stage dpo, simpo or orm"),
    (SFT_FIELDS, "conversations (or step rewards)", "--stage sft (prm)"),
    (PROMPT_FIELDS, "prompts", "--stage trl_ppo or grpo"),
)


class InstructionDataError(DatasetError):
    """Instruction data that cannot be used; the message names the file and says what to do."""


def field_prefix(path_prefix, field):
    """Prefix of the indexed files of a field."""
    return f"{path_prefix}_packed_{field}_document"


class InstructionFiles:
    """Indexed files of all fields of `path_prefix`, the `--output-prefix` of preprocessing.

    Args:
        path_prefix (str): as it is, without `_packed_...`.
        fields (tuple[str]): SFT_FIELDS or PAIRWISE_FIELDS.
        mmap (bool): see IndexedDataset.

    Raises:
        InstructionDataError: a file is missing, the fields have different numbers or lengths of sequences, there are none.
        IndexedDatasetError: a file is damaged.
    """

    def __init__(self, path_prefix, fields, mmap=True):
        self.path_prefix = path_prefix
        missing = [field for field in fields if not IndexedDataset.exists(field_prefix(path_prefix, field))]
        if missing:
            raise InstructionDataError(_missing(path_prefix, fields, missing))
        self.files = {field: IndexedDataset(field_prefix(path_prefix, field), mmap=mmap) for field in fields}
        self.lengths = self._checked_lengths(fields)

    def __len__(self):
        return len(next(iter(self.files.values())))

    def __getitem__(self, index):
        """Arrays of a sample: dict[str, np.ndarray `[n]`]."""
        return {field: file[index] for field, file in self.files.items()}

    def _checked_lengths(self, fields):
        """Sequence lengths of the first field, after checking that the other fields agree."""
        first = self.files[fields[0]]
        if not len(first):
            raise InstructionDataError(f"{self.path_prefix} has no samples.")
        for field in fields[1:]:
            file, partner = self.files[field], first
            if field == "rejected_labels":
                partner = self.files["rejected_input_ids"]
            same_length = np.array_equal(file.sequence_lengths, partner.sequence_lengths)
            if len(file) != len(first) or not (same_length or field == "rejected_input_ids"):
                raise InstructionDataError(
                    f"{file.path_prefix} and {partner.path_prefix} have {len(file)} and {len(partner)} sequences"
                    + ("" if len(file) != len(partner) else " of different lengths")
                    + ": they do not come from one run of preprocessing. Preprocess again."
                )
        return first.sequence_lengths


def _missing(path_prefix, fields, missing):
    text = (
        f"{path_prefix}: there is no {field_prefix(path_prefix, missing[0])}.bin and .idx. Instruction data is named by "
        "--output-prefix of preprocessing, without _packed_... and ending."
    )
    if "_packed_" in path_prefix:
        return f"{text} Did you mean {path_prefix.partition('_packed_')[0]}?"
    has_parts = any(os.path.exists(f"{field_prefix(path_prefix, field)}{end}") for field in missing for end in (".bin", ".idx"))
    for others, kind, stage in () if has_parts else _OTHER_KINDS:
        if others != fields and all(IndexedDataset.exists(field_prefix(path_prefix, field)) for field in others):
            return f"{text} There are {kind} by that name, which {stage} trains on."
    if len(missing) < len(fields):
        return f"{text} Other fields are there: preprocessing did not end. Run it again."
    if os.path.exists(f"{path_prefix}_text_document.idx") or os.path.exists(f"{path_prefix}.idx"):
        return f"{text} There is pretraining text by that name: leave out --is-instruction-dataset."
    found = sorted(
        {
            path.rpartition("_packed_")[0]
            for path in glob.glob(os.path.join(glob.escape(os.path.dirname(path_prefix) or "."), "*_packed_*_document.idx"))
        }
    )
    return f"{text} Found in that folder: {', '.join(found[:5])}." if found else text
