"""Losses of policies and their gradients against float64 numpy; advantages; the order of answers; reward functions."""

import sys

import numpy as np
import pytest

from mindspeed_ms.core.datasets.prompt_dataset import PromptDataset, RolloutPlan
from mindspeed_ms.core.datasets.sft_dataset import InstructionDataset

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


def test_far_ratios_stay_finite(world):
    """Where the mask is 0 an infinite loss would become NaN."""
    far = np.array([[-200.0, 0.0, -1.0]])
    for name, others in (("clipped_surrogate", (far[:, ::-1], -np.ones((1, 1)), 0.2)), ("divergence", (far[:, ::-1],))):
        ((parts, gradient),) = world(1)(values_and_gradient, name, far, *others)
        assert np.isfinite(parts).all() and np.isfinite(gradient).all(), name


def test_advantages_of_groups():
    from mindspeed_ms.tasks.posttrain.policy_losses import group_advantages

    rewards = np.array([1.0, 2.0, 6.0, 0.1, 0.1, 0.1])
    found = group_advantages(rewards, 3)
    expected = (rewards[:3] - 3.0) / (np.sqrt((4 + 1 + 9) / 2) + 1e-4)
    np.testing.assert_allclose(found, [*expected, 0, 0, 0], rtol=1e-12)


def test_prompts_have_nothing_of_padded_samples():
    assert not issubclass(PromptDataset, InstructionDataset) and not hasattr(PromptDataset, "stored_batch")


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


class OnlyItems:
    """A sequence without `__iter__`."""

    def __getitem__(self, index):
        return (1, 2.5)[index]


