"""Mixtures of experts of every kind: each layout gives the losses, balance losses and gradients of one rank."""

import numpy as np
import pytest

from mindspeed_ms.testing.parity import recordings, runner
from mindspeed_ms.testing.parity.layouts import EXPERT_LAYOUTS, LAYOUTS

STEPS = 2
BIASES = {"model_config.add_bias_linear": True, "model_config.mlp_has_bias": True}
ONE = ("--micro-batch-size", "1")
# flags, settings without a flag, layouts
CASES = {
    "shared experts, gate, z-loss": (
        "--moe-shared-expert-intermediate-size 48 --moe-use-shared-expert-gate --moe-z-loss-coeff 0.01",
        {},
        ("tp2sp", "ep2", "pp2ep2"),
    ),
    "shared experts overlap, one dense layer": (
        "--n-shared-experts 2 --moe-shared-expert-overlap --moe-ffn-hidden-size 32 --first-k-dense-replace 1",
        {},
        ("tp2spep2", "ep2"),
    ),
    "grouped": ("--moe-grouped-gemm", {}, ("ep2", "tp2spep2", "tp2spep2etp1", "ep2z3")),
    "dropped by position, padded": (
        "--moe-expert-capacity-factor 0.75 --moe-token-drop-policy position --moe-pad-expert-input-to-capacity",
        {},
        ("ep2", "tp2sp", "tp2spep2etp1", "pp2ep2"),
    ),
    "sinkhorn": ("--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0", {}, ("ep2", "tp2sp", "tp2spep2allgather")),
    "every second layer": ("--moe-layer-freq ([1,0]*2)", {}, ("ep2", "pp2ep2", "tp2spep2etp1")),
    "biases": ("", BIASES, ("ep2", "tp2sp", "tp2spep2", "tp2spep2etp1", "tp2spep2allgather")),
    "top-1": ("--moe-router-topk 1 --moe-router-pre-softmax", {}, ("ep2allgather", "tp2spep2")),
    "top-8 of 16": ("--num-experts 16 --moe-router-topk 8 --moe-router-dtype fp64", {}, ("ep2", "tp2spep2")),
    "normalised": (
        "--moe-router-pre-softmax --norm-topk-prob --moe-router-dtype fp32 --moe-router-load-balancing-type seq_aux_loss",
        {},
        ("ep2", "tp2sp"),
    ),
    "per token": ("--calculate-per-token-loss --moe-z-loss-coeff 0.01", {}, ("ep2", "tp2sp", "tp2spep2etp1")),
    "small micro-batches": (" ".join(ONE), {}, ("dp4ep2distopt", "dp4ep2overlap", "dp4ep2z2", "ep4", "pp2vpp2ep2")),
    "small micro-batches, grouped": (" ".join((*ONE, "--moe-grouped-gemm")), {}, ("dp4ep2z2",)),
    "DeepSeek": (
        "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 12 --qk-pos-emb-head-dim 8 --v-head-dim 20 "
        "--qk-layernorm --n-shared-experts 1 --moe-ffn-hidden-size 32 --first-k-dense-replace 1 --moe-router-score-function "
        "sigmoid --moe-router-enable-expert-bias --n-group 2 --topk-group 2 --routed-scaling-factor 2.5",
        {},
        ("tp2spep2", "pp2ep2"),
    ),
    "gpt-oss": (
        "--softmax-type learnable --window-size 5,0 --moe-router-has-bias",
        {
            **BIASES,
            "model_config.hidden_act": "clamped_swiglu",
            "model_config.swiglu_limit": 0.5,
            "model_config.window_attn_skip_freq": 2,
        },
        ("tp2spep2", "pp2ep2"),
    ),
    "multi-token prediction": (
        "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.3 --micro-batch-size 1 --moe-router-load-balancing-type seq_aux_loss "
        "--first-k-dense-replace 1 --moe-shared-expert-intermediate-size 48",
        {},
        ("ep2", "ep2recompute", "ep2z3", "tp2spep2", "tp2spep2etp1", "pp2ep2", "pp2vpp2ep2"),
    ),
    "extended": ("--moe-extended-tp", {}, ("tp2spep2",)),
}


def run(world, flags, settings, layout, watch=None):
    recording = recordings.load("single_mixtral")
    batches = {name: values[:STEPS] for name, values in recording.batches.items()}
    extra = [*flags.split(), *layout.flags, "--padded-vocab-size", "128"]
    recorded = list(recording.flags)
    if "--multi-latent-attention" in extra:  # expands keys and values of every head
        recorded.remove("--group-query-attention")
        place = recorded.index("--num-query-groups")
        del recorded[place : place + 2]
    results = world(layout.world)(runner.run, recorded, extra, batches, None, ("gradients",), settings, watch)
    return results[0], runner.joined(results, "gradients")


