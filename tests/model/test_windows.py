"""Attention cores with a sliding window against numpy: values and gradients, grouped queries, masks of documents."""

import numpy as np
import pytest

from tests.model import builders

LENGTH, HEADS, GROUPS, SIZE = 150, 4, 2, 16
WINDOWS = (2, 3, 64, 100, 149, 999)  # in a window of 1 queries have no gradient


def hidden(window, with_documents):
    """True where a query may not look: later tokens, tokens before the window, tokens of other documents `[b, 1, s, s]`."""
    from tests.ops import references

    causal = references.band(LENGTH, LENGTH, 1 - window, 0)
    documents = np.stack([np.arange(LENGTH) >= 40, np.arange(LENGTH) // 37]).astype(int)
    other = documents[:, None, :, None] != documents[:, None, None, :]
    return causal | other if with_documents else causal


def compare(core_name, window, with_documents):
    """The core of a config with `window`, and the layer beside it, which has none."""
    from mindspore import Tensor

    from mindspeed_ms.legacy.model import core_attention
    from mindspeed_ms.legacy.model.enums import AttnMaskType
    from tests.ops import references
    from tests.ops.harness import check

    sizes = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "hidden_size": HEADS * SIZE, "seq_length": LENGTH}
    fields = {**builders.LLAMA, **sizes, "sliding_window": window, "window_attn_skip_freq": [0, 1, 1, 1]}
    config = builders.make_config(fields)
    builders.start(config)
    random = np.random.default_rng(window)
    arrays = [random.normal(size=(LENGTH, 2, count, SIZE)) for count in (HEADS, GROUPS, GROUPS)]
    # what a data loader gives: the window is the model's
    mask = Tensor(hidden(LENGTH, True)) if with_documents else None
    scale = SIZE**-0.5
    for layer_number, width in ((1, LENGTH), (2, window)):
        core = getattr(core_attention, core_name)(layer_number, config, AttnMaskType.causal)
        blocked = hidden(width, with_documents)
        check(
            lambda q, k, v, core=core: core(q, k, v, mask),
            lambda q, k, v, blocked=blocked: references.attention(q, k, v, blocked, scale),
            arrays,
            "float32",
            2.0,
            lambda q, k, v, g, blocked=blocked: references.attention_gradients(q, k, v, blocked, scale, g),
        )


@pytest.mark.parametrize("with_documents", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("core", ["CoreAttention", "FlashAttention"])
def test_window(world, core, with_documents):
    for window in WINDOWS:
        world(1)(compare, core, window, with_documents)


def looks_ahead():
    """A window without causality hides only what lies before it, in both cores."""
    from mindspeed_ms.legacy.model import core_attention
    from mindspeed_ms.legacy.model.enums import AttnMaskType
    from tests.ops import references
    from tests.ops.harness import check

    config = builders.make_config({**builders.LLAMA, "sliding_window": 5})
    builders.start(config)
    arrays = [np.random.default_rng(seed).normal(size=(32, 2, 4, SIZE)) for seed in range(3)]
    blocked, scale = references.band(32, 32, -4, 99), SIZE**-0.5
    for kind in (core_attention.CoreAttention, core_attention.FlashAttention):
        core = kind(1, config, AttnMaskType.no_mask)
        check(
            core,
            lambda q, k, v: references.attention(q, k, v, blocked, scale),
            arrays,
            "float32",
            2.0,
            lambda q, k, v, g: references.attention_gradients(q, k, v, blocked, scale, g),
        )


def test_window_without_causality(world):
    world(1)(looks_ahead)


def refused():
    """A window beside a band of `fa_config`."""
    from mindspeed_ms.legacy.model import core_attention

    config = builders.make_config({**builders.LLAMA, "sliding_window": 5, "fa_config": {"sparse_mode": 4}})
    builders.start(config)
    for kind in (core_attention.CoreAttention, core_attention.FlashAttention):
        with pytest.raises(ValueError, match="sliding_window cannot be combined with pre_tokens"):
            kind(1, config)


def test_window_beside_another_band_is_refused(world):
    world(1)(refused)
