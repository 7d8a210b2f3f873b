"""The formula of kept activations against a count of what operators save."""

import pytest

from mindspeed_ms.testing import small_trainings as job

FIELDS = {**job.UNTIED, "hidden_size": 128, "ffn_hidden_size": 256, "seq_length": 64}
TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CP2 = {"context_parallel_size": 2}
LAYOUTS = {
    "alone": ({}, {}),
    "tp2sp": (TP2SP, {}),
    "ring2": ({**CP2, "context_parallel_algo": "megatron_cp_algo"}, {}),
    "ulysses2": (CP2, {}),
    "ulysses2 tp2sp": ({**CP2, **TP2SP}, {}),
    "chunks": ({}, {"loss_chunk_size": 16, "mlp_chunk_size": 16}),
}


def counted_and_expected(parallel, fields):
    """Bytes on this rank by the count and by the formula."""
    import numpy as np
    from mindspore import Tensor

    from mindspeed_ms.layout.activation_memory import kept_bytes
    from mindspeed_ms.testing.kept_tensors import bytes_kept

    model, _, _ = job.build(job.make_config({**FIELDS, **fields}, parallel))
    tokens = Tensor(np.zeros((1, FIELDS["seq_length"]), np.int32))
    cell = model[0].module
    chunked = {"chunked_mlp": "mlp_chunk_size" in fields, "chunked_loss": "loss_chunk_size" in fields}
    return bytes_kept(cell, {"tokens": tokens, "labels": tokens}), kept_bytes(cell.described.model, 1, 4, **chunked)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_formula_is_the_count(world, layout):
    parallel, fields = LAYOUTS[layout]
    size = parallel.get("context_parallel_size", 1) * parallel.get("tensor_model_parallel_size", 1)
    for counted, expected in world(size)(counted_and_expected, parallel, fields):
        assert abs(counted / expected - 1) < 0.03, (counted, expected)
