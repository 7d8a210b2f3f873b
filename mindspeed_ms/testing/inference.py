"""TableRunner: a stand-in for ModelRunner in tests, without a model: its logits are a fixed function of the ids."""

import zlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TableScored:
    """As inference.model_runner.Scored: `log_probabilities` float64 [len - 1] and `is_greedy` bool [len - 1]."""

    log_probabilities: np.ndarray
    is_greedy: np.ndarray


class TableRunner:
    """Runner whose logits come from a function of all ids so far, through a cache of ids that is checked at each call.

    Args:
        vocab_size (int): number of tokens.
        max_sequence_length (int): context.
        slots (int): sequences at a time.
        logits (Optional[Callable]): list of ids -> logits [vocab_size]; default: pseudo-random, a hash of the ids.
        prefill_chunk (int): as of ModelRunner.

    Attributes:
        calls (list[list[Feed]]): what `forward` was called with.
    """

    def __init__(self, vocab_size=64, max_sequence_length=256, slots=4, logits=None, prefill_chunk=32):
        self.vocab_size, self.max_sequence_length, self.slots = vocab_size, max_sequence_length, slots
        self.prefill_chunk = prefill_chunk
        self._logits = logits or self._hashed
        self._held = [[] for _ in range(slots)]
        self.calls = []

    def forward(self, feeds):
        """Logits float32 [vocab_size] after the last id of each feed, or None where it wants none: list."""
        self.calls.append(list(feeds))
        assert len({feed.slot for feed in feeds}) == len(feeds), "a slot is fed twice"
        return [self._forward(feed) for feed in feeds]

    def can_start(self, slot, start):
        """Whether a feed of a slot may start at a position."""
        return start <= len(self._held[slot])

    def score(self, sequences, starts=None):
        """Log-probabilities of ids[1:] of each sequence, from `starts` on: list[TableScored]."""
        return [self._score(list(ids), start) for ids, start in zip(sequences, starts or [1] * len(sequences))]

    def logits(self, ids):
        """Logits float32 [vocab_size] of the token after `ids`."""
        return np.asarray(self._logits([int(number) for number in ids]), np.float32)

    def _forward(self, feed):
        assert 0 <= feed.slot < self.slots, f"slot {feed.slot} of {self.slots}"
        held, ids = self._held[feed.slot], [int(number) for number in feed.ids]
        assert 0 <= feed.start <= len(held), f"slot {feed.slot} holds {len(held)} tokens, fed from {feed.start}"
        assert ids and all(0 <= number < self.vocab_size for number in ids), f"ids {ids}"
        self._held[feed.slot] = held = held[: feed.start] + ids
        assert len(held) <= self.max_sequence_length, f"{len(held)} tokens"
        return self.logits(held) if feed.wants == "last" else None

    def _score(self, ids, start):
        start = max(start, 1)
        numbers, greedy = [], []
        for position in range(start, len(ids)):
            logits = self.logits(ids[:position]).astype(np.float64)
            numbers.append(logits[ids[position]] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
            greedy.append(int(logits.argmax()) == ids[position])
        return TableScored(np.array(numbers, np.float64), np.array(greedy, bool))

    def _hashed(self, ids):
        key = zlib.crc32(np.asarray(ids, np.int32).tobytes())
        return 2 * np.random.Generator(np.random.Philox(key)).standard_normal(self.vocab_size)
