"""`inference_params` of a forward (Megatron's argument): what attention and head do when nothing is trained."""

import numpy as np
from mindspore import Tensor

from mindspeed_ms import ops


class CacheUse:
    """Use of a key-value cache by one forward of a batch: where its rows lie and which logits are wanted.

    Args:
        cache (KeyValueCache): keys and values of the rows' earlier tokens; the forward adds the new ones.
        slots, starts, lengths (ndarray): int32 [b]: slot of each row, position of its first new token, number of new tokens
            (0: an empty row).
        wanted (sequence[int]): rows whose last token's logits are wanted.

    Attributes:
        attended (int): calls of `attend`.
        keeps_keys (bool): True: attention gives what the cache holds of its keys, which may be compressed.
    """

    keeps_keys = True

    def __init__(self, cache, slots, starts, lengths, wanted):
        self.cache, self.slots, self.starts, self.lengths = cache, slots, starts, lengths
        self.wanted = wanted
        self.attended = 0

    def attend(self, core_attention, query, key, value, sinks=None, value_width=None):
        """Context [s, b, n * dv] of a layer, through the cache; arguments as `CoreAttention`, or without `value` compressed
        keys, whose first `value_width` elements are values.
        """
        self.attended += 1
        keys, values = self.cache.of_layer(core_attention.layer_number - 1)
        return ops.cached_attention(
            query,
            key,
            value,
            keys,
            values,
            self.slots,
            self.starts,
            self.lengths,
            scale=core_attention.scale,
            window=core_attention.window,
            sinks=sinks,
            value_width=value_width,
        )

    def read_out(self, hidden_states, head):
        """Logits [1, wanted rows, v / tp] of the wanted rows' last tokens; None if none is wanted.

        Args:
            hidden_states (Tensor): [s, b, h].
            head (Callable): hidden states [s, b, h] to logits [s, b, v / tp].
        """
        length, batch, width = hidden_states.shape
        if not len(self.wanted):
            return None
        if length > 1 or len(self.wanted) < batch:
            rows = np.array(self.wanted, np.int32)
            places = ((self.lengths[rows] - 1) * batch + rows).astype(np.int32).reshape(1, -1)
            hidden_states = ops.embedding_lookup(hidden_states.reshape(length * batch, width), Tensor.from_numpy(places))
        return head(hidden_states)


class WholeSequences:
    """Forward of whole sequences without a cache.

    Args:
        read (Callable): `(hidden states [s, b, h], head) -> result`, on the last stage.
    """

    keeps_keys = False

    def __init__(self, read):
        self.read_out = read

    def attend(self, core_attention, query, key, value, sinks=None):
        """Context [s, b, n * dv] of a layer; arguments as `CoreAttention`."""
        return core_attention(query, key, value, **({} if sinks is None else {"sinks": sinks}))
