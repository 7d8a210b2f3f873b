"""Gradients of the router's auxiliary losses against finite differences; counts of tokens."""

import numpy as np
import pytest

from mindspeed_ms.testing.parity import runner

SEQUENCE, SEQUENCES, HIDDEN = 12, 2, 10
KINDS = {
    "aux loss": ("--moe-router-load-balancing-type aux_loss", 0.3, None),
    "per sequence": ("--moe-router-load-balancing-type seq_aux_loss", 0.3, None),
    "sigmoid": ("--moe-router-load-balancing-type seq_aux_loss --moe-router-score-function sigmoid", 0.3, None),
    "z-loss": ("--moe-router-load-balancing-type none", 0.0, 0.3),
    "both": ("--moe-router-load-balancing-type aux_loss", 0.3, 0.2),
}
LAYOUTS = {"tp2sp": "--tensor-model-parallel-size 2 --sequence-parallel", "cp2": "--context-parallel-size 2"}


def flags_of(experts, topk, coefficient, z_coefficient, extra):
    sizes = {
        "num-layers": 1, "hidden-size": HIDDEN, "num-attention-heads": 2, "ffn-hidden-size": 16, "seq-length": SEQUENCE,
        "max-position-embeddings": SEQUENCE, "padded-vocab-size": 32, "micro-batch-size": SEQUENCES,
        "global-batch-size": SEQUENCES, "train-iters": 1, "lr": 1e-3, "num-experts": experts, "moe-router-topk": topk,
        "moe-aux-loss-coeff": coefficient, "moe-router-dtype": "fp32", "attention-dropout": 0.0, "hidden-dropout": 0.0,
    }  # fmt: skip
    if z_coefficient is not None:
        sizes["moe-z-loss-coeff"] = z_coefficient
    return [text for name, value in sizes.items() for text in (f"--{name}", str(value))] + extra.split()


def inputs(experts=6):
    """Hidden states `[s, b, h]` and the router's weight."""
    random = np.random.RandomState(3)
    hidden, weight = random.standard_normal((SEQUENCE, SEQUENCES, HIDDEN)), random.standard_normal((experts, HIDDEN))
    return hidden.astype(np.float32), weight.astype(np.float32)


def routed(flags, scale=None, micro_batches=1, experts=6):
    """(gradient of the router's weight from the auxiliary losses alone, tokens of each expert) on this rank."""
    from mindspore import Tensor

    from mindspeed_ms import ops
    from mindspeed_ms.core import autograd, parallel_state, storage
    from mindspeed_ms.core.pipeline_parallel.micro_batch_loss import BackwardScale, published
    from mindspeed_ms.legacy.model.moe.router import TopKRouter

    config = runner.config_of(flags, [])
    runner.start(config, 7)
    router = TopKRouter(config.model_config)
    router.set_train(True)
    hidden, weight = inputs(experts)
    storage.write(router.gating.weight, Tensor(weight))
    group = parallel_state.get_tensor_and_context_parallel_group()
    own = Tensor(np.ascontiguousarray(np.split(hidden, group.size)[group.rank]))
    scale = BackwardScale(**(scale or {"num_microbatches": micro_batches}))
    with published(scale):
        for _ in range(micro_batches):
            routing = router(own)
            autograd.backward(routing.probs, Tensor(np.zeros(routing.probs.shape, np.float32)))
    order, counts = ops.expert_order(routing.sent)
    assert len(order) == counts.sum()
    grad = autograd.tensor_grad(router.gating.weight)
    return None if grad is None else grad.asnumpy().copy(), counts


def finite_differences(kind, topk=2, experts=6, step=1e-5):
    """Gradient of the auxiliary losses in float64."""
    flags, coefficient, z_coefficient = KINDS[kind]
    hidden, weight = (array.astype(np.float64) for array in inputs(experts))
    chosen = np.argsort(-(hidden @ weight.T), axis=-1)[..., :topk]
    routing_map = np.eye(experts)[chosen].sum(axis=-2)

    def loss(weight):
        logits = hidden @ weight.T
        total = (z_coefficient or 0.0) * np.mean(np.log(np.exp(logits).sum(-1)) ** 2)
        scores = 1 / (1 + np.exp(-logits)) if "sigmoid" in flags else np.exp(logits)
        scores /= scores.sum(-1, keepdims=True)
        axes = 0 if "seq_aux_loss" in flags else (0, 1)
        products = scores.mean(axes) * routing_map.mean(axes)
        return total + coefficient * experts / topk * products.sum(-1).mean()

    gradient = np.zeros_like(weight)
    for place in np.ndindex(weight.shape):
        change = np.zeros_like(weight)
        change[place] = step
        gradient[place] = (loss(weight + change) - loss(weight - change)) / (2 * step)
    return gradient


def close(actual, expected, tolerance=1e-5):
    return np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)


def all_routed(cases):
    """`routed` of each (flags, keyword arguments)."""
    return [routed(flags, **options) for flags, options in cases]


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_the_auxiliary_losses(world, kind):
    """Finite differences; three times as large with three times the coefficients; scaled and averaged as the main loss."""
    flags, coefficient, z_coefficient = KINDS[kind]
    plain = flags_of(6, 2, coefficient, z_coefficient, flags)
    three = flags_of(6, 2, 3 * coefficient, None if z_coefficient is None else 3 * z_coefficient, flags)
    cases = [(plain, {}), (three, {}), (plain, {"scale": {"loss_scale": 1024.0, "num_microbatches": 4}})]
    (one, _), (thrice, _), (scaled, _), (twice, _) = world(1)(all_routed, [*cases, (plain, {"micro_batches": 2})])[0]
    assert close(one, finite_differences(kind))
    assert close(thrice, 3 * one)
    assert np.array_equal(scaled, 256 * one)
    assert close(twice, one, 1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_does_not_depend_on_the_layout(world, kind, layout):
    """Ranks that share the sequences hold parts of the sum; context-parallel ranks average it later."""
    flags, coefficient, z_coefficient = KINDS[kind]
    results = world(2)(routed, flags_of(6, 2, coefficient, z_coefficient, f"{flags} {LAYOUTS[layout]}"))
    total = sum(gradient for gradient, _ in results) / (2 if layout == "cp2" else 1)
    assert close(total, finite_differences(kind))


@pytest.mark.parametrize("experts, topk", [(6, 1), (6, 2), (16, 8)])
def test_counts_sum_to_tokens_times_topk(world, experts, topk):
    kinds = "--moe-router-load-balancing-type sinkhorn", "--moe-router-score-function sigmoid", "--moe-router-pre-softmax"
    cases = [(flags_of(experts, topk, 0.0, None, kind), {"experts": experts}) for kind in kinds]
    for _, counts in world(1)(all_routed, cases)[0]:
        assert len(counts) == experts and counts.sum() == SEQUENCE * SEQUENCES * topk
