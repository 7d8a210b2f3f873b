"""Sizes of a key-value cache: places of a layer, shapes on a rank, bytes in all. `model` is a ModelDescription."""

from math import prod

from mindspeed_ms.layout.ranks import world_unit_of

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def cache_places(model, layer, max_sequence_length, prefill_chunk):
    """Places per slot of a layer (int): the whole sequence, or what its sliding window can see from one chunk of new tokens."""
    window = model.window_of(layer)
    return max_sequence_length if window is None else min(max_sequence_length, window - 1 + prefill_chunk)


def cache_shapes(model, slots, places, tensor_parallel_size):
    """Shapes of a layer's tensors on a rank: keys and values, or what multi-latent attention keeps in place of both."""
    if model.is_latent:
        return [(slots, 1, places, model.latent_width)]
    return [(slots, model.query_groups // tensor_parallel_size, places, model.head_dim)] * 2


def cache_bytes(model, slots, max_sequence_length, prefill_chunk):
    """Bytes of the cache on all ranks of the model together (int)."""
    size, ranks = model.parallel.tensor_model_parallel_size, world_unit_of(model.parallel)
    layers = [
        sum(map(prod, cache_shapes(model, slots, cache_places(model, layer, max_sequence_length, prefill_chunk), size)))
        for layer in range(model.stages.num_layers)
    ]
    return sum(layers) * _BYTES[model.compute_dtype] * ranks // model.parallel.pipeline_model_parallel_size
