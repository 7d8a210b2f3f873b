"""Tiny models of several families and the runner of each; runs in ranks of a forked world."""

import numpy as np

from mindspeed_ms.testing import small_trainings as job
from tests.model.builders import GPT2, LATENT, LLAMA, SINKS

SHARP = {"init_method_std": 0.15, "bias_init": "normal", "vocab_size": 128, "seq_length": 64, "max_position_embeddings": 64}
TOKENS = 120
"""Rows of the vocabulary that are tokens; the rest is padding."""
FAMILIES = {
    "gpt2": {**GPT2, **SHARP},
    "llama": {**LLAMA, **SHARP},
    "qwen2": {**LLAMA, **SHARP, "qkv_has_bias": True, "untie_embeddings_and_output_weights": False},
    "qwen3": {**LLAMA, **SHARP, "qk_layernorm": True, "kv_channels": 32},
    "mistral": {**LLAMA, **SHARP, "sliding_window": 6},
    "latent": {**LATENT, **SHARP},
    "latent_window": {**LATENT, **SHARP, "q_lora_rank": None, "sliding_window": 6, "qkv_has_bias": True},
    "sinks": {**SINKS, **SHARP},
    "mixed": {**LLAMA, **SHARP, "sliding_window": 6, "window_attn_skip_freq": [1, 0, 1, 0]},
}
HALF = {"params_dtype": "bfloat16", "compute_dtype": "bfloat16"}
SEQUENCES = [np.random.default_rng(seed).integers(0, TOKENS, 21).tolist() for seed in range(3)]
CUTS = ([1] * 21, [8, *[1] * 13], [13, 3, 1, 4])
"""How the tokens of each sequence enter the cache."""
CHUNK = 5


def chunks_of(fields, parallel=None):
    """(model chunks, AllConfig) of fields of the model and of its parallel layout."""
    from mindspeed_ms.inference.loading import build_chunks
    from mindspeed_ms.training.utils import set_parallel_context, set_seed

    config = job.make_config(fields, parallel or {})
    set_parallel_context(config.parallel_config)
    set_seed(1)
    return build_chunks(config), config


def runner_of(fields, parallel=None, **arguments):
    """ModelRunner of `chunks_of`, with a ring that turns."""
    from mindspeed_ms.config.model_description import describe_model
    from mindspeed_ms.inference.model_runner import ModelRunner

    chunks, config = chunks_of(fields, parallel)
    arguments = {"max_sequence_length": 32, "slots": 4, "prefill_chunk": CHUNK, **arguments}
    return ModelRunner(chunks, describe_model(config), TOKENS, **arguments)


def in_turn(fields, function, *arguments):
    """{family: function(its fields, *arguments)}, each with a grid of its own."""
    from mindspeed_ms.core import parallel_state

    results = {}
    for name, family in fields.items():
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        results[name] = function(family, *arguments)
    return results


def uncached(fields):
    """Logits float32 [sequences, s, TOKENS] of whole sequences, on one rank."""
    from mindspore import Tensor

    from mindspeed_ms import ops
    from mindspeed_ms.core import autograd

    (model,), _ = chunks_of(fields)
    model.set_train(False)
    with autograd.no_grad():
        logits = model(Tensor(np.array(SEQUENCES, np.int32)))
        return ops.cast(logits, "float32").asnumpy()[..., :TOKENS].copy()


def cached(fields, parallel):
    """Logits after each piece of CUTS, all sequences together: {(sequence, position): float32 [TOKENS]}."""
    from mindspeed_ms.inference.model_runner import Feed

    runner, slots = runner_of(fields, parallel), (2, 0, 3)
    found, entered = {}, [0] * len(SEQUENCES)
    for step in range(max(map(len, CUTS))):
        feeds = []
        for number, (ids, cuts) in enumerate(zip(SEQUENCES, CUTS)):
            if step < len(cuts):
                piece = ids[entered[number] : entered[number] + cuts[step]]
                feeds.append((number, Feed(slots[number], entered[number], piece)))
        for (number, feed), logits in zip(feeds, runner.forward([feed for _, feed in feeds])):
            entered[number] += len(feed.ids)
            found[number, entered[number] - 1] = logits.copy()
    return found