@pytest.mark.parametrize("case", CASES)
def test_every_layout_equals_one_rank(world, case):
    """Losses of all kinds and gradient norms within 1e-5, each gradient within 1e-5 of its norm."""
    flags, settings, layouts = CASES[case]
    alone = flags.replace("--moe-extended-tp", "")
    one, gradients = run(world, alone, settings, LAYOUTS["tp1"])
    for name in layouts:
        result, found = run(world, flags, settings, (LAYOUTS | EXPERT_LAYOUTS)[name])
        for step, losses in enumerate(one["losses"]):
            assert losses.keys() == result["losses"][step].keys()
            for kind, value in losses.items():
                assert result["losses"][step][kind] == pytest.approx(value, rel=1e-5), (name, kind)
        np.testing.assert_allclose(result["grad_norm"], one["grad_norm"], rtol=1e-5, err_msg=name)
        assert found.keys() == gradients.keys()
        for parameter, expected in gradients.items():
            error = np.linalg.norm(found[parameter] - expected) / max(np.linalg.norm(expected), 1e-6)
            assert error < 1e-5, f"{name}: gradient of {parameter}: {error:.2e}"


def prefer_experts(step, number):
    """Watch: the routers' biases send all tokens to the first expert, and to the second where two are chosen."""
    from mindspore import Tensor

    from mindspeed_ms.core import storage

    for chunk in step.model if number == 0 else ():
        for name, parameter in chunk.module.parameters_and_names():
            if name.endswith("router.gating.bias"):
                storage.write(parameter, Tensor(np.array([90.0, 60.0, 0.0, 0.0], np.float32)))


@pytest.mark.parametrize("kind", ["", "--moe-grouped-gemm"], ids=["single", "grouped"])
@pytest.mark.parametrize("topk, layouts", [(1, ("ep2", "ep2allgather")), (2, ("ep2", "tp2spep2", "tp2spep2etp1"))])
def test_experts_and_ranks_without_a_token(world, topk, layouts, kind):
    """All experts are empty but one, or all of a rank: losses and gradients are those of one rank, zero for these experts."""
    flags = f"--moe-router-topk {topk} --moe-router-pre-softmax --moe-per-layer-logging {kind}"
    settings = {"moe_config.moe_router_has_bias": True}
    one, gradients = run(world, flags, settings, LAYOUTS["tp1"], prefer_experts)
    tokens = [one["losses"][0][f"moe/tokens_of_expert_{expert}"] for expert in range(4)]
    assert tokens == [64.0] * topk + [0.0] * (4 - topk)
    for name, values in gradients.items():
        if ".experts." in name:
            empty = values[topk:] if kind else [values] if int(name.split("local_experts.")[1][0]) >= topk else []
            assert not np.any(empty), name
    for layout in layouts:
        result, found = run(world, flags, settings, EXPERT_LAYOUTS[layout], prefer_experts)
        assert result["losses"][1] == pytest.approx(one["losses"][1], rel=1e-5)
        for name, expected in gradients.items():
            error = np.linalg.norm(found[name] - expected)
            assert error <= 1e-5 * max(np.linalg.norm(expected), 1e-3), f"{layout}: gradient of {name}: {error:.2e}"


def test_grouped_and_single_experts_are_equal(world):
    """The same weights in two tensors or as single MLPs give one curve."""
    single, gradients = run(world, "", {}, LAYOUTS["tp1"])
    grouped, stacked = run(world, "--moe-grouped-gemm", {}, LAYOUTS["tp1"])
    np.testing.assert_allclose(grouped["loss"], single["loss"], rtol=1e-6)
    np.testing.assert_allclose(grouped["grad_norm"], single["grad_norm"], rtol=1e-6)
    layer = "language_model.encoder.layers.1.mlp.experts"
    for tensor, linear in (("weight1", "mapping"), ("weight2", "projection")):
        expected = np.stack([gradients[f"{layer}.local_experts.{expert}.{linear}.weight"].T for expert in range(4)])
        np.testing.assert_allclose(stacked[f"{layer}.{tensor}"], expected, atol=1e-6 * np.abs(expected).max())


def test_a_layer_of_multi_token_prediction_counts_for_itself(world):
    """Its balance loss has the number behind those of the model's layers; the mean is over all of them."""
    result, _ = run(world, "--mtp-num-layers 1 --moe-per-layer-logging", {}, LAYOUTS["tp1"])
    losses = result["losses"][0]
    of_layers = [losses[f"moe/load_balancing_loss_layer_{layer}"] for layer in range(5)]
    assert losses["load_balancing_loss"] == pytest.approx(np.mean(of_layers), rel=1e-6)
    assert "moe/load_balancing_loss_layer_5" not in losses


def test_padding_changes_nothing(world):
    """Padded rows have no probability: all losses and gradients are those without padding."""
    flags = "--moe-expert-capacity-factor 1.5 --moe-router-load-balancing-type seq_aux_loss"
    plain, gradients = run(world, flags, {}, EXPERT_LAYOUTS["ep2"])
    padded, found = run(world, f"{flags} --moe-pad-expert-input-to-capacity", {}, EXPERT_LAYOUTS["ep2"])
    np.testing.assert_allclose(padded["loss"], plain["loss"], rtol=1e-6)
    assert padded["losses"][1] == pytest.approx(plain["losses"][1], rel=1e-6)
    for name, expected in gradients.items():
        np.testing.assert_allclose(found[name], expected, atol=2e-6 * np.abs(expected).max(), err_msg=name)
