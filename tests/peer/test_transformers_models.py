"""Features of GPTModel against models of transformers that have them: logits within 1e-4 (needs the `[peer]` extra)."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_ms.testing.parity.recordings import rule_weight
from tests.model import builders

pytestmark = pytest.mark.peer

HIDDEN, HEADS, GROUPS, LAYERS, WIDTH, ROWS = 48, 4, 2, 3, 80, 96
THEIRS = {
    "model_type": "llama",
    "vocab_size": ROWS,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
OURS = {
    **builders.LLAMA,
    "vocab_size": ROWS,
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_query_groups": GROUPS,
    "ffn_hidden_size": WIDTH,
    "seq_length": 40,
    "norm_epsilon": 1e-5,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
QKV_BIAS = {"qkv_has_bias": True}
BIASES = {**QKV_BIAS, "out_proj_has_bias": True, "mlp_has_bias": True}


def _scaled(kind, **numbers):
    """A case of scaled frequencies: both sides have the same names."""
    theirs = {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **numbers}}
    return theirs, {"rope_scaling": {"type": kind, **numbers}}


# name: (their fields, ours)
CASES = {
    "linear": _scaled("linear", factor=4.0),
    "llama3": _scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    "yarn": _scaled("yarn", **YARN),
    "yarn, mscale": _scaled("yarn", **YARN, mscale=0.7, mscale_all_dim=1.4),
    "yarn, attention factor": _scaled("yarn", **YARN, attention_factor=1.3, beta_fast=4.0, beta_slow=0.5, truncate=False),
    "window": ({"model_type": "mistral", "sliding_window": 7}, {"sliding_window": 7}),
    "window, fused": ({"model_type": "mistral", "sliding_window": 7}, {"sliding_window": 7, "use_flash_attention": True}),
    "window of some layers": (
        {"model_type": "qwen2", **WINDOW},
        {**QKV_BIAS, "sliding_window": 7, "window_attn_skip_freq": [0, 1, 1]},
    ),
    "query and key norms, wide heads": (
        {"model_type": "qwen3", "head_dim": 20, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"qk_layernorm": True, "kv_channels": 20, "rotary_base": 500.0},
    ),
    "partial rotary": (
        {"model_type": "stablelm", "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5, "use_qkv_bias": True},
        {**QKV_BIAS, "rotary_percent": 0.5, "normalization": "LayerNorm"},
    ),
    "biases, tied": (
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {**BIASES, "untie_embeddings_and_output_weights": False},
    ),
}


def our_weights(fields):
    """Whole weights by our names, from the rule by transformers' names."""
    width = fields.get("kv_channels", HIDDEN // HEADS)
    ends = {"gamma": "weight", "beta": "bias"} if fields["normalization"] == "LayerNorm" else {"weight": "weight"}
    result = {}

    def norm(ours, theirs, size=HIDDEN):
        result.update({f"{ours}.{end}": rule_weight(f"{theirs}.{other}", (size,)) for end, other in ends.items()})

    def linear(ours, theirs, rows, columns, has_bias, join=np.concatenate):
        kinds = {"weight": (columns,), "bias": ()} if has_bias else {"weight": (columns,)}
        for end, rest in kinds.items():
            parts = [rule_weight(f"{name}.{end}", (count, *rest)) for name, count in zip(theirs, rows)]
            result[f"{ours}.{end}"] = join(parts)

    def by_groups(parts):
        query, key, value = (part.reshape(GROUPS, -1, *part.shape[1:]) for part in parts)
        return np.concatenate([query, key, value], axis=1).reshape(-1, *parts[0].shape[1:])

    tables = {"embedding.word_embeddings": "model.embed_tokens"}
    if fields["untie_embeddings_and_output_weights"]:
        tables["output_layer"] = "lm_head"
    for ours, theirs in tables.items():
        linear(f"language_model.{ours}", [theirs], [ROWS], HIDDEN, False)
    for layer in range(LAYERS):
        ours, theirs = f"language_model.encoder.layers.{layer}", f"model.layers.{layer}"
        norm(f"{ours}.input_norm", f"{theirs}.input_layernorm")
        norm(f"{ours}.post_attention_norm", f"{theirs}.post_attention_layernorm")
        if fields.get("qk_layernorm"):
            for one in "qk":
                norm(f"{ours}.attention.{one}_layernorm", f"{theirs}.self_attn.{one}_norm", width)
        names, rows = [f"{theirs}.self_attn.{one}_proj" for one in "qkv"], [HEADS * width, GROUPS * width, GROUPS * width]
        linear(f"{ours}.attention.qkv_proj", names, rows, HIDDEN, fields["qkv_has_bias"], by_groups)
        out = [f"{theirs}.self_attn.o_proj"]
        linear(f"{ours}.attention.out_proj", out, [HIDDEN], HEADS * width, fields["out_proj_has_bias"])
        gates = [f"{theirs}.mlp.{one}_proj" for one in ("gate", "up")]
        linear(f"{ours}.mlp.mapping", gates, [WIDTH, WIDTH], HIDDEN, fields["mlp_has_bias"])
        linear(f"{ours}.mlp.projection", [f"{theirs}.mlp.down_proj"], [HIDDEN], WIDTH, fields["mlp_has_bias"])
    norm("language_model.encoder.final_norm", "model.norm")
    return result


def our_logits(fields, tokens, weights):
    """Logits `[b, s, v]` of GPTModel."""
    from mindspore import Tensor

    config = builders.make_config(fields)
    builders.start(config)
    model = builders.make_model(config, parallel_output=False)
    builders.fill(model, weights)
    return model(Tensor.from_numpy(tokens.astype(np.int32))).asnumpy()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Logits of all cases, from one process."""
    folder = tmp_path_factory.mktemp("transformers")
    (folder / "cases.json").write_text(json.dumps({name: {**THEIRS, **fields} for name, (fields, _) in CASES.items()}))
    script = Path(__file__).with_name("transformers_models.py")
    subprocess.run([sys.executable, str(script), str(folder / "cases.json"), str(folder / "out.npz")], check=True)
    with np.load(folder / "out.npz") as data:
        return dict(data)


@pytest.mark.parametrize("name", CASES)
def test_logits(world, theirs, name):
    fields = {**OURS, **CASES[name][1]}
    (logits,) = world(1)(our_logits, fields, theirs["tokens"], our_weights(fields))
    assert np.abs(logits - theirs[name]).max() < 1e-4
    assert np.abs(theirs[name]).max() > 1
