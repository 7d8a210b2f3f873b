"""Matrix products and embedding lookup."""

import mindspore as ms
from mindspore import mint

from mindspeed_ms.core import autograd, storage


def linear(x, weight, bias=None):
    """See `ops.linear`."""
    return mint.nn.functional.linear(x, weight, bias)


@autograd.no_grad()
def linear_forward(x, weight, bias=None):
    """See `ops.linear_forward`."""
    return mint.nn.functional.linear(x, weight, bias)


@autograd.no_grad()
def linear_input_grad(output_grad, weight):
    """See `ops.linear_input_grad`."""
    return mint.matmul(output_grad, weight)


@autograd.no_grad()
def linear_weight_grad(output_grad, x, accumulate_into=None, overwrite=False):
    """See `ops.linear_weight_grad`."""
    rows = output_grad.reshape(-1, output_grad.shape[-1])
    result = mint.matmul(mint.transpose(rows, 0, 1), x.reshape(-1, x.shape[-1]))
    if accumulate_into is None:
        return result
    if overwrite:
        storage.write(accumulate_into, result)
    else:
        storage.add_into(accumulate_into, result)
    return accumulate_into


@autograd.no_grad()
def bias_grad(output_grad):
    """See `ops.bias_grad`; the sum is float32, the widest that the device adds quickly."""
    rows = output_grad.reshape(-1, output_grad.shape[-1])
    return mint.sum(rows, dim=0, dtype=ms.float32).astype(output_grad.dtype)


def matmul(a, b, transpose_a=False, transpose_b=False):
    """See `ops.matmul`; transposes are views, which the operator reads in place."""
    a = mint.transpose(a, -2, -1) if transpose_a else a
    b = mint.transpose(b, -2, -1) if transpose_b else b
    return mint.matmul(a, b)


def embedding_lookup(weight, ids, vocab_start=0, vocab_end=None, vocab_size=None):
    """See `ops.embedding_lookup`."""
    vocab_end = vocab_start + weight.shape[0] if vocab_end is None else vocab_end
    if vocab_end - vocab_start != weight.shape[0]:
        raise ValueError(
            f"embedding_lookup got a weight of {weight.shape[0]} rows for ids {vocab_start} to {vocab_end}: "
            f"expected {vocab_end - vocab_start} rows."
        )
    vocab_size = vocab_end if vocab_size is None else vocab_size
    _check_ids(ids, vocab_size)
    if vocab_start == 0 and vocab_end == vocab_size:
        return mint.nn.functional.embedding(ids, weight)
    outside = mint.logical_or(ids < vocab_start, ids >= vocab_end)
    rows = mint.nn.functional.embedding(mint.where(outside, mint.zeros_like(ids), ids - vocab_start), weight)
    return mint.where(mint.unsqueeze(outside, -1), mint.zeros_like(rows), rows)


@autograd.no_grad()
def _check_ids(ids, vocab_size):
    # the operator's behaviour is undefined for such ids, so the one wait for the device is worth it
    smallest, largest = int(mint.min(ids).asnumpy()), int(mint.max(ids).asnumpy())
    if smallest < 0 or largest >= vocab_size:
        raise ValueError(
            f"token id {smallest if smallest < 0 else largest} is outside the vocabulary of {vocab_size} ids: the "
            "data was made with another tokenizer, or vocab_size is too small."
        )
