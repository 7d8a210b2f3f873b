"""Losses of pairs and their gradients against float64, where they are steep and far out too."""

import numpy as np
import pytest

MARGINS = np.array([-300.0, -2.5, -1e-3, 0.0, 0.7, 40.0])


def gradients(name, arguments):
    """(values, gradients of their sum) of a loss of tensors."""
    from mindspore import Tensor

    from mindspeed_ms import ops
    from mindspeed_ms.core import autograd, device
    from mindspeed_ms.tasks.posttrain import losses

    device.initialize_device()
    first, *others = arguments
    x = autograd.set_requires_grad(Tensor(np.asarray(first, np.float32)))
    result = getattr(losses, name)(
        x, *(Tensor(np.asarray(one, np.float32)) if isinstance(one, list) else one for one in others)
    )
    loss = result[0] if isinstance(result, tuple) else result
    values = loss.asnumpy().astype(np.float64)
    (gradient,) = autograd.grad(ops.total(loss), x)
    return values, gradient.asnumpy().astype(np.float64)


def log_sigmoid(x):
    return -np.logaddexp(0, -x)


def sigmoid(x):
    return np.exp(log_sigmoid(x))


BETA, SMOOTHING = 0.5, 0.2
EXPECTED = {
    "sigmoid": (
        lambda z: -(1 - SMOOTHING) * log_sigmoid(BETA * z) - SMOOTHING * log_sigmoid(-BETA * z),
        lambda z: BETA * (SMOOTHING * sigmoid(BETA * z) - (1 - SMOOTHING) * sigmoid(-BETA * z)),
    ),
    "hinge": (lambda z: np.maximum(0, 1 - BETA * z), lambda z: np.where(1 - BETA * z > 0, -BETA, 0.0)),
    "ipo": (lambda z: (z - 1 / (2 * BETA)) ** 2, lambda z: 2 * (z - 1 / (2 * BETA))),
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_margin_losses(world, kind):
    ((values, gradient),) = world(1)(gradients, "margin_loss", (MARGINS.tolist(), BETA, kind, SMOOTHING))
    z = MARGINS.astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(values, EXPECTED[kind][0](z), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(gradient, EXPECTED[kind][1](z), rtol=1e-6, atol=1e-9)


def test_reward_loss_is_finite_far_out(world):
    ((values, gradient),) = world(1)(gradients, "reward_loss", ([-500.0, 0.0, 500.0], [0.0, 0.0, 0.0]))
    np.testing.assert_allclose(values, [500.0, np.log(2), 0.0], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-1.0, -0.5, 0.0], atol=1e-9)


def test_kto_pair_loss(world):
    chosen, rejected = [1.0, 3.0], [-0.5, -2.5]
    ((values, gradient),) = world(1)(gradients, "kto_pair_loss", (chosen, rejected, BETA))
    kl = 2.0, 0.0  # of rejected it would be negative
    expected = [(2 - sigmoid(BETA * (c - kl[1])) - sigmoid(BETA * (kl[0] - r))) / 2 for c, r in zip(chosen, rejected)]
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    slopes = [sigmoid(x) * sigmoid(-x) * BETA for x in (BETA * c for c in chosen)]
    shared = sum(sigmoid(x) * sigmoid(-x) * BETA for x in (BETA * (kl[0] - r) for r in rejected)) / 2
    np.testing.assert_allclose(gradient, [-(slope + shared) / 2 for slope in slopes], rtol=1e-6)


def test_unknown_loss_is_refused(world):
    with pytest.raises(Exception, match="'sigmod' is unknown: expected sigmoid, hinge or ipo"):
        world(1)(gradients, "margin_loss", ([0.0], BETA, "sigmod"))


def growth_of_halves():
    """(gradient of the halves, bytes by which memory grows in a thousand of them)."""
    from mindspore import Tensor

    from mindspeed_ms import ops
    from mindspeed_ms.core import autograd, device
    from mindspeed_ms.tasks.posttrain.sequences import halves

    device.initialize_device()

    def gradient():
        x = autograd.set_requires_grad(Tensor(np.arange(4, dtype=np.float32)))
        first, second = halves(x)
        return autograd.grad(ops.total(first * first - second), x)[0].asnumpy()

    def memory():
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096

    for _ in range(1000):
        gradient()
    before = memory()
    for _ in range(1000):
        gradient()
    return gradient().tolist(), memory() - before


def test_halves_keep_no_memory(world):
    ((gradient, growth),) = world(1)(growth_of_halves)
    assert gradient == [0.0, 2.0, -1.0, -1.0]
    assert growth < 2e6  # of a view by MindSpore: 7 MB
