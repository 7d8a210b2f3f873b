"""Masks, positions, attention and activations against numpy."""

import enum
import math

import numpy as np
import pytest

from tests.model import builders

HEADS, GROUPS, HEAD, LENGTH, BATCH = 4, 2, 8, 6, 3


def _tensor(array):
    from mindspore import Tensor

    return Tensor.from_numpy(np.ascontiguousarray(array))


def eos_masks():
    """Documents ended by id 0 and by another id, in shapes that differ from the declared ones."""
    from mindspeed_ms.legacy.model.eos_mask import EosMask

    tokens = np.array([[3, 0, 4, 5, 0, 0, 7], [1, 2, 3, 4, 5, 6, 7]], np.int32)
    results = [EosMask(1, 99, eod, reset)(_tensor(tokens)) for eod in (0, 7) for reset in (False, True)]
    with pytest.raises(ValueError, match="eod_token_id"):
        EosMask(1, 8, None, False)
    with pytest.raises(ValueError, match=r"\[b, s\]"):
        EosMask(1, 8, 0, False)(_tensor(tokens[0]))
    return results


def test_eos_mask(world):
    (plain, mask), (reset, _), (_, other), _ = world(1)(eos_masks)[0]
    assert plain.tolist() == [list(range(7))] * 2
    assert reset.tolist() == [[0, 1, 0, 1, 2, 0, 0], list(range(7))]
    documents = np.array([0, 0, 1, 1, 1, 2, 3])
    expected = ~((documents[:, None] == documents[None]) & np.tri(7, dtype=bool))
    np.testing.assert_array_equal(mask[0], expected)
    np.testing.assert_array_equal(mask[1], ~np.tri(7, dtype=bool))
    np.testing.assert_array_equal(other[0], ~np.tri(7, dtype=bool))


def rotary():
    """Angles, and tables for positions of each token."""
    from mindspeed_ms.legacy.model.rotary_pos_embedding import RotaryEmbedding, apply_rotary_pos_emb

    full = RotaryEmbedding(HEAD)(5, offset=2)
    part = RotaryEmbedding(HEAD, 0.5, True, 4.0, 100.0)(5)
    positions = np.array([[0, 1, 2, 0, 1, 2], [5, 4, 3, 2, 1, 0], [0, 0, 0, 0, 0, 0]], np.int32)
    embedding = RotaryEmbedding(HEAD, 0.5, max_position_embeddings=8)
    x = np.random.RandomState(0).randn(LENGTH, BATCH, HEADS, HEAD).astype(np.float32)
    rotated = apply_rotary_pos_emb(_tensor(x), embedding.table(LENGTH, _tensor(positions)))
    with pytest.raises(ValueError, match="position_ids"):
        embedding.table(LENGTH, _tensor(positions + 6))
    with pytest.raises(ValueError, match="even number"):
        RotaryEmbedding(HEAD, 0.4)
    return full, part, x, positions, rotated


def test_rotary_embedding(world):
    full, part, x, positions, rotated = world(1)(rotary)[0]
    frequencies = 10000.0 ** (-np.arange(0, HEAD, 2) / HEAD)
    angles = np.outer(np.arange(2, 7), frequencies)
    np.testing.assert_allclose(full[:, 0, 0], np.concatenate([angles, angles], 1), rtol=1e-6)
    np.testing.assert_allclose(
        part[:, 0, 0], np.repeat(np.outer(np.arange(5) / 4, 100.0 ** (-np.arange(0, 4, 2) / 4)), 2, 1), rtol=1e-6
    )
    angles = positions.T[:, :, None] * 10000.0 ** (-np.arange(0, 4, 2) / 4)
    cos, sin = np.cos(angles)[:, :, None], np.sin(angles)[:, :, None]
    first, second, rest = x[..., :2], x[..., 2:4], x[..., 4:]
    expected = np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)
    np.testing.assert_allclose(rotated, expected, atol=1e-6)


