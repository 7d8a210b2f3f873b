"""Routing, capacity and balance losses of random cases against megatron-core's own functions (needs the `[peer]` extra)."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.peer
CASES = 60
REFERENCE = Path(__file__).with_name("routing_reference.py")


def random_cases():
    """Cases, and arrays of each."""
    random, cases, arrays = np.random.RandomState(5), [], {}
    for number in range(CASES):
        experts, tokens = int(random.choice([4, 8, 16])), int(random.choice([16, 64, 128]))
        topk = int(random.choice([1, 2, 4]))
        options = {"score_function": str(random.choice(["softmax", "sigmoid"]))}
        options["use_pre_softmax"] = bool(topk == 1 or random.rand() < 0.5)
        if options["score_function"] == "sigmoid" and random.rand() < 0.7:
            arrays[f"bias{number}"] = (0.3 * random.standard_normal(experts)).astype(np.float32)
        if topk > 1 and random.rand() < 0.5:
            options.update(num_groups=4 if experts > topk else 2, group_topk=2)
        if options.get("num_groups") and topk > 2 * experts // options["num_groups"]:
            options.pop("num_groups"), options.pop("group_topk")
        if random.rand() < 0.5:
            options["scaling_factor"] = 2.5
        if random.rand() < 0.6:
            policy = str(random.choice(["probs", "position"]))
            options.update(capacity_factor=float(random.choice([0.1, 0.5, 1.0])), drop_policy=policy)
        cases.append({"topk": topk, "options": options})
        arrays[f"logits{number}"] = random.standard_normal((tokens, experts)).astype(np.float32)
        arrays[f"weights{number}"] = random.standard_normal((tokens, experts)).astype(np.float32)
    return cases, arrays


def ours(case, logits, weights, bias):
    """What `routing_reference` records, and the numbers of tokens, of our functions."""
    from mindspore import Tensor

    from mindspeed_ms import ops
    from mindspeed_ms.config import MoEConfig
    from mindspeed_ms.core import autograd, parallel_state
    from mindspeed_ms.core.expert_parallel.balance import balance_loss, balance_scores, z_loss
    from mindspeed_ms.core.expert_parallel.routing import route, sinkhorn

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    options, topk = case["options"], case["topk"]
    settings = MoEConfig(
        num_experts=logits.shape[1],
        moe_router_topk=topk,
        moe_router_score_function=options["score_function"],
        moe_router_pre_softmax=options["use_pre_softmax"],
        moe_router_num_groups=options.get("num_groups"),
        moe_router_group_topk=options.get("group_topk"),
        moe_router_topk_scaling_factor=options.get("scaling_factor"),
        moe_expert_capacity_factor=options.get("capacity_factor"),
        moe_token_drop_policy=options.get("drop_policy", "probs"),
    )
    x = autograd.set_requires_grad(Tensor(logits))
    routing = route(x, settings, None if bias is None else Tensor(bias), True)
    scores = balance_scores(x, options["score_function"], topk)
    aux, _ = balance_loss(scores, routing.chosen, topk, 0.1)
    sequence, _ = balance_loss(scores, routing.kept, topk, 0.1, 4)
    z = z_loss(x) * 0.1
    autograd.backward(ops.total(routing.probs * Tensor(weights)) + aux + sequence + z)
    return {
        "probs": routing.probs.asnumpy(),
        "map": routing.kept.asnumpy() != 0,
        "aux": aux.asnumpy(),
        "sequence": sequence.asnumpy(),
        "z": z.asnumpy(),
        "grad": autograd.tensor_grad(x).asnumpy(),
        "sinkhorn": sinkhorn(logits),
    }, routing.chosen.asnumpy().sum()


def all_of_ours(cases, arrays):
    return [
        ours(case, arrays[f"logits{number}"], arrays[f"weights{number}"], arrays.get(f"bias{number}"))
        for number, case in enumerate(cases)
    ]


def test_routing_equals_megatrons(world, tmp_path):
    """Probabilities, choices, losses and the logits' gradient; the choices that capacity leaves are Megatron's to the token."""
    cases, arrays = random_cases()
    np.savez(tmp_path / "cases.npz", cases=json.dumps(cases), **arrays)
    command = [sys.executable, str(REFERENCE), str(tmp_path / "cases.npz"), str(tmp_path / "results.npz")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = np.load(tmp_path / "results.npz")
    for number, (found, chosen) in enumerate(world(1)(all_of_ours, cases, arrays)[0]):
        assert chosen == len(arrays[f"logits{number}"]) * cases[number]["topk"]
        assert np.array_equal(found["map"], expected[f"map{number}"]), cases[number]
        for name, values in found.items():
            np.testing.assert_allclose(
                values, expected[f"{name}{number}"], rtol=2e-5, atol=2e-6, err_msg=f"{name} {cases[number]}"
            )
