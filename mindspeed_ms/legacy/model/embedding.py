"""Word, position and token type embeddings. Source: Megatron's `Embedding` / `LanguageModelEmbedding`."""

from mindspore import Tensor, dtype

from mindspeed_ms import ops
from mindspeed_ms.core.device import to_dtype
from mindspeed_ms.core.tensor_parallel.cell import create_parameter
from mindspeed_ms.core.tensor_parallel.layers import VocabParallelEmbedding, uses_sequence_parallel
from mindspeed_ms.core.tensor_parallel.linear import cast
from mindspeed_ms.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from mindspeed_ms.layout.gpt_sizes import LEARNED_POSITIONS
from mindspeed_ms.layout.sharding import ParameterSharding
from mindspeed_ms.legacy.model.initializers import model_initializers
from mindspeed_ms.legacy.model.module import Module
from mindspeed_ms.legacy.model.transformer_layer import draw_keep_mask


class ReplicatedEmbedding(Module):
    """A table that every tensor-parallel rank holds whole. Input: ids of any shape; output: ids.shape + `[h]`."""

    names_are_global = False

    def __init__(self, num_embeddings, embedding_dim, init_method, config):
        super().__init__(config)
        sharding = ParameterSharding.replicated((num_embeddings, embedding_dim))
        draw_dtype = getattr(config, "embedding_init_dtype", None)
        self.weight = create_parameter(sharding, config.params_dtype, init_method, draw_dtype=draw_dtype)

    def construct(self, ids):
        """See the class."""
        return ops.embedding_lookup(self.weight, ids)


class Embedding(Module):
    """Sum of the embeddings, with dropout, ready for the first layer.

    Args:
        hidden_size (int): h.
        vocab_size (int): rows of the word table (padded vocabulary).
        max_sequence_length (int): rows of the learned position table.
        embedding_dropout_prob (float): dropout on the sum.
        config (TransformerConfig): position type, dtypes, sequence parallelism.
        num_tokentypes (int): rows of the token type table; 0 for none.

    Inputs: ids `[b, s]`, position ids `[b, s]` or None (counting from 0), tokentype_ids `[b, s]` or None. Output:
    `[s, b, h]` (`[s / tp, b, h]` under sequence parallelism) in the dtype of the residual stream.

    Raises:
        ValueError: ids, positions or token types outside their tables, tokentype_ids without a table or the reverse.
    """

    def __init__(self, hidden_size, vocab_size, max_sequence_length, embedding_dropout_prob, config, num_tokentypes=0):
        super().__init__(config)
        std = model_initializers(config).embedding
        self.embedding_dropout = embedding_dropout_prob
        self.num_tokentypes = num_tokentypes
        self.sequence_parallel = uses_sequence_parallel(config)
        self.hidden_dtype = to_dtype(getattr(config, "residual_connection_dtype", None) or config.compute_dtype)
        self.has_positions = config.position_embedding_type in LEARNED_POSITIONS
        # Alone, the sum over the ranks can already leave each its part of the sequence.
        self.reduce_scatter = self.sequence_parallel and not self.has_positions and num_tokentypes == 0
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size, hidden_size, init_method=std, reduce_scatter_embeddings=self.reduce_scatter, config=config
        )
        if self.has_positions:
            if getattr(config, "parallel_position_embedding", False):
                self.position_embeddings = VocabParallelEmbedding(
                    max_sequence_length, hidden_size, init_method=std, config=config
                )
                self.position_embeddings.weight.grouping = None  # rows are positions
            else:
                self.position_embeddings = ReplicatedEmbedding(max_sequence_length, hidden_size, std, config)
        if num_tokentypes > 0:
            self.tokentype_embeddings = ReplicatedEmbedding(num_tokentypes, hidden_size, std, config)
        self._positions = {}

    def construct(self, input_ids, position_ids=None, tokentype_ids=None):
        """See the class."""
        if (tokentype_ids is None) == (self.num_tokentypes > 0):
            raise ValueError(
                f"tokentype_ids must be given exactly when there are token types, but num_tokentypes is "
                f"{self.num_tokentypes} and tokentype_ids is {'missing' if tokentype_ids is None else 'given'}."
            )
        if self.reduce_scatter:
            embeddings = self.word_embeddings(input_ids)
        else:
            embeddings = self._sum(input_ids, position_ids, tokentype_ids)
            if self.sequence_parallel:
                embeddings = scatter_to_sequence_parallel_region(embeddings)
        embeddings = cast(embeddings, self.hidden_dtype)
        if self.training and self.embedding_dropout > 0.0:
            keep = draw_keep_mask(embeddings.shape, self.embedding_dropout, self.sequence_parallel)
            embeddings = ops.dropout(embeddings, self.embedding_dropout, keep)
        return embeddings

    def _sum(self, input_ids, position_ids, tokentype_ids):
        """`[s, b, h]`: the ids are turned, which costs less than turning what they stand for."""
        embeddings = self.word_embeddings(_turned(input_ids))
        if self.has_positions:
            embeddings = embeddings + self._position_part(input_ids.shape[1], position_ids)
        if tokentype_ids is not None:
            embeddings = embeddings + self.tokentype_embeddings(_turned(tokentype_ids))
        return embeddings

    def _position_part(self, length, position_ids):
        if position_ids is not None:
            return self.position_embeddings(_turned(position_ids))
        if length not in self._positions:
            self._positions[length] = Tensor(list(range(length)), dtype.int32).reshape((length, 1))
        return self.position_embeddings(self._positions[length])


def _turned(ids):
    """`[b, s]` to `[s, b]`."""
    return ids.swapaxes(0, 1).contiguous()
