"""SFTDataset and PairwiseDataset: samples of instruction data, truncated or padded, labels shifted, with masks.

Stored labels are the ids themselves where they are learnt, and -100 elsewhere. Here position i is labelled with the stored
label of position i + 1, so that a sample has as many positions as tokens and the last one counts nothing.
"""

from abc import ABC, abstractmethod

import numpy as np

from mindspeed_ms.core.datasets.instruction_files import PAIRWISE_FIELDS, SFT_FIELDS, InstructionDataError
from mindspeed_ms.core.datasets.stored_samples import StoredSamples
from mindspeed_ms.core.datasets.turns import IGNORE_INDEX, balanced_lengths, kept_positions
from mindspeed_ms.core.logging import logger

_LOOKED_AT = 100  # samples that are read to tell whether data is neat-packed


class InstructionDataset(StoredSamples, ABC):
    """Base class of SFTDataset, ProcessRewardDataset and PairwiseDataset: samples of one length, checked.

    Args:
        path_prefix (str): see StoredSamples.
        sequence_length (int): s; longer samples are cut.
        pad_token_id (int): fills samples up.
        pad_to_multiple_of (Optional[int]): fill a micro-batch up to the next such multiple of its longest sample; None: to s.
        vocab_size (Optional[int]): ids must be below it.
        further arguments: see StoredSamples.

    Attributes:
        beside (dict[str, np.ndarray]): further entries of a sample, arrays by the number of the stored sample.

    Raises:
        InstructionDataError: see StoredSamples; ids outside the vocabulary (when a sample is read).
    """

    def __init__(self, path_prefix, sequence_length, pad_token_id, *, pad_to_multiple_of=None, vocab_size=None, **order):
        super().__init__(path_prefix, **order)
        self.sequence_length, self.pad_token_id = sequence_length, pad_token_id
        self.pad_to_multiple_of, self.vocab_size = pad_to_multiple_of, vocab_size
        self.beside = {}
        self._report_longer(int((self.files.lengths[self.first : self.first + self.stored] > sequence_length).sum()))

    def _report_longer(self, count):
        if count:
            logger.warning(
                "%s: %d of %d samples are longer than seq_length %d and are cut, turn by turn",
                self.files.path_prefix,
                count,
                self.stored,
                self.sequence_length,
            )

    def __getitem__(self, index):
        """One sample, padded."""
        return {name: value[0] for name, value in self.micro_batch([index]).items()}

    def micro_batch(self, indices):
        """Samples of one micro-batch, padded to one length: dict of arrays `[b, ...]`.

        Raises:
            IndexError: no such sample.
        """
        return self.stored_batch([self.stored_index(index) for index in indices])

    def stored_batch(self, numbers):
        """`micro_batch` of stored samples, by their numbers."""
        samples = [self._sample(number) for number in numbers]
        length = self.sequence_length
        if self.pad_to_multiple_of:
            longest = max(self._length_of(sample) for sample in samples)
            length = min(-(-max(longest, 1) // self.pad_to_multiple_of) * self.pad_to_multiple_of, length)
        filled = [self._filled(sample, length) for sample in samples]
        batch = {name: np.stack([sample[name] for sample in filled]) for name in filled[0]}
        return batch | {name: values[list(numbers)] for name, values in self.beside.items()}

    def _checked(self, ids, index):
        if self.vocab_size is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            wrong = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise InstructionDataError(
                f"sample {index} of {self.files.path_prefix} has the id {int(wrong)}, but the model's "
                f"vocabulary has {self.vocab_size} ids: preprocess with the model's tokenizer, or raise "
                "vocab_size (tokens that a template adds count too)."
            )
        return ids

    def _filled_ids(self, ids, labels, length):
        """Tokens, labels of the next position and their mask, padded to `length`."""
        tokens = np.full(length, self.pad_token_id, np.int32)
        following = np.full(length, IGNORE_INDEX, np.int32)
        tokens[: len(ids)] = ids
        following[: max(len(ids) - 1, 0)] = labels[1:]
        mask = following != IGNORE_INDEX
        return tokens, np.where(mask, following, 0).astype(np.int32), mask.astype(np.float32)

    @abstractmethod
    def _sample(self, index):
        """The stored sample `index`, truncated."""

    @abstractmethod
    def _length_of(self, sample):
        """Number of tokens of the longest part of `sample`."""

    @abstractmethod
    def _filled(self, sample, length):
        """Padded sample: dict of arrays `[length]`."""


class SFTDataset(InstructionDataset):
    """Conversations for supervised fine-tuning, packed or not.

    Args:
        reset_position_ids (bool): in neat-packed data, positions start again with each of the packed conversations.
        reset_attention_mask (bool): they do not see each other; samples then have `attention_mask`.
        further arguments: see InstructionDataset.

    A sample is a dict: `tokens`, `labels`, `position_ids` int32 `[s]`, `loss_mask` float32 `[s]` (0 where nothing is learnt),
    and, if asked for, `attention_mask` bool `[1, s, s]`, True where a query may not look.

    Neat-packed data is recognised by the stored attention mask, which numbers conversations from 1 (0: filling). The last token
    of a packed conversation is not taught the first one of the next.
    """

    fields = SFT_FIELDS

    def __init__(self, *args, reset_position_ids=False, reset_attention_mask=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.reset_position_ids, self.reset_attention_mask = reset_position_ids, reset_attention_mask
        if self._is_neat_packed() and not reset_attention_mask:
            logger.warning(
                "%s is neat-packed, but reset_attention_mask (--reset-attention-mask) is off: packed conversations "
                "see each other",
                self.files.path_prefix,
            )

    def _is_neat_packed(self):
        masks = self.files.files["attention_mask"]
        return any(masks[self.first + place].max(initial=0) > 1 for place in range(min(self.stored, _LOOKED_AT)))

    def _report_longer(self, count):
        if count and self._is_neat_packed():
            stored, length = int(self.files.lengths.max()), self.sequence_length
            raise InstructionDataError(
                f"{self.files.path_prefix} is packed to {stored} tokens, but seq_length is {length}: "
                f"preprocess with --seq-length {length}, or raise seq_length."
            )
        super()._report_longer(count)

    def _sample(self, index):
        stored = self.files[index]
        ids, labels, numbers = (stored[field] for field in SFT_FIELDS)
        if len(ids) > self.sequence_length:
            kept = kept_positions(labels, self.sequence_length)
            ids, labels, numbers = ids[kept], labels[kept], numbers[kept]
        return self._checked(ids, index), labels, numbers

    def _length_of(self, sample):
        return len(sample[0])

    def _filled(self, sample, length):
        ids, labels, numbers = sample
        labels = labels.copy()
        begins = np.flatnonzero(np.diff(numbers) != 0) + 1
        labels[begins] = IGNORE_INDEX
        tokens, following, loss_mask = self._filled_ids(ids, labels, length)
        conversation = np.zeros(length, np.int32)
        conversation[: len(numbers)] = numbers
        filled = {
            "tokens": tokens,
            "labels": following,
            "loss_mask": loss_mask,
            "position_ids": self._position_ids(conversation, begins),
        }
        if self.reset_attention_mask:
            allowed = np.tri(length, dtype=bool) & (conversation[:, None] == conversation[None, :])
            filled["attention_mask"] = ~allowed[None]
        return filled

    def _position_ids(self, conversation, begins):
        positions = np.arange(len(conversation), dtype=np.int32)
        if self.reset_position_ids:
            starts = np.zeros(len(conversation), np.int32)
            starts[begins] = begins
            positions -= np.maximum.accumulate(starts)
            positions[conversation == 0] = 0
        return positions


class ProcessRewardDataset(InstructionDataset):
    """Texts whose steps end with a placeholder. A sample has the entries of SFTDataset, but the label of a step stays at its
    placeholder, and `loss_mask` is 1 there alone.

    Args:
        reward_ids (sequence[int]): ids that a label may be; empty: any. Further arguments: see InstructionDataset.

    Raises:
        InstructionDataError: when a sample is read: another label, steps beyond the sequence length.
    """

    fields = SFT_FIELDS

    def __init__(self, *args, reward_ids=(), **kwargs):
        self.reward_ids = tuple(reward_ids)
        super().__init__(*args, **kwargs)

    def _report_longer(self, count):
        if count:
            raise InstructionDataError(
                f"{self.files.path_prefix}: {count} of {self.stored} samples are longer than seq_length "
                f"{self.sequence_length}, and the steps of a text are not cut: raise it (--seq-length) to "
                f"{int(self.files.lengths.max())}, or preprocess with --seq-length {self.sequence_length}."
            )

    def _sample(self, index):
        stored = self.files[index]
        ids, labels = stored["input_ids"], stored["labels"]
        learnt = labels[labels != IGNORE_INDEX]
        self._checked(learnt, index)
        others = [int(label) for label in learnt if self.reward_ids and int(label) not in self.reward_ids]
        if others:
            raise InstructionDataError(
                f"sample {index} of {self.files.path_prefix} has the label {others[0]}, none of the reward tokens' ids "
                f"{', '.join(map(str, self.reward_ids))}: name those of preprocessing (--reward-tokens)."
            )
        return self._checked(ids, index), labels

    def _length_of(self, sample):
        return len(sample[0])

    def _filled(self, sample, length):
        ids, labels = sample
        tokens, here = np.full(length, self.pad_token_id, np.int32), np.full(length, IGNORE_INDEX, np.int32)
        tokens[: len(ids)], here[: len(ids)] = ids, labels
        mask = here != IGNORE_INDEX
        return {
            "tokens": tokens,
            "labels": np.where(mask, here, 0).astype(np.int32),
            "loss_mask": mask.astype(np.float32),
            "position_ids": np.arange(length, dtype=np.int32),
        }


class PairwiseDataset(InstructionDataset):
    """A prompt with a better and a worse answer, for reward models and preference optimisation.

    A sample is a dict with `tokens`, `labels`, `loss_mask` as in SFTDataset, each with the prefix `chosen_` or `rejected_`, and
    one `position_ids`, all `[s]`, and the numbers of tokens `chosen_length`, `rejected_length`. A pair that is too long keeps
    one and the same part of the prompt, and both answers are cut to one length.
    """

    fields = PAIRWISE_FIELDS

    def _sample(self, index):
        stored = self.files[index]
        pair = [(stored[f"{kind}_input_ids"], stored[f"{kind}_labels"]) for kind in ("chosen", "rejected")]
        if max(len(ids) for ids, _ in pair) > self.sequence_length:
            pair = self._cut(pair)
        return [(self._checked(ids, index), labels) for ids, labels in pair]

    def _cut(self, pair):
        prompt = min(_prompt_length(labels) for _, labels in pair)
        answer = max(len(ids) for ids, _ in pair) - prompt
        source, target = balanced_lengths(prompt, answer, self.sequence_length)
        kept = np.concatenate([np.arange(source), np.arange(prompt, prompt + target)])
        return [(ids[kept[kept < len(ids)]], labels[kept[kept < len(ids)]]) for ids, labels in pair]

    def _length_of(self, sample):
        return max(len(ids) for ids, _ in sample)

    def _filled(self, sample, length):
        filled = {"position_ids": np.arange(length, dtype=np.int32)}
        for kind, (ids, labels) in zip(("chosen", "rejected"), sample):
            tokens, following, loss_mask = self._filled_ids(ids, labels, length)
            filled |= {f"{kind}_tokens": tokens, f"{kind}_labels": following, f"{kind}_loss_mask": loss_mask}
            filled[f"{kind}_length"] = np.int32(len(ids))
        return filled


def _prompt_length(labels):
    learnt = np.flatnonzero(labels != IGNORE_INDEX)
    return int(learnt[0]) if len(learnt) else len(labels)