# rope_scaling, its frequencies for a head of 16 elements with base 500, its factor of cos and sin: those of transformers 5.24
_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
_ALL_SCALED = [0.25, 0.1149658, 0.05286856, 0.02431231, 0.01118034, 0.005141428, 0.002364354, 0.00108728]
SCALED = [
    ("linear", {"factor": 4.0}, _ALL_SCALED, 1.0),
    (
        "llama3",
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        [1.0, 0.4598633, 0.09761663, 0.01215616, 0.00559017, 0.002570714, 0.001182177, 0.0005436398],
        1.0,
    ),
    ("yarn", {**_YARN, "beta_fast": 8.0, "beta_slow": 1.0}, [1.0, 0.3448974, 0.1057371, *_ALL_SCALED[3:]], 1.1386294),
    (
        "yarn",
        {**_YARN, "beta_fast": 8.0, "beta_slow": 1.0, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.4},
        [1.0, 0.3710845, 0.1113971, *_ALL_SCALED[3:]],
        0.918732,
    ),
    (
        "yarn",
        {**_YARN, "beta_fast": 0.2, "beta_slow": 0.02, "attention_factor": 1.3},
        [1.0, 0.4598633, 0.2114742, 0.09724925, 0.04472136, 0.02056571, 0.00768415, 0.002718199],
        1.3,
    ),
    # both ends of the ramp are the first frequency
    ("yarn", {**_YARN, "beta_fast": 32.0, "beta_slow": 20.0}, [1.0, *_ALL_SCALED[1:]], 1.1386294),
]


def scaled_rotary():
    """cos and sin `[2, 16]` of each case; angles alone cannot express a factor."""
    from mindspeed_ms.config import RopeScalingConfig
    from mindspeed_ms.legacy.model.rotary_pos_embedding import RotaryEmbedding

    tables = []
    for kind, numbers, _, factor in SCALED:
        scaling = RopeScalingConfig(type=kind, **numbers)
        embedding = RotaryEmbedding(16, rotary_base=500.0, rope_scaling=scaling)
        if factor == 1.0:
            embedding(2)
        else:
            with pytest.raises(ValueError, match="angles cannot express the attention factor"):
                embedding(2)
        tables.append([part.asnumpy()[:, 0, 0] for part in embedding.table(2)[:2]])
    return tables


def test_scaled_frequencies(world):
    for (cos, sin), (kind, _, frequencies, factor) in zip(world(1)(scaled_rotary)[0], SCALED):
        angles = np.outer(np.arange(2), [*frequencies, *frequencies])
        np.testing.assert_allclose(cos, np.cos(angles) * factor, rtol=1e-6, err_msg=kind)
        np.testing.assert_allclose(sin, np.sin(angles) * factor, rtol=1e-6, err_msg=kind)


class ForeignMaskType(enum.Enum):
    """A user's own enum; only its names count."""

    padding = 10
    causal = 20
    no_mask = 30
    padding_causal = 40


CASES = {
    "causal": ("causal", None),
    "no_mask": ("no_mask", None),
    "padding_without_mask": ("padding", None),
    "two": ("causal", np.tri(LENGTH, k=1) == 0),
    "two_padding": ("padding", np.arange(LENGTH)[None] >= np.array([[4], [6], [2]])),
    "padding_causal": ("padding_causal", np.arange(LENGTH)[None] >= np.array([[4], [6], [2]])),
    "three": ("causal", np.random.RandomState(1).rand(BATCH, LENGTH, LENGTH) > 0.6),
    "four": ("causal", np.random.RandomState(2).rand(BATCH, 1, LENGTH, LENGTH) > 0.6),
    "four_of_one": ("no_mask", np.random.RandomState(3).rand(1, 1, LENGTH, LENGTH) > 0.6),
    "keys_only": ("no_mask", np.arange(LENGTH)[None, None, None] >= np.array([4, 6, 2])[:, None, None, None]),
}


def _attention_inputs():
    random = np.random.RandomState(5)
    return [random.randn(LENGTH, BATCH, count, HEAD).astype(np.float32) for count in (HEADS, GROUPS, GROUPS)]


