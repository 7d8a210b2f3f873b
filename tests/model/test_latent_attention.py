"""Multi-latent attention with a window and with other rotations than DeepSeek's, against numpy."""

import numpy as np
import pytest

from tests.model import builders

LENGTH, BATCH = 12, 2
PLAIN = {**builders.LATENT, "rope_scaling": None, "init_method_std": 0.3, "scaled_output_init": False}
CASES = {
    "pairs": {},
    "halves": {"rotary_interleaved": False},
    "part of the pairs": {"rotary_percent": 0.5},
    "part of the halves": {"rotary_percent": 0.5, "rotary_interleaved": False},
    "window": {"sliding_window": 4},
    "window in one layer": {"sliding_window": 4, "window_attn_skip_freq": [0, 1, 1, 1]},
    "positions closer together": {"rotary_seq_len_interpolation_factor": 4.0, "q_lora_rank": None},
}


def outputs(fields, layer_number):
    """(weights, input, output) of an attention layer."""
    from mindspore import Tensor

    from mindspeed_ms.legacy.model.latent_attention import MultiLatentAttention
    from mindspeed_ms.legacy.model.rotary_pos_embedding import RotaryEmbedding

    config = builders.make_config(fields)
    builders.start(config)
    cell = MultiLatentAttention(config, layer_number, attn_mask_type="causal")
    rotary = RotaryEmbedding(
        config.qk_pos_emb_head_dim,
        config.rotary_percent,
        config.rotary_interleaved,
        config.rotary_seq_len_interpolation_factor,
        config.rotary_base,
    )
    x = np.random.default_rng(3).normal(size=(LENGTH, BATCH, config.hidden_size)).astype(np.float32)
    output, _ = cell(Tensor(x), rotary_pos_emb=rotary.table(LENGTH))
    weights = {name: np.array(value.asnumpy()) for name, value in cell.parameters_and_names()}
    return weights, x, output.asnumpy()


def _rotated(x, fields):
    """x [s, b, n, d] rotated by its position."""
    size = int(x.shape[-1] * fields.get("rotary_percent", 1.0))
    angles = np.arange(LENGTH) / fields.get("rotary_seq_len_interpolation_factor", 1.0)
    angles = np.outer(angles, 10000.0 ** (-np.arange(0, size, 2) / size))[:, None, None]
    pairs = fields.get("rotary_interleaved", True)
    first, second = (slice(0, size, 2), slice(1, size, 2)) if pairs else (slice(0, size // 2), slice(size // 2, size))
    result = x.copy()
    result[..., first] = x[..., first] * np.cos(angles) - x[..., second] * np.sin(angles)
    result[..., second] = x[..., second] * np.cos(angles) + x[..., first] * np.sin(angles)
    return result


def _norm(x, weight):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight


def _expected(weights, x, fields, window):
    w = {name.removesuffix(".weight"): value.astype(np.float64) for name, value in weights.items()}
    heads, plain, values = fields["num_attention_heads"], fields["qk_head_dim"], fields["v_head_dim"]
    rank, shape = fields["kv_lora_rank"], (*x.shape[:2], fields["num_attention_heads"], -1)
    if fields["q_lora_rank"]:
        query = _norm(x @ w["q_down_proj"].T, w["q_layernorm"]) @ w["q_up_proj"].T
    else:
        query = x @ w["q_proj"].T
    query = query.reshape(shape)
    latent = x @ w["kv_down_proj"].T
    expanded = (_norm(latent[..., :rank], w["kv_layernorm"]) @ w["kv_up_proj"].T).reshape(shape)
    key_rotary = np.repeat(_rotated(latent[..., None, rank:], fields), heads, axis=2)
    query = np.concatenate([query[..., :plain], _rotated(query[..., plain:], fields)], -1)
    key, value = np.concatenate([expanded[..., :plain], key_rotary], -1), expanded[..., plain:]
    scores = np.einsum("sbnd,tbnd->bnst", query, key) / np.sqrt(query.shape[-1])
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    scores[..., (distance < 0) | (distance >= window)] = -np.inf
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    context = np.einsum("bnst,tbnd->sbnd", probs / probs.sum(-1, keepdims=True), value)
    return context.reshape(*x.shape[:2], heads * values) @ w["out_proj"].T


@pytest.mark.parametrize("case", CASES)
def test_attention(world, case):
    fields = {**PLAIN, **CASES[case]}
    for layer_number, window in ((1, 4 if case == "window" else LENGTH), (2, fields.get("sliding_window", LENGTH))):
        ((weights, x, output),) = world(1)(outputs, fields, layer_number)
        np.testing.assert_allclose(output, _expected(weights, x, fields, window), rtol=2e-4, atol=2e-5)
