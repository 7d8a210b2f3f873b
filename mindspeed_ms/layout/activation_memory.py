"""Bytes of activations that one micro-batch keeps for its backward on a rank. `model` is a ModelDescription."""

from math import lcm

from mindspeed_ms.layout.sequence import ulysses_degree

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def layer_elements(model, chunked_mlp=False):
    """Elements that a dense layer without recomputation keeps of each token of this rank: float.

    Inputs and outputs of the two norms, queries, keys and values, the attention's output (under Ulysses once more, as the
    exchanged heads have it), and in the feed-forward block the output of the first linear layer and of the activation.
    """
    parallel, width = model.parallel, model.head_dim
    tp = parallel.tensor_model_parallel_size
    degree = ulysses_degree(parallel)
    groups = lcm(model.query_groups // tp, degree) if degree > 1 else model.query_groups // tp
    attention = model.num_attention_heads // tp * width
    inner = 0 if chunked_mlp else model.ffn_hidden_size * (3 if model.is_gated else 2) / tp
    return 4 * model.hidden_size / _shares(parallel) + attention * (3 if degree > 1 else 2) + 2 * groups * width + inner


def head_elements(model, chunked_loss=False):
    """Elements that final norm and head keep of each token of this rank: (of the compute type, of float32)."""
    states = 2 * model.hidden_size / _shares(model.parallel)
    logits = 0 if chunked_loss else model.vocab_size / model.parallel.tensor_model_parallel_size
    return states, logits


def kept_bytes(model, batch, layers, length=None, with_head=True, chunked_mlp=False, chunked_loss=False):
    """Bytes that `layers` dense layers and, `with_head`, norm and head keep of one micro-batch on a rank.

    Everything falls as 1 / context parallel size. Left out is what does not grow with the hidden size: statistics of norms and
    softmaxes, masks, rotary tables, the loss of each token.

    Args:
        model (ModelDescription): the model, without recomputation of whole layers (that keeps hidden size elements a layer).
        batch (int): samples of the micro-batch.
        layers (int): layers of the stage.
        length (Optional[int]): of whole sequences; default seq_length.
        with_head (bool): norm and head are on the stage.
        chunked_mlp, chunked_loss (bool): mlp_chunk_size, loss_chunk_size are set.
    """
    tokens = batch * (length or model.seq_length) / model.parallel.context_parallel_size
    item = _BYTES[model.compute_dtype]
    states, logits = head_elements(model, chunked_loss) if with_head else (0, 0)
    return tokens * (item * (layers * layer_elements(model, chunked_mlp) + states) + 4 * logits)


def _shares(parallel):
    """Ranks over which hidden states between tensor-parallel regions are cut."""
    return parallel.tensor_model_parallel_size if parallel.cuts_sequence else 1
