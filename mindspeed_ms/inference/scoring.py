"""Log-probabilities of given tokens from logits that are cut over the vocabulary; no rank gathers them."""

from dataclasses import dataclass

import numpy as np
from mindspore import Tensor

from mindspeed_ms import ops
from mindspeed_ms.core import parallel_state, storage

_TOKENS_AT_A_TIME = 256


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of a sequence's tokens, each given those before it.

    Attributes:
        log_probabilities (ndarray): float64, natural logarithms, of ids[1:] (or from `start` on).
        is_greedy (ndarray): bool: the token is the most probable one.
    """

    log_probabilities: np.ndarray
    is_greedy: np.ndarray


class TokenScorer:
    """Scores of tokens by the hidden states before them, on the tensor-parallel ranks of the last stage.

    Args:
        vocab_size (int): rows of the vocabulary that are tokens; padding rows take no part in the softmax.
    """

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def scores(self, hidden_states, head, places, targets):
        """Log-probability and whether it is the largest, float64 [2, n], the same on every tensor-parallel rank.

        Args:
            hidden_states (Tensor): [s, b, h].
            head (Callable): hidden states [s, b, h] to logits [s, b, v / tp].
            places, targets (ndarray): int32 [n]: row of hidden_states [s * b, h] before each token, and the token.
        """
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        parts = []
        for first in range(0, len(places), _TOKENS_AT_A_TIME):
            part = slice(first, first + _TOKENS_AT_A_TIME)
            rows = ops.embedding_lookup(flat, Tensor.from_numpy(np.ascontiguousarray(places[part]).reshape(1, -1)))
            logits = ops.cast(head(rows), "float32").asnumpy()[0]
            parts.append(self._local_statistics(logits, targets[part]))
        local = np.concatenate(parts, axis=1) if parts else np.zeros((4, 0))
        group = parallel_state.get_tensor_model_parallel_group()
        if group.size > 1:
            local = group.all_gather(storage.from_array(local)).asnumpy()
        return _joined(local.reshape(group.size, 4, -1), targets)

    def _local_statistics(self, logits, targets):
        """Of this rank's rows of the vocabulary: maximum, its id, sum of exponentials, target's logit; float64 [4, n]."""
        first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[1]
        logits = logits[:, : max(0, self.vocab_size - first)]
        count, rows = len(targets), logits.shape[1]
        result = np.array([[-np.inf], [np.inf], [0], [-np.inf]]).repeat(count, axis=1)
        if rows:
            lines, local = np.arange(count), targets - first
            best = logits.argmax(axis=1)
            largest = logits[lines, best]
            result[0], result[1] = largest, best + first
            result[2] = np.exp(logits - largest[:, None]).sum(axis=1, dtype=np.float64)
            here = (local >= 0) & (local < rows)
            result[3, here] = logits[lines[here], local[here]]
        return result


def _joined(statistics, targets):
    """Statistics [tp, 4, n] of all ranks to log-probability and whether the token is the most probable, [2, n]."""
    maxima, best, sums, logits = statistics.transpose(1, 0, 2)
    largest = maxima.max(axis=0)
    total = (sums * np.exp(maxima - largest)).sum(axis=0)
    first_best = np.where(maxima == largest, best, np.inf).min(axis=0)
    return np.stack((logits.max(axis=0) - largest - np.log(total), first_best == targets))
