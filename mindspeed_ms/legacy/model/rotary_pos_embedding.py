"""Rotary position embedding that honours position ids. Source: Megatron core, `rotary_pos_embedding.py`."""

from collections import namedtuple

import numpy as np
from mindspore import Tensor, mint, nn

from mindspeed_ms import ops
from mindspeed_ms.core import storage
from mindspeed_ms.legacy.model.rotary_scaling import scale_frequencies

RotaryTable = namedtuple("RotaryTable", "cos sin interleaved")
"""cos and sin `[s, 1 or b, 1, rot]` in float32, and whether neighbouring elements form the rotated pairs."""


class RotaryEmbedding(nn.Cell):
    """Rotary position embedding: angles by which queries and keys are rotated.

    Args:
        kv_channels (int): size of a head.
        rotary_percent (float): share of the head that is rotated; the rest passes through.
        rotary_interleaved (bool): pairs are elements (0, 1), (2, 3), ... instead of the two halves.
        seq_len_interpolation_factor (Optional[float]): positions are divided by it.
        rotary_base (float): base of the frequencies.
        max_position_embeddings (Optional[int]): bound of explicit position ids; grows with the sequence.
        rope_scaling (Optional[RopeScalingConfig]): scaling of the frequencies, see `rotary_scaling`.

    Inputs: `max_seq_len`, `offset` 0. Output: angles, float32 `[max_seq_len, 1, 1, rot]`.

    Raises:
        ValueError: a rotated share that is no even number of elements; in a call, yarn's attention factor, which angles
            cannot express (`table` can).
    """

    def __init__(
        self,
        kv_channels,
        rotary_percent=1.0,
        rotary_interleaved=False,
        seq_len_interpolation_factor=None,
        rotary_base=10000,
        max_position_embeddings=None,
        rope_scaling=None,
    ):
        super().__init__()
        dimension = kv_channels if rotary_percent >= 1.0 else int(kv_channels * rotary_percent)
        if dimension < 2 or dimension % 2:
            raise ValueError(
                f"rotary_percent {rotary_percent} of {kv_channels} head elements is {dimension}: an even number of at "
                "least 2 is needed."
            )
        self.dimension = dimension
        self.rotary_interleaved = rotary_interleaved
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.max_position_embeddings = max_position_embeddings or 0
        exponents = np.arange(0, dimension, 2, dtype=np.float32) / np.float32(dimension)
        self._inverse_frequencies = np.float32(1.0) / np.power(np.float32(rotary_base), exponents, dtype=np.float32)
        self.attention_factor = 1.0
        if rope_scaling is not None:
            self._inverse_frequencies, self.attention_factor = scale_frequencies(
                self._inverse_frequencies, rope_scaling, rotary_base
            )
        self._tables = {}

    def _angles(self, length, offset=0):
        """Angles, float32 `[length, rot]`, with float32 products as in Megatron."""
        positions = np.arange(length, dtype=np.float32) + np.float32(offset)
        if self.seq_len_interpolation_factor is not None:
            positions = positions * np.float32(1.0 / self.seq_len_interpolation_factor)
        half = np.outer(positions, self._inverse_frequencies).astype(np.float32)
        if self.rotary_interleaved:
            return np.repeat(half, 2, axis=1)
        return np.concatenate((half, half), axis=1)

    def construct(self, max_seq_len, offset=0):
        """See the class."""
        if self.attention_factor != 1.0:
            raise ValueError(f"angles cannot express the attention factor {self.attention_factor} of yarn: use table().")
        return Tensor.from_numpy(self._angles(max_seq_len, offset).reshape(max_seq_len, 1, 1, self.dimension))

    def reserve(self, length):
        """Allow explicit position ids below `length`."""
        self.max_position_embeddings = max(self.max_position_embeddings, length)

    def table(self, length, position_ids=None):
        """`RotaryTable` of `length` tokens.

        Args:
            length (int): s.
            position_ids (Optional[Tensor]): `[b, s]` position of each token; None counts from 0.

        Raises:
            ValueError: a position outside [0, max(max_position_embeddings, s)).
        """
        if position_ids is None:
            return RotaryTable(*self._cached(length), self.rotary_interleaved)
        bound = max(self.max_position_embeddings, length)
        ids = mint.transpose(position_ids, 0, 1).contiguous().unsqueeze(-1)
        try:
            cos, sin = (ops.embedding_lookup(part.reshape(bound, self.dimension), ids) for part in self._cached(bound))
        except ValueError as error:
            raise ValueError(
                f"position_ids must lie in [0, {bound}), the larger of max_position_embeddings and the sequence length: {error}"
            ) from error
        return RotaryTable(cos, sin, self.rotary_interleaved)

    def _cached(self, length):
        """Cached cos and sin, Tensors `[length, 1, 1, rot]`."""
        if length not in self._tables:
            angles = self._angles(length, 0).reshape(length, 1, 1, self.dimension)
            factor = np.float32(self.attention_factor)
            self._tables[length] = tuple(storage.from_array(function(angles) * factor) for function in (np.cos, np.sin))
        return self._tables[length]


def to_rotary_tables(rotary_pos_emb, interleaved=False):
    """Convert a caller's rotary embedding (None, a table, angles, or a pair) to `RotaryTable`s of queries and keys."""
    if rotary_pos_emb is None or isinstance(rotary_pos_emb, RotaryTable):
        return rotary_pos_emb, rotary_pos_emb
    if isinstance(rotary_pos_emb, (tuple, list)):
        query, key = rotary_pos_emb
        return to_rotary_tables(query, interleaved)[0], to_rotary_tables(key, interleaved)[0]
    angles = rotary_pos_emb.float()
    table = RotaryTable(mint.cos(angles), mint.sin(angles), interleaved)
    return table, table


def rotate(query, key, rotary_pos_emb, interleaved, fused):
    """(query, key), rotated by a caller's rotary embedding, see `to_rotary_tables` and `apply_rotary_pos_emb`."""
    query_table, key_table = to_rotary_tables(rotary_pos_emb, interleaved)
    return apply_rotary_pos_emb(query, query_table, fused), apply_rotary_pos_emb(key, key_table, fused)


def apply_rotary_pos_emb(t, table, fused=True):
    """Rotate the heads of `t` `[s, b, n, d]`; a table of None changes nothing; `fused` as in `ops.apply_rotary`."""
    return t if table is None else ops.apply_rotary(t, table.cos, table.sin, table.interleaved, fused)
