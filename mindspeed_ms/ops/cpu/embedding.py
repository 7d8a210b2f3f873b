"""CPU form of the embedding lookup."""

import numpy as np

from mindspeed_ms.core.autograd import Function
from mindspeed_ms.ops import checks
from mindspeed_ms.ops.cpu import threads
from mindspeed_ms.ops.cpu.arrays import bits_of, empty, float32_of, integers_of, new_like, rows_of, tensor_of, tensor_of_bits
from mindspeed_ms.ops.cpu.kernels import movement


class _EmbeddingLookup(Function):
    @staticmethod
    def forward(ctx, weight, ids, ids_array, vocab_start):
        rows = bits_of(weight)
        output = new_like(rows, (ids_array.size, weight.shape[1]))
        threads.run(movement.gather_rows, ids_array.size, output.size, rows, ids_array, vocab_start, output)
        ctx.ids, ctx.vocab_start = ids_array, vocab_start
        ctx.weight_shape, ctx.dtype = weight.shape, weight.dtype
        return tensor_of_bits(output.reshape(*ids.shape, weight.shape[1]), weight.dtype)

    @staticmethod
    def backward(ctx, output_grad):
        weight_grad = empty(ctx.weight_shape)
        threads.run(
            movement.scatter_rows,
            weight_grad.shape[1],
            weight_grad.size,
            rows_of(float32_of(output_grad)),
            ctx.ids,
            ctx.vocab_start,
            weight_grad,
        )
        return tensor_of(weight_grad, ctx.dtype), None, None, None


def embedding_lookup(weight, ids, vocab_start=0, vocab_end=None, vocab_size=None):
    """See `ops.embedding_lookup`."""
    _, vocab_size = checks.embedding_range(weight, vocab_start, vocab_end, vocab_size)
    ids_array = integers_of(ids).reshape(-1)
    _check_ids(ids_array, vocab_size)
    return _EmbeddingLookup.apply(weight, ids, ids_array, int(vocab_start))


def _check_ids(ids, vocab_size):
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        position = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        raise ValueError(
            f"token id {int(ids[position])} (at flat position {position}) is outside the vocabulary of "
            f"{vocab_size} ids: the data was made with another tokenizer, or vocab_size is too small."
        )
