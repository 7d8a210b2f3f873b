"""ModelRunner: logits of new tokens through the key-value cache, and log-probabilities of whole texts, in every layout."""

from itertools import chain

import numpy as np
from mindspore import Tensor

from mindspeed_ms import ops
from mindspeed_ms.core import parallel_state, storage
from mindspeed_ms.core.distributed import unwrap_model
from mindspeed_ms.core.pipeline_parallel import get_forward_backward_func
from mindspeed_ms.inference.checkpoint import DEFAULT_PREFILL_CHUNK
from mindspeed_ms.inference.feed import Feed
from mindspeed_ms.inference.inference_params import CacheUse, WholeSequences
from mindspeed_ms.inference.kv_cache import KeyValueCache
from mindspeed_ms.inference.micro_batches import batches_of_similar_length, micro_batches_of, rounds_of, rows_of
from mindspeed_ms.inference.scoring import Scored, TokenScorer
from mindspeed_ms.layout.key_value_cache import cache_places

__all__ = ["DEFAULT_PREFILL_CHUNK", "Feed", "ModelRunner"]

_SCORED_TOKENS = 2048
"""Tokens of a batch of short sequences that are scored together."""


class ModelRunner:
    """Forward of a model for inference. All ranks of the model call it together, with equal arguments.

    Args:
        chunks (list[Cell]): this rank's GPTModel chunks, filled.
        model (ModelDescription): of the model, without sequence parallelism.
        vocab_size (int): rows of the vocabulary that are tokens.
        max_sequence_length (int): longest sequence; of learned positions at most their number.
        slots (int): sequences in the cache at a time.
        prefill_chunk (int): tokens that enter in one forward, of one sequence or of several; longer feeds go in several.

    Attributes:
        cache (KeyValueCache): of this rank.
    """

    def __init__(self, chunks, model, vocab_size, max_sequence_length, slots, prefill_chunk=DEFAULT_PREFILL_CHUNK):
        self.vocab_size, self.max_sequence_length, self.slots = vocab_size, max_sequence_length, slots
        self._chunks, self._model = chunks, model
        self._batch_tokens, self._prefill_chunk = prefill_chunk, min(prefill_chunk, max_sequence_length)
        self.cache = KeyValueCache(model, slots, max_sequence_length, model.compute_dtype, self._prefill_chunk)
        self._scorer = TokenScorer(vocab_size)
        # of the whole model, not only of this rank's layers: all ranks must refuse the same feeds
        windows = [layer for layer in range(model.stages.num_layers) if model.window_of(layer) is not None]
        self._window = model.sliding_window if windows else 0
        self._ring = (
            cache_places(model, windows[0], max_sequence_length, self._prefill_chunk) if windows else max_sequence_length
        )
        self._filled = [0] * slots  # tokens that each slot holds
        self._reached = [0] * slots  # most tokens that it held since it was filled from 0
        for chunk in chunks:
            chunk.set_train(False)
            unwrap_model(chunk).language_model.reserve_positions(max_sequence_length)

    # ---- with the cache -----------------------------------------------------------------------------------------------

    def forward(self, feeds):
        """Put new tokens into the cache and get the logits after them.

        Args:
            feeds (list[Feed]): of different slots. Rows of one token go together; longer ones with others of their length.

        Returns:
            list[ndarray or None]: for each feed float32 [vocab_size], the same on every rank; None where `wants` is "none".

        Raises:
            ValueError: a slot that does not exist or is fed twice, no ids or ids outside the vocabulary, a sequence above
                max_sequence_length, a start beyond what the slot holds, or before what a sliding window still holds.
        """
        for feed in feeds:
            self._check(feed)
        if len({feed.slot for feed in feeds}) < len(feeds):
            raise ValueError(f"slots {sorted(feed.slot for feed in feeds)} are fed: expected each of them once.")
        results = [None] * len(feeds)
        sequences = [rows_of(number, feed.slot, feed.start, feed.ids, self._prefill_chunk) for number, feed in enumerate(feeds)]
        wants = [feed.wants == "last" for feed in feeds]
        for rows in rounds_of(sequences):
            for batch in batches_of_similar_length(rows, self._batch_tokens):
                for number, logits in self._next_logits(batch, wants):
                    results[number] = logits
        for feed in feeds:
            stop = feed.start + len(feed.ids)
            self._filled[feed.slot] = stop
            self._reached[feed.slot] = max(self._reached[feed.slot], stop) if feed.start else stop
        return results

    def _check(self, feed):
        if not 0 <= feed.slot < self.slots:
            raise ValueError(f"slot {feed.slot} is fed: expected one of 0 to {self.slots - 1}.")
        if feed.wants not in ("last", "none"):
            raise ValueError(f"a feed wants {feed.wants!r}: expected 'last' or 'none'.")
        self._check_ids(feed.ids)
        stop, filled = feed.start + len(feed.ids), self._filled[feed.slot]
        if not 0 <= feed.start <= filled:
            raise ValueError(f"tokens start at position {feed.start} of slot {feed.slot}, which holds {filled} tokens.")
        if stop > self.max_sequence_length:
            raise ValueError(
                f"{len(feed.ids)} tokens from position {feed.start} on end at {stop}: expected at most max_sequence_length "
                f"{self.max_sequence_length}."
            )
        if not self.can_start(feed.slot, feed.start):
            raise ValueError(
                f"tokens start at position {feed.start} of slot {feed.slot}, whose window of {self._window} tokens "
                f"reaches behind position {self._oldest(feed.slot)}, the first that is still held: start at 0."
            )

    def can_start(self, slot, start):
        """Whether new tokens of a slot may enter from a position on: it holds all that they see of those before."""
        return start == 0 or (start <= self._filled[slot] and self._oldest(slot) <= max(0, start - self._window + 1))

    def _oldest(self, slot):
        return max(0, self._reached[slot] - self._ring)

    def _check_ids(self, ids):
        if not len(ids):
            raise ValueError("a sequence has no ids: expected at least one token.")
        smallest, largest = min(ids), max(ids)
        if smallest < 0 or largest >= self.vocab_size:
            raise ValueError(
                f"token id {smallest if smallest < 0 else largest} is outside the vocabulary of {self.vocab_size} ids."
            )

    def _next_logits(self, batch, wants):
        """Pairs of a sequence's number and its next token's logits, of those that are wanted after this batch."""
        micro_batches = self._micro_batches(batch)
        wanted = [[index for index, row in enumerate(rows) if row.is_last and wants[row.number]] for rows in micro_batches]
        uses = [
            CacheUse(
                self.cache,
                np.array([row.slot for row in rows], np.int32),
                np.array([row.start for row in rows], np.int32),
                np.array([len(row.ids) for row in rows], np.int32),
                indices,
            )
            for rows, indices in zip(micro_batches, wanted)
        ]
        found = self._run(micro_batches, uses)
        if any(use.attended != len(self.cache.capacities) for use in uses):
            raise ValueError(
                f"{uses[0].attended} of {len(self.cache.capacities)} layers used the cache: the attention "
                f"'{self._model.attention_type}' must call inference_params.attend(...)."
            )
        numbers = [rows[index].number for rows, indices in zip(micro_batches, wanted) for index in indices]
        if not numbers:
            return []
        parts = [self._whole_vocabulary(logits) for logits in found if logits is not None]
        return zip(numbers, self._from_last_stage(parts, (len(numbers), self.vocab_size), np.float32))

    def _micro_batches(self, batch):
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        return micro_batches_of(batch, stages, len(self._chunks) > 1)

    def _whole_vocabulary(self, logits):
        """Logits [1, n, v / tp] to float32 [n, vocab_size]."""
        logits = ops.cast(logits, "float32").contiguous()
        group = parallel_state.get_tensor_model_parallel_group()
        parts = group.all_gather(logits).asnumpy() if group.size > 1 else logits.asnumpy()
        return np.concatenate(list(parts), axis=-1)[:, : self.vocab_size] if group.size > 1 else parts[0, :, : self.vocab_size]

    def _from_last_stage(self, parts, shape, dtype):
        """Array of the last pipeline stage, joined from its parts along the first axis, the same on every rank.

        Data-parallel ranks, which are there to share experts, computed the same but for rounding.
        """
        array = np.concatenate(parts) if parts else np.zeros(shape, dtype)
        stages, copies = parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_data_parallel_group()
        for group, source in ((stages, -1), (copies, 0)):
            if group.size > 1:
                values = storage.from_array(np.ascontiguousarray(array, dtype))
                array = group.broadcast(values, group.ranks[source]).asnumpy()
        return array

    # ---- whole sequences ----------------------------------------------------------------------------------------------

    def score(self, sequences, starts=None):
        """Log-probabilities of the tokens of whole sequences, without the cache.

        Args:
            sequences (list[list[int]]): ids of each, at least one.
            starts (Optional[list[int]]): position of the first token that is scored; None, 0 and 1: the second token, the
                first that has one before it.

        Returns:
            list[Scored]: for each sequence its tokens from `start` on; the same on every rank.

        Raises:
            ValueError: no ids or ids outside the vocabulary, a sequence above max_sequence_length, a start outside of it,
                another number of starts.
        """
        starts = [max(1, start) for start in ([0] * len(sequences) if starts is None else starts)]
        if len(starts) != len(sequences):
            raise ValueError(f"score got {len(sequences)} sequences and {len(starts)} starts: expected one for each.")
        for ids, start in zip(sequences, starts):
            self._check_ids(ids)
            if len(ids) > self.max_sequence_length or start > len(ids):
                raise ValueError(
                    f"a sequence of {len(ids)} tokens is to be scored from position {start} on: expected at most "
                    f"max_sequence_length {self.max_sequence_length} tokens, and a position in it."
                )
        results = [None] * len(sequences)
        rows = [rows_of(number, 0, 0, ids, len(ids))[0] for number, ids in enumerate(sequences)]
        for batch in batches_of_similar_length(rows, _SCORED_TOKENS):
            micro_batches = self._micro_batches(batch)
            uses, counts = zip(*(self._scoring(rows, starts) for rows in micro_batches))
            found = self._run(micro_batches, uses)
            shape = 2, sum(chain(*counts))
            values = self._from_last_stage([np.concatenate(found, axis=1)] if found else [], shape, np.float64)
            first = 0
            for row, count in zip(chain(*micro_batches), chain(*counts)):
                if row.number >= 0:
                    part = values[:, first : first + count]
                    results[row.number] = Scored(part[0].copy(), part[1] > 0)
                first += count
        return results

    def _scoring(self, rows, starts):
        """(`WholeSequences` that scores the tokens of a micro-batch, numbers of tokens of its rows)."""
        places, targets, counts = [], [], []
        for index, row in enumerate(rows):
            first = starts[row.number] if row.number >= 0 else 0
            counts.append(len(row.ids[first:]))
            places += [position * len(rows) + index for position in range(first - 1, len(row.ids) - 1)]
            targets += row.ids[first:]
        places, targets = np.array(places, np.int32), np.array(targets, np.int32)
        return WholeSequences(lambda hidden, head: self._scorer.scores(hidden, head, places, targets)), counts

    # ---- both ---------------------------------------------------------------------------------------------------------

    def _run(self, micro_batches, uses):
        """What `uses` read out of each micro-batch, on the last stage; an empty list on the others."""
        length = max(len(row.ids) for rows in micro_batches for row in rows)
        steps = [(*_inputs(rows, length), use) for rows, use in zip(micro_batches, uses)]
        return get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iter(steps),
            model=self._chunks,
            num_microbatches=len(steps),
            seq_length=length,
            micro_batch_size=len(micro_batches[0]),
            forward_only=True,
            collect_non_loss_data=True,
        )


def _inputs(rows, length):
    """Token and position ids, Tensors int32 [b, s], of rows; padding repeats position 0 and token 0."""
    tokens, positions = np.zeros((2, len(rows), length), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row.ids)] = row.ids
        positions[index, : len(row.ids)] = np.arange(row.start, row.start + len(row.ids))
    return Tensor.from_numpy(tokens), Tensor.from_numpy(positions)


def _forward_step(data_iterator, model):
    """Forward step of a schedule: what `inference_params` read out, and a loss function that hands it on."""
    tokens, positions, use = next(data_iterator)
    return model(tokens, positions, inference_params=use), _as_it_is


def _as_it_is(output, non_loss_data=True):
    return output
