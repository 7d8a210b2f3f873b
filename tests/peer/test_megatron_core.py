"""Other sizes and options than the recordings', against megatron-core itself (needs the `[peer]` extra)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_ms.testing.parity import runner

pytestmark = pytest.mark.peer

BASE = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "ffn_hidden_size": 96}
FLAGS = [
    "--micro-batch-size",
    "3",
    "--global-batch-size",
    "3",
    "--train-iters",
    "1",
    "--lr",
    "1e-3",
    "--attention-dropout",
    "0",
    "--hidden-dropout",
    "0",
    "--clip-grad",
    "0",
]
ROPE = {"vocab_size": 96, "position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
LEARNED = {"vocab_size": 96, "position_embedding_type": "learned_absolute", "share_embeddings_and_output_weights": True}


def _case(activation, model, gpt, flags, sequence=24):
    return {"activation": activation, "model": {**BASE, **model}, "gpt": gpt, "sequence": sequence, "batch": 3, "flags": flags}


CASES = {
    "partial rotary, one group": _case(
        "swiglu",
        {"normalization": "RMSNorm", "add_bias_linear": False, "num_query_groups": 1},
        {**ROPE, "rotary_percent": 0.5},
        [
            "--swiglu",
            "--normalization",
            "RMSNorm",
            "--disable-bias-linear",
            "--group-query-attention",
            "--num-query-groups",
            "1",
            "--rotary-percent",
            "0.5",
        ],
    ),
    "interleaved rotary": _case(
        "swiglu",
        {"add_bias_linear": False, "rotary_interleaved": True, "normalization": "RMSNorm"},
        {**ROPE, "rotary_base": 5000},
        ["--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--rotary-interleaved", "--rotary-base", "5000"],
    ),
    "interpolated rotary, wide heads": _case(
        "gelu",
        {"kv_channels": 20, "bias_activation_fusion": True},
        {**ROPE, "seq_len_interpolation_factor": 2.0},
        ["--kv-channels", "20", "--rotary-seq-len-interpolation-factor", "2"],
    ),
    "squared relu": _case("squared_relu", {"add_bias_linear": False}, LEARNED, ["--squared-relu", "--disable-bias-linear"]),
    "layer scaling": _case(
        "gelu",
        {"bias_activation_fusion": True, "apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
        LEARNED,
        ["--apply-query-key-layer-scaling"],
    ),
    "two further tokens": _case(
        "swiglu",
        {"add_bias_linear": False, "normalization": "RMSNorm", "mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3},
        {**ROPE, "share_embeddings_and_output_weights": True},
        [
            *("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"),
            *("--mtp-num-layers", "2", "--mtp-loss-scaling-factor", "0.3"),
        ],
    ),
    "swiglu with biases": _case(
        "swiglu", {"bias_activation_fusion": True}, {**ROPE, "share_embeddings_and_output_weights": True}, ["--swiglu"], 17
    ),
}


def _our_flags(case):
    gpt, flags = case["gpt"], [*FLAGS, *case["flags"]]
    for name in BASE:
        flags += ["--" + name.replace("_", "-"), str(case["model"][name])]
    flags += [
        "--seq-length",
        str(case["sequence"]),
        "--max-position-embeddings",
        str(case["sequence"]),
        "--padded-vocab-size",
        str(gpt["vocab_size"]),
        "--position-embedding-type",
        gpt["position_embedding_type"],
    ]
    return flags if gpt["share_embeddings_and_output_weights"] else [*flags, "--untie-embeddings-and-output-weights"]


REFERENCE = Path(__file__).with_name("megatron_reference.py")


@pytest.mark.parametrize("layout", ["tp1", "tp2sp"])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients(world, tmp_path, name, layout):
    """Loss and every gradient within 1e-5."""
    case = CASES[name]
    size = 1 if layout == "tp1" else 2
    if case["model"].get("num_query_groups", 4) % size or case["sequence"] % size:
        pytest.skip("this case does not divide by two ranks")
    (tmp_path / "case.json").write_text(json.dumps(case))
    done = subprocess.run(
        [sys.executable, REFERENCE, tmp_path / "case.json", tmp_path / "out.npz"],
        capture_output=True,
        text=True,
        env={**os.environ, "PEER_PORT": str(20000 + os.getpid() % 20000)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    tokens = np.random.RandomState(7).randint(0, case["gpt"]["vocab_size"], (case["batch"], case["sequence"] + 1))
    tokens = tokens.astype(np.int32)[None]
    batches = {"tokens": tokens[..., :-1], "labels": tokens[..., 1:], "loss_mask": np.ones(tokens[..., 1:].shape, np.float32)}
    extra = [] if size == 1 else ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    results = world(size)(runner.run, _our_flags(case), extra, batches, None, ("gradients",))
    ours = runner.joined(results, "gradients")
    with np.load(tmp_path / "out.npz") as data:
        assert abs(results[0]["loss"][0] / data["losses"].mean(dtype=np.float64) - 1) < 1e-5
        further = [
            results[0]["losses"][0][f"mtp_{depth} loss"] for depth in range(1, case["model"].get("mtp_num_layers", 0) + 1)
        ]
        np.testing.assert_allclose(further, data["mtp_losses"] if further else [], rtol=1e-5)
        recorded = runner.our_arrays({key[5:]: data[key] for key in data.files if key.startswith("grad/")})
    assert set(ours) == set(recorded)
    for key, expected in recorded.items():
        if not key.endswith("qkv_proj.bias"):  # its keys' part has no true gradient; the recordings check the rest
            error = np.linalg.norm(ours[key] - expected) / np.linalg.norm(expected)
            assert error < 1e-5, f"gradient of {key}: {error:.2e}"
