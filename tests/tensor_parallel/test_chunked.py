"""Loss and feed-forward block in chunks of tokens: the same training in every layout, and never a whole `[s, vocabulary]`."""

import functools

import numpy as np
import pytest

from mindspeed_ms.testing import small_trainings as job

CHUNKS = {"loss_chunk_size": 5, "mlp_chunk_size": 7}
TP2 = {"tensor_model_parallel_size": 2}
LAYOUTS = {
    "alone": ({}, 1),
    "tp2": (TP2, 1),
    "tp2sp": ({**TP2, "sequence_parallel": True}, 1),
    "z2": ({"zero_level": "z2"}, 2),
    "pp2": ({"pipeline_model_parallel_size": 2}, 1),
}
MODELS = {
    "tied": {**job.TIED, "label_smoothing": 0.1, "hidden_act": "gelu_erf"},
    "untied": job.UNTIED,
    "biased gate": {**job.UNTIED, "mlp_has_bias": True},
}


@functools.lru_cache(maxsize=4)
def _reference(world, model):
    return world(1)(job.train, MODELS[model])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_equals_the_whole(world, model, layout):
    parallel, data_parallel = LAYOUTS[layout]
    training = {"overlap_grad_reduce": True} if parallel.get("zero_level") else {}
    size = job.world_size(parallel, data_parallel)
    results = world(size)(job.train, {**MODELS[model], **CHUNKS}, parallel, training=training)
    job.assert_equal_trainings(results, _reference(world, model), model == "tied")


@pytest.mark.parametrize("dtypes", [{"compute_dtype": "bfloat16"}, {"compute_dtype": "float16"}], ids=str)
def test_half_precisions(world, dtypes):
    plain, chunked = (world(1)(job.train, {**job.UNTIED, **dtypes, **chunks})[0]["loss"] for chunks in ({}, CHUNKS))
    np.testing.assert_allclose(chunked, plain, rtol=1e-3)


def largest_arrays(fields):
    """Largest numbers of elements of arrays that one training step makes."""
    from unittest import mock

    sizes = []
    original = np.empty

    def empty(*args, **kwargs):
        array = original(*args, **kwargs)
        sizes.append(array.size)
        return array

    def train():
        job.train(fields, steps=1, data=job.batches(1, length=64, rows=8), dataset={"batch_size": 8})

    train()  # compiles the kernels, which cannot be done with another np.empty
    with mock.patch.object(np, "empty", empty):
        train()
    return max(sizes)


def test_no_array_is_as_large_as_all_logits(world):
    fields = {**job.UNTIED, "seq_length": 64, "vocab_size": 2048, "ffn_hidden_size": 1024}
    whole, chunked = (world(1)(largest_arrays, {**fields, **chunks})[0] for chunks in ({}, CHUNKS))
    line = 64 // 4  # a large array has one more, to begin where one begins
    assert whole >= 64 * 2048 and chunked == 32 * 2048 + line  # a weight


def test_loss_of_chunks_is_refused_in_float16():
    from mindspeed_ms.config import ConfigError

    fields = {**job.UNTIED, **CHUNKS, "fp16_lm_cross_entropy": True, "compute_dtype": "float16"}
    with pytest.raises(ConfigError, match="loss_chunk_size = 5: takes the loss in float32"):
        job.make_config(fields)
