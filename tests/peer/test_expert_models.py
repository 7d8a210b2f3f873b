"""Mixtures of experts of several kinds against megatron-core's own GPTModel (needs the `[peer]` extra)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_ms.testing.parity import runner
from mindspeed_ms.testing.parity.layouts import EXPERT_LAYOUTS, LAYOUTS
from tests.peer.test_megatron_core import FLAGS

pytestmark = pytest.mark.peer

VOCABULARY, SEQUENCE, BATCH, MICRO_BATCH = 96, 24, 4, 2
MODEL = {
    "num_layers": 4, "hidden_size": 48, "num_attention_heads": 4, "ffn_hidden_size": 96, "normalization": "RMSNorm",
    "add_bias_linear": False, "num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 40,
    "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
OUR_NAMES = {"num_moe_experts": "num_experts", "normalization": "normalization"}
SWITCHES = {"add_bias_linear": ""}
CASES = {
    "shared experts, z-loss": {
        "moe_shared_expert_intermediate_size": 48, "moe_z_loss_coeff": 0.01, "moe_aux_loss_coeff": 0.01,
        "moe_router_load_balancing_type": "aux_loss",
    },
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
    "sinkhorn, top-1": {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0, "moe_router_topk": 1},
    "dropped by position, padded": {
        "moe_expert_capacity_factor": 0.75, "moe_token_drop_policy": "position", "moe_pad_expert_input_to_capacity": True,
        "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001,
    },
    "dropped by probability, per sequence": {
        "moe_expert_capacity_factor": 0.75, "moe_token_drop_policy": "probs", "moe_aux_loss_coeff": 0.01,
        "moe_router_load_balancing_type": "seq_aux_loss", "moe_router_pre_softmax": True,
    },
    "some layers dense": {
        "moe_layer_freq": [1, 0, 0, 1], "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.02,
    },
    "sigmoid, groups, fp64": {
        "moe_router_score_function": "sigmoid", "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4,
        "moe_router_topk_scaling_factor": 2.5, "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.01,
        "moe_router_dtype": "fp64", "moe_layer_freq": 2, "moe_z_loss_coeff": 0.01,
    },
}  # fmt: skip
COMPARED = ("tp1", "ep2", "tp2sp", "pp2ep2")


def our_flags(case):
    flags = [*FLAGS, "--swiglu", "--untie-embeddings-and-output-weights", "--disable-bias-linear"]
    for name, value in {**MODEL, **case}.items():
        if value is True:
            flags.append("--" + name.replace("_", "-"))
        elif name != "add_bias_linear":
            flags += ["--" + OUR_NAMES.get(name, name).replace("_", "-"), str(value)]
    sizes = {"seq-length": SEQUENCE, "max-position-embeddings": SEQUENCE, "padded-vocab-size": VOCABULARY,
             "position-embedding-type": "rope", "micro-batch-size": MICRO_BATCH, "global-batch-size": BATCH}  # fmt: skip
    return flags + [text for name, value in sizes.items() for text in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """{case: arrays of megatron-core}; one process computes all."""
    folder, pairs = tmp_path_factory.mktemp("experts"), []
    for number, case in enumerate(CASES.values()):
        gpt = {"vocab_size": VOCABULARY, "position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
        content = {"activation": "swiglu", "model": {**MODEL, **case}, "gpt": gpt, "sequence": SEQUENCE, "batch": BATCH}
        content["micro_batch"] = MICRO_BATCH
        (folder / f"{number}.json").write_text(json.dumps(content))
        pairs += [folder / f"{number}.json", folder / f"{number}.npz"]
    command = [sys.executable, Path(__file__).with_name("megatron_reference.py"), *pairs]
    environment = {**os.environ, "PEER_PORT": str(20000 + os.getpid() % 20000)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: dict(np.load(path)) for name, path in zip(CASES, pairs[1::2])}


@pytest.mark.parametrize("layout", COMPARED)
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients(world, recorded, name, layout):
    """Loss, balance losses and each gradient within 1e-5 of one rank of Megatron, in every layout."""
    expected, chosen = recorded[name], (LAYOUTS | EXPERT_LAYOUTS)[layout]
    tokens = np.random.RandomState(7).randint(0, VOCABULARY, (BATCH, SEQUENCE + 1)).astype(np.int32)[None]
    batches = {"tokens": tokens[..., :-1], "labels": tokens[..., 1:], "loss_mask": np.ones(tokens[..., 1:].shape, np.float32)}
    results = world(chosen.world)(runner.run, our_flags(CASES[name]), list(chosen.flags), batches, None, ("gradients",))
    balance = {key[8:]: values[values != 0].mean() for key, values in expected.items() if key.startswith("balance/")}
    for result in results:
        losses = dict(result["losses"][0])
        assert losses.pop(next(iter(losses))) == pytest.approx(expected["losses"].mean(dtype=np.float64), rel=1e-5)
        losses.pop("moe/dropped_tokens", None)
        assert losses == pytest.approx(balance, rel=1e-5)
    ours = runner.joined(results, "gradients")
    gradients = runner.our_arrays({key[5:]: values for key, values in expected.items() if key.startswith("grad/")})
    assert set(ours) == set(gradients)
    for key, values in gradients.items():
        error = np.linalg.norm(ours[key] - values) / max(np.linalg.norm(values), 1e-6)  # of an expert without tokens: 0
        assert error < 1e-5, f"gradient of {key}: {error:.2e}"