def attention(flash, scaling, **fa_config):
    """Output of every mask case."""
    from mindspeed_ms.legacy.model.transformer import CoreAttention, FlashAttention

    fields = {**builders.GPT2, "use_flash_attention": flash, "apply_query_key_layer_scaling": scaling}
    config = builders.make_config(
        {**fields, "fa_config": {"next_tokens": LENGTH, **fa_config}} if fa_config or flash else fields
    )
    builders.start(config)
    inputs = [_tensor(array) for array in _attention_inputs()]
    outputs = {}
    for name, (kind, mask) in CASES.items():
        cell = (FlashAttention if flash else CoreAttention)(3, config, ForeignMaskType[kind])
        dtype = np.int32 if name == "three" else np.float32 if name == "four" else bool
        outputs[name] = cell(*inputs, None if mask is None else _tensor(mask.astype(dtype)))
    with pytest.raises(ValueError, match="does not fit batch 3"):
        cell(*inputs, _tensor(np.zeros((2, LENGTH, LENGTH), bool)))
    with pytest.raises(ValueError, match="AttnMaskType"):
        CoreAttention(3, config, "causally")
    return outputs


def _expected_attention(kind, mask, band=None):
    query, key, value = (array.astype(np.float64) for array in _attention_inputs())
    key, value = (np.repeat(array, HEADS // GROUPS, 2) for array in (key, value))
    scores = np.einsum("sbnd,tbnd->bnst", query, key) / math.sqrt(HEAD)
    blocked = np.zeros((BATCH, 1, LENGTH, LENGTH), bool)
    if mask is not None:
        shape = {(LENGTH, LENGTH): (1, 1, LENGTH, LENGTH), (BATCH, LENGTH): (BATCH, 1, 1, LENGTH)}.get(mask.shape)
        blocked = blocked | mask.reshape(shape or ((BATCH, 1, LENGTH, LENGTH) if mask.ndim == 3 else mask.shape))
    if kind == "padding_causal" or (kind == "causal" and mask is None):
        blocked = blocked | (np.tri(LENGTH) == 0)
    if band is not None:
        distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None]
        blocked = blocked | (distance > band[0]) | (-distance > band[1])
    scores = np.where(blocked, -np.inf, scores)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = np.nan_to_num(weights / weights.sum(-1, keepdims=True))
    return np.einsum("bnst,tbnd->sbnd", weights, value).reshape(LENGTH, BATCH, -1)


@pytest.mark.parametrize("flash, scaling", [(False, False), (False, True), (True, False)])
def test_attention_masks(world, flash, scaling):
    """Query-key layer scaling divides before and multiplies inside the softmax: no difference in float32."""
    outputs = world(1)(attention, flash, scaling)[0]
    for name, (kind, mask) in CASES.items():
        np.testing.assert_allclose(outputs[name], _expected_attention(kind, mask), atol=2e-6, err_msg=name)


def normed_attention():
    """Queries and keys `[s, b, heads, 16]` before norms, weights of both norms, and what the core attention gets."""
    from mindspeed_ms.legacy.model.attention import ParallelAttention
    from mindspeed_ms.legacy.model.enums import AttnMaskType
    from mindspeed_ms.legacy.model.rotary_pos_embedding import RotaryEmbedding

    config = builders.make_config({**builders.LLAMA, "qk_layernorm": True})
    builders.start(config)
    layer = ParallelAttention(config, 1, attn_mask_type=AttnMaskType.causal)
    random, mixed = np.random.RandomState(0), np.random.RandomState(1).randn(LENGTH, BATCH, 2, 4, 16).astype(np.float32)
    weights = random.randn(2, 16).astype(np.float32)
    for norm, weight in zip((layer.q_layernorm, layer.k_layernorm), weights):
        norm.weight.set_data(_tensor(weight))
    found = []

    def core(query, key, value, mask):
        found.extend(one.asnumpy() for one in (query, key, value))
        return query.reshape((LENGTH, BATCH, -1))

    del layer.qkv_proj, layer.core_attention
    layer.qkv_proj = lambda hidden: (_tensor(mixed.reshape(LENGTH, BATCH, -1)), None)
    layer.core_attention = core
    layer(_tensor(mixed[..., 0, :].reshape(LENGTH, BATCH, -1)), rotary_pos_emb=RotaryEmbedding(16)(LENGTH))
    return mixed, weights, found


def test_norms_of_queries_and_keys(world):
    """Each with its own weight, over a head, before the rotation; values stay."""
    from tests.ops import references

    mixed, weights, found = world(1)(normed_attention)[0]
    angles = np.outer(np.arange(LENGTH), 10000.0 ** (-np.arange(0, 16, 2) / 16))
    table = [function(np.concatenate([angles, angles], 1))[:, None, None] for function in (np.cos, np.sin)]
    parts = [mixed[..., :2, :].reshape(LENGTH, BATCH, 4, 16), mixed[..., 2, :], mixed[..., 3, :]]
    for part, weight, result in zip(parts, weights, found):
        expected = references.rotary(references.rms_norm(part.astype(np.float64), weight), *table)
        np.testing.assert_allclose(result, expected, atol=1e-5)
    np.testing.assert_array_equal(found[2], parts[2])


@pytest.mark.parametrize("flash", [False, True])
def test_attention_band(world, flash):
    """A band that the user wrote binds both forms."""
    outputs = world(1)(attention, flash, False, pre_tokens=2, next_tokens=0)[0]
    for name in ("causal", "three", "two"):
        kind, mask = CASES[name]
        np.testing.assert_allclose(outputs[name], _expected_attention(kind, mask, (2, 0)), atol=2e-6, err_msg=name)


def activations():
    """Every activation of the feed-forward block, through the block's own function."""
    from mindspeed_ms.legacy.model.mlp import activation_name, apply_activation

    x, bias = np.linspace(-4, 4, 24, dtype=np.float32).reshape(2, 12), np.linspace(-1, 1, 12, dtype=np.float32)
    outputs = {}
    for name in ("gelu", "fast_gelu", "silu", "relu", "squared_relu", "swiglu"):
        config = builders.make_config({**builders.GPT2, "hidden_act": name})
        outputs[name] = apply_activation(_tensor(x), _tensor(bias), activation_name(config))
    return x + bias, outputs


def test_activations(world):
    x, outputs = world(1)(activations)[0]
    sigmoid = lambda y: 1 / (1 + np.exp(-y))  # noqa: E731
    expected = {
        "gelu": 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "silu": x * sigmoid(x),
        "fast_gelu": x * sigmoid(1.702 * x),
        "relu": np.maximum(x, 0),
        "squared_relu": np.maximum(x, 0) ** 2,
        "swiglu": x[:, :6] * sigmoid(x[:, :6]) * x[:, 6:],
    }
    for name, value in expected.items():
        np.testing.assert_allclose(outputs[name], value, atol=1e-6, err_msg=name)


def cross_attention():
    """Shapes of a block that attends to another sequence, and what it refuses."""
    from mindspeed_ms.legacy.model import AttnType, ParallelAttention

    config = builders.make_config(builders.GPT2)
    builders.start(config)
    block = ParallelAttention(config, 1, AttnType.cross_attn, ForeignMaskType.no_mask)
    hidden, other = (_tensor(np.ones((length, 2, 64), np.float32)) for length in (5, 7))
    with pytest.raises(ValueError, match="encoder_output"):
        block(hidden, None)
    with pytest.raises(ValueError, match="inference_params"):
        block(hidden, None, other, inference_params={})
    grouped = builders.make_config({**builders.LLAMA})
    with pytest.raises(ValueError, match="group_query_attention"):
        ParallelAttention(grouped, 1, AttnType.cross_attn)
    return block(hidden, None, other)[0], sorted(name for name, _ in block.parameters_and_names())


def test_cross_attention(world):
    output, names = world(1)(cross_attention)[0]
    assert output.shape == (5, 2, 64)
    assert names == sorted(f"{part}.{end}" for part in ("q_proj", "kv_proj", "out_proj") for end in ("weight", "bias"))
