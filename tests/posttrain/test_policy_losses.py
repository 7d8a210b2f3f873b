"""Losses of policies and their gradients against float64 numpy; advantages; the order of answers; reward functions."""

import numpy as np
import pytest

from mindspeed_ms.core.datasets.prompt_dataset import RolloutPlan

LOG_PROBS = np.array([[-1.0, -2.5, -0.1, -3.0], [-0.7, -0.2, -4.0, -1.5]])
OLD = np.array([[-1.1, -2.0, -0.6, -3.0], [-0.9, -1.0, -3.0, -1.5]])
ADVANTAGES = np.array([[1.5], [-0.75]])


def values_and_gradient(name, x, *others):
    """(what a loss gives, gradient of the sum of the losses to its first argument)."""
    from mindspore import Tensor

    from mindspeed_ms import ops
    from mindspeed_ms.core import autograd, device
    from mindspeed_ms.tasks.posttrain import policy_losses

    device.initialize_device()
    x = autograd.set_requires_grad(Tensor(x.astype(np.float32)))
    others = [Tensor(one.astype(np.float32)) if isinstance(one, np.ndarray) else one for one in others]
    result = getattr(policy_losses, name)(x, *others)
    parts = result if isinstance(result, tuple) else (result,)
    (gradient,) = autograd.grad(ops.total(parts[0]), x)
    return [part.asnumpy().astype(np.float64) for part in parts], gradient.asnumpy().astype(np.float64)


def test_clipped_surrogate(world):
    (((losses, clipped), gradient),) = world(1)(values_and_gradient, "clipped_surrogate", LOG_PROBS, OLD, ADVANTAGES, 0.2)
    ratio = np.exp(LOG_PROBS - OLD)
    plain, bounded = -ADVANTAGES * ratio, -ADVANTAGES * np.clip(ratio, 0.8, 1.2)
    np.testing.assert_allclose(losses, np.maximum(plain, bounded), rtol=1e-6)
    np.testing.assert_array_equal(clipped, bounded > plain)
    assert clipped.tolist() == [[0, 0, 1, 0], [0, 0, 1, 0]]
    np.testing.assert_allclose(gradient, np.where(bounded > plain, 0, plain), rtol=1e-6)


def test_divergence(world):
    (((found,), gradient),) = world(1)(values_and_gradient, "divergence", LOG_PROBS, OLD)
    distance = OLD - LOG_PROBS
    np.testing.assert_allclose(found, np.expm1(distance) - distance, atol=1e-6)
    np.testing.assert_allclose(gradient, -np.expm1(distance), rtol=1e-6, atol=1e-6)


def test_advantages_of_groups():
    from mindspeed_ms.tasks.posttrain.policy_losses import group_advantages

    rewards = np.array([1.0, 2.0, 6.0, 0.1, 0.1, 0.1])
    found = group_advantages(rewards, 3)
    expected = (rewards[:3] - 3.0) / (np.sqrt((4 + 1 + 9) / 2) + 1e-4)
    np.testing.assert_allclose(found, [*expected, 0, 0, 0], rtol=1e-12)


def test_plan_of_rollouts():
    plan = RolloutPlan(batch=4, size=8, epochs=2, group=2, seed=3)
    answers = np.array([plan.answer(sample) for sample in range(32)]).reshape(2, 2, 8)  # rollout, pass, sample
    assert plan.steps == 4 and plan.answers(16) == 8 and plan.answers(17) == 16
    for rollout, passes in enumerate(answers):
        for one in passes:
            assert sorted(one) == list(range(rollout * 8, rollout * 8 + 8))
    orders = {tuple(one % 8) for passes in answers for one in passes}
    assert len(orders) == 4
    assert [RolloutPlan(4, 4).answer(sample) for sample in range(8)] == list(range(8))


def test_reward_functions():
    from mindspeed_ms.tasks.posttrain.rewards import RewardError, RewardFunction

    lists = {name: [name, name] for name in ("prompts", "answers", "prompt_ids", "answer_ids", "records")}
    seen = {}
    assert RewardFunction(lambda answers, records=None: np.array([1, 2.5]), "f")(["a", "b"], **lists) == [1.0, 2.5]
    RewardFunction(lambda **others: seen.update(others) or [0, 0], "f")(["a", "b"], **lists)
    assert seen == lists
    with pytest.raises(RewardError, match="f gave 1: expected a list"):
        RewardFunction(lambda answers: 1, "f")(["a", "b"], **lists)
    with pytest.raises(RewardError, match="f gave 'x' for an answer to b: expected a finite number"):
        RewardFunction(lambda answers: [1, "x"], "f")(["a", "b"], **lists)
    with pytest.raises(
        RewardError, match=r"f failed at 2 answers together, the first to a: ZeroDivisionError: integer division"
    ):
        RewardFunction(lambda answers: 1 // (len(answers) < 2), "f")(["a", "b"], **lists)