def test_reward_functions():
    from mindspeed_ms.tasks.posttrain.rewards import RewardError, RewardFunction

    lists = {name: [name, name] for name in ("prompts", "answers", "prompt_ids", "answer_ids", "records")}
    seen = {}
    assert RewardFunction(lambda answers, records=None: np.array([1, 2.5]), "f")(["a", "b"], **lists) == [1.0, 2.5]
    for given in (np.array([[1], [2.5]]), (one for one in (1, 2.5)), OnlyItems()):
        found = RewardFunction(lambda answers, *, records, own=given: own, "f")(["a", "b"], **lists)
        assert found == [1.0, 2.5] and {type(one) for one in found} == {float}
    RewardFunction(lambda **others: seen.update(others) or [0, 0], "f")(["a", "b"], **lists)
    assert seen == lists
    with pytest.raises(RewardError, match="f gave 1: expected a list"):
        RewardFunction(lambda answers: 1, "f")(["a", "b"], **lists)
    with pytest.raises(RewardError, match="f gave 'x' for an answer to b: expected a finite float32 number"):
        RewardFunction(lambda answers: [1, "x"], "f")(["a", "b"], **lists)
    with pytest.raises(
        RewardError, match=r"f failed at 2 answers together, the first to a: ZeroDivisionError: integer division"
    ):
        RewardFunction(lambda answers: [1 // (len(answers) < 2)] * len(answers), "f")(["a", "b"], **lists)


def takes_a_place(answers, /):
    return answers


@pytest.mark.parametrize(
    "function, text",
    [
        (lambda answers, *, texts: answers, "f has the parameter texts: expected some of prompts, answers, "),
        (takes_a_place, "f has the parameter answers, by position only: expected some of prompts, answers, "),
        (lambda answers: [1, 2, 3], "f gave 3 rewards of 2 answers: expected one for each"),
        (lambda answers: {1, 2}, "f gave {1, 2}: expected a list"),
        (lambda answers: b"ab", "f gave b'ab': expected a list"),
        (lambda answers: "ab", "f gave 'ab': expected a list"),
        (lambda answers: [0, np.ones((2, 1))], "f gave array([[1.], [1.]]) for an answer to b: expected"),
        (lambda answers: [0, "x" * 100], f"f gave '{'x' * 79} for an answer to b: expected a finite"),
        (lambda answers: [int(answer) for answer in answers], "f failed at an answer to b: ValueError: invalid literal"),
        (lambda answers: [sys.exit()] if "b" in answers else [0], "f failed at an answer to b: SystemExit."),
    ],
)
def test_what_reward_functions_may_not_do(function, text):
    from mindspeed_ms.tasks.posttrain.rewards import RewardError, RewardFunction

    with pytest.raises(RewardError) as error:
        RewardFunction(function, "f")(["a", "b"], answers=["1", "b"])
    assert text in str(error.value) and "\n" not in str(error.value)


def test_clipped_value_loss(world):
    values, old = np.array([[0.5, 1.5, -1.0, 0.3]]), np.array([[0.4, 0.5, 0.5, 0.3]])
    returns = np.array([[1.0, 2.0, 0.0, 0.3]])  # inside; far in the right direction; far in the wrong one; exact
    (((found,), gradient),) = world(1)(values_and_gradient, "clipped_value_loss", values, old, returns, 0.2)
    plain = (values - returns) ** 2
    bounded = (np.clip(values, old - 0.2, old + 0.2) - returns) ** 2
    np.testing.assert_allclose(found, np.maximum(plain, bounded) / 2, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(gradient, np.where(bounded > plain, 0, values - returns), rtol=1e-6, atol=1e-9)
    assert (bounded > plain).tolist() == [[False, True, False, False]]


def test_generalized_advantages():
    """Against the sum of the definition, `sum_k (gamma lambda)^k delta_(t + k)`."""
    from mindspeed_ms.tasks.posttrain.policy_losses import generalized_advantages, whitened

    random, gamma, lam = np.random.RandomState(0), 0.9, 0.8
    mask = np.array([[0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 0], [0] * 6], np.float32)
    rewards, values = random.normal(size=(2, *mask.shape))
    advantages, returns = generalized_advantages(rewards, values, mask, gamma, lam)
    for row in range(len(mask)):
        places = np.flatnonzero(mask[row])
        own = [*values[row, places], 0.0]
        deltas = [rewards[row, place] + gamma * own[k + 1] - own[k] for k, place in enumerate(places)]
        for k, place in enumerate(places):
            expected = sum((gamma * lam) ** (later - k) * deltas[later] for later in range(k, len(places)))
            np.testing.assert_allclose(advantages[row, place], expected, rtol=1e-12)
            np.testing.assert_allclose(returns[row, place], expected + values[row, place], rtol=1e-12)
    assert not advantages[mask == 0].any() and not returns[mask == 0].any()
    assert not whitened(advantages + 1.0, mask)[mask == 0].any()
    white = whitened(advantages, mask)[mask > 0]
    np.testing.assert_allclose([white.mean(), white.var()], [0, 1], atol=1e-7)


def loss_of(stage, folder, data, outputs, batch, training):
    """(loss per what it is a mean of, reported means) of a micro-batch of arrays."""
    from mindspore import Tensor

    from mindspeed_ms.core import device, parallel_state
    from mindspeed_ms.tasks.posttrain.stages import trainer_class
    from mindspeed_ms.training.initialize import set_all_config
    from tests.posttrain import runs

    runs.reset()
    device.initialize_device()
    parallel_state.initialize_model_parallel()
    set_all_config(runs.configuration(stage, folder, data, training={"num_generations": 4, **training}))
    batch = {name: Tensor(values.astype(np.float32)) for name, values in batch.items()}
    loss = trainer_class(stage).loss_func(batch, Tensor(outputs.astype(np.float32)))

    def number(value):
        return float(value.asnumpy()) if isinstance(value, Tensor) else float(value)

    total = number(loss.differentiated) / (1.0 if loss.tokens is None else number(loss.tokens))
    return total, {name: number(one[0]) / number(one[1]) for name, one in loss.reported.items()}


def made_up_batch():
    random, shape = np.random.RandomState(3), (3, 5)
    mask = np.array([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 1, 0]], np.float64)
    old = -random.uniform(0.1, 3.0, shape)
    batch = {"loss_mask": mask, "old_log_probs": old, "rewards": np.array([1.0, 2.0, 4.0]), "lengths": mask.sum(1)}
    return random, shape, mask, batch


def test_loss_of_grpo(world, tmp_path):
    random, shape, mask, batch = made_up_batch()
    new = batch["old_log_probs"] + random.normal(0, 0.4, shape)
    batch["advantages"] = random.normal(size=(3, 1))
    batch["reference_log_probs"] = new + random.normal(0, 0.4, shape)
    training = {"grpo_beta": 0.25, "clip_ratio": 0.3}
    ((loss, reported),) = world(1)(loss_of, "grpo", str(tmp_path), "data", -new, batch, training)
    ratio, distance = np.exp(new - batch["old_log_probs"]), batch["reference_log_probs"] - new
    kl = np.exp(distance) - distance - 1
    surrogate = np.minimum(ratio * batch["advantages"], np.clip(ratio, 0.7, 1.3) * batch["advantages"])
    expected = (((-surrogate + 0.25 * kl) * mask).sum(1) / mask.sum(1)).mean()
    assert loss == pytest.approx(expected, abs=1e-6)
    assert reported["lm loss"] == pytest.approx(expected, abs=1e-6)
    assert reported["kl"] == pytest.approx(((kl * mask).sum(1) / mask.sum(1)).mean(), abs=1e-6)
    clipped = np.clip(ratio, 0.7, 1.3) * batch["advantages"] < ratio * batch["advantages"]
    assert reported["clip_fraction"] == pytest.approx(((clipped * mask).sum(1) / mask.sum(1)).mean(), abs=1e-6)
    assert clipped.any() and (reported["reward"], reported["response_length"]) == pytest.approx((7 / 3, 3.0))


def test_loss_of_ppo(world, tmp_path):
    random, shape, mask, batch = made_up_batch()
    new, values = batch["old_log_probs"] + random.normal(0, 0.4, shape), random.normal(size=shape)
    batch |= {"advantages": random.normal(size=shape), "returns": random.normal(size=shape), "kl": random.uniform(size=shape)}
    batch["old_values"] = values + random.normal(0, 0.4, shape)
    training = {"vf_coef": 0.5, "clip_ratio": 0.3, "cliprange_value": 0.2}
    outputs = np.concatenate([-new, values])
    ((loss, reported),) = world(1)(loss_of, "trl_ppo", str(tmp_path), "data", outputs, batch, training)
    ratio, advantages = np.exp(new - batch["old_log_probs"]), batch["advantages"]
    policy = np.maximum(-ratio * advantages, -np.clip(ratio, 0.7, 1.3) * advantages)
    bounded = batch["old_values"] + np.clip(values - batch["old_values"], -0.2, 0.2)
    critic = np.maximum((values - batch["returns"]) ** 2, (bounded - batch["returns"]) ** 2) / 2

    def mean(one):
        return (one * mask).sum() / mask.sum()

    assert loss == pytest.approx(mean(policy) + 0.5 * mean(critic), abs=1e-6)
    expected = {"lm loss": mean(policy + 0.5 * critic), "policy_loss": mean(policy), "value_loss": mean(critic)}
    clipped = np.clip(ratio, 0.7, 1.3) * advantages < ratio * advantages
    expected |= {"kl": mean(batch["kl"]), "reward": 7 / 3, "response_length": 3.0, "clip_fraction": mean(clipped)}
    for name, value in expected.items():
        assert reported[name] == pytest.approx(value, abs=1e-6), name
