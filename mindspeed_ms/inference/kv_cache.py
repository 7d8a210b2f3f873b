"""Key-value cache: keys and values of earlier tokens, of this rank's layers and heads, for several sequences."""

import math

from mindspeed_ms.core import parallel_state, storage
from mindspeed_ms.core.device import dtype_size, to_dtype
from mindspeed_ms.layout.key_value_cache import cache_places, cache_shapes


def layers_here(stages):
    """Global numbers (from 0) of the layers on this rank's pipeline stage, over all its chunks: list[int]."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return [layer for chunk in range(stages.vpp) for layer in stages.layers(stage, chunk)]


class KeyValueCache:
    """Keys and values of `slots` sequences, allocated once; nothing in it grows.

    Of multi-latent attention it holds the compressed keys and values and the part of the keys with positions that all heads
    share, the same on every tensor-parallel rank.

    Args:
        model (ModelDescription): layers, windows, groups, head size, or ranks of multi-latent attention.
        slots (int): sequences at a time.
        max_sequence_length (int): tokens of a sequence.
        dtype: of keys and values.
        prefill_chunk (int): largest number of tokens of a sequence in one call, which a window's ring must hold beside it.

    Attributes:
        bytes (int): on this rank: 2 * groups / tp * head_dim * slots * itemsize * places, summed over its layers, where a
            layer has `cache_places` places. Multi-latent attention: (kv_lora_rank + qk_pos_emb_head_dim) * slots * itemsize
            * places.
    """

    def __init__(self, model, slots, max_sequence_length, dtype, prefill_chunk):
        self.slots, self.max_sequence_length = slots, max_sequence_length
        size = parallel_state.get_tensor_model_parallel_world_size()
        self._layers, self.capacities, self.bytes = {}, {}, 0
        for layer in layers_here(model.stages):
            capacity = cache_places(model, layer, max_sequence_length, prefill_chunk)
            shapes = cache_shapes(model, slots, capacity, size)
            tensors = [storage.zeros(shape, dtype) for shape in shapes]
            self._layers[layer] = tensors[0], tensors[1] if len(tensors) > 1 else None
            self.capacities[layer] = capacity
            self.bytes += sum(map(math.prod, shapes)) * dtype_size(to_dtype(dtype))

    def of_layer(self, layer):
        """(keys, values) of a global layer (from 0): Tensors [slots, groups / tp, capacity, head_dim], written in place; of
        multi-latent attention ([slots, 1, capacity, width], None)."""
        return self._layers[layer]
