"""Word, position and token type embeddings. Source: Megatron's `Embedding` / `LanguageModelEmbedding`."""

from mindspore import Tensor, dtype, mint

from mindspeed_ms import ops
from mindspeed_ms.config.model_description import describe_config
from mindspeed_ms.core.device import to_dtype
from mindspeed_ms.core.tensor_parallel.layers import VocabParallelEmbedding
from mindspeed_ms.core.tensor_parallel.linear import cast
from mindspeed_ms.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from mindspeed_ms.layout.describers.gpt import embedding_tables
from mindspeed_ms.legacy.model.module import Module
from mindspeed_ms.legacy.model.transformer_layer import draw_keep_mask


class ReplicatedEmbedding(Module):
    """EmbeddingTable (`layout`) that every tensor-parallel rank holds whole. Input: ids; output: ids.shape + `[h]`."""

    names_are_global = False

    def __init__(self, table, config):
        super().__init__(config)
        self.create_parameters(table.describe(self.settings.part()))

    def construct(self, ids):
        """See the class."""
        return ops.embedding_lookup(self.weight, ids)


class Embedding(Module):
    """Sum of word, position and token type embeddings, with dropout: the first layer's input.

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
        sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size, "max_position_embeddings": max_sequence_length}
        super().__init__(describe_config(config, **sizes, num_tokentypes=num_tokentypes))
        model = self.described.model
        self.embedding_dropout = embedding_dropout_prob
        self.num_tokentypes = num_tokentypes
        self.sequence_parallel = self.settings.sequence_parallel
        self.hidden_dtype = to_dtype(model.residual_connection_dtype)
        self.has_positions = model.has_position_table
        # Alone, the sum over the ranks can already leave each its part of the sequence.
        self.reduce_scatter = self.sequence_parallel and not self.has_positions and num_tokentypes == 0
        for name, table in embedding_tables(model).items():
            setattr(self, name, self._cut_table(table) if table.is_cut else ReplicatedEmbedding(table, self.described))
        self._positions = {}

    def _cut_table(self, table):
        return VocabParallelEmbedding(
            table.rows,
            table.width,
            init_method=table.initializer,
            reduce_scatter_embeddings=self.reduce_scatter,
            config=self.described,
            grouping=table.grouping,
        )

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
        """Sum of the embeddings `[s, b, h]`; transposing the ids costs less than transposing their vectors."""
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
    """Transposed ids: `[b, s]` to `[s, b]`."""
    return mint.transpose(ids, 0, 1).contiguous()
