"""PPO and GRPO: a toy reward rises; equal numbers in every layout."""

import os

import numpy as np
import pytest

from tests.posttrain import generating, runs
from tests.posttrain.options import ROLLOUT_OPTIONS

RISE = {"grpo": {"grpo_beta": 0.01}, "trl_ppo": {"kl_coef": 0.01, "num_generations": 1}}
STAGES = list(RISE)


@pytest.mark.parametrize("stage", STAGES)
def test_reward_rises(world, tmp_path, prompts, stage):
    """The count of one token among the six of an answer."""
    training = {"training_iters": 50, **RISE[stage]}
    (result,) = world(1)(generating.train, stage, str(tmp_path), prompts, training=training, optimizer={"learning_rate": 0.005})
    rewards = runs.curve(result, "reward")
    assert np.mean(rewards[:5]) < 0.5 and np.mean(rewards[-10:]) > 4, rewards


@pytest.fixture(scope="module")
def plain(world, tmp_path_factory, prompts):
    return {
        stage: world(1)(
            generating.train,
            stage,
            str(tmp_path_factory.mktemp(stage)),
            prompts,
            "dense",
            training=generating.SEVERAL,
            scored=True,
        )[0]
        for stage in STAGES
    }


@pytest.mark.parametrize("layout", generating.LAYOUTS)
@pytest.mark.parametrize("stage", STAGES)
def test_layouts_are_equal(world, tmp_path, prompts, plain, stage, layout):
    """Answers, log-probabilities, values and losses, in two epochs of two steps; in another split into micro-batches."""
    ranks = world(2)(
        generating.train,
        stage,
        str(tmp_path),
        prompts,
        "dense",
        training=generating.SEVERAL,
        dataset={"batch_size": 2},
        parallel=generating.LAYOUTS[layout],
    )
    expected = plain[stage]
    assert set(ranks[0]["rollout"]) == set(expected["rollout"])
    for name, values in expected["rollout"].items():
        np.testing.assert_allclose(ranks[0]["rollout"][name], values, atol=1e-4 if name == "advantages" else 1e-5, err_msg=name)
        np.testing.assert_array_equal(ranks[0]["rollout"][name], ranks[1]["rollout"][name])
    for name in set(expected["lines"][0]) - {"time_ms", "tokens_per_second"}:
        np.testing.assert_allclose(runs.curve(ranks[0], name), runs.curve(expected, name), atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("stage", STAGES)
def test_old_log_probabilities_are_those_of_the_generation(plain, stage):
    """The cache of keys and the forward of the training are two ways to one number."""
    rollout, scores = plain[stage]["rollout"], plain[stage]["scores"]
    for row, own in enumerate(scores):
        np.testing.assert_allclose(rollout["old_log_probs"][row][rollout["loss_mask"][row] > 0], own, atol=1e-5)


def test_nothing_drops_out_of_old_log_probabilities(world, tmp_path, prompts):
    training, dropped = {**generating.SEVERAL, "training_iters": 1}, {"hidden_dropout": 0.5, "attention_dropout": 0.5}
    (result,) = world(1)(generating.train, "grpo", str(tmp_path), prompts, training=training, model=dropped, scored=True)
    for old, mask, own in zip(*(result["rollout"][name] for name in ("old_log_probs", "loss_mask")), result["scores"]):
        np.testing.assert_allclose(old[mask > 0], own, atol=1e-5)


def test_rewards_of_ppo_become_advantages(plain):
    """Backwards: the advantages tell the reward of each token, the divergence by the reference and at the end the answer's."""
    rollout = {name: values.astype(np.float64) for name, values in plain["trl_ppo"]["rollout"].items()}
    advantages = np.zeros_like(rollout["returns"])
    for row, mask in enumerate(rollout["loss_mask"]):
        places = np.flatnonzero(mask)
        values = rollout["old_values"][row, places]
        own = rollout["returns"][row, places] - values
        advantages[row, places] = own
        rewards = own - 0.95 * np.append(own[1:], 0) - np.append(values[1:], 0) + values
        rewards[-1] -= rollout["rewards"][row]
        ratios = -rewards / 0.3
        np.testing.assert_allclose(np.expm1(-ratios) + ratios, rollout["kl"][row, places], atol=2e-5)
    assert rollout["kl"].max() > 1e-3
    counted = advantages[rollout["loss_mask"] > 0]
    whitened = (advantages - counted.mean()) / counted.std() * rollout["loss_mask"]
    np.testing.assert_allclose(rollout["advantages"], whitened, atol=1e-5)


def test_experts_on_two_ranks(world, tmp_path, prompts):
    """Ranks that share experts generate everything together."""
    moe = {"num_experts": 4, "moe_router_topk": 2}
    found = [
        world(size)(
            generating.train,
            "grpo",
            str(tmp_path / str(size)),
            prompts,
            moe=moe,
            parallel={"expert_model_parallel_size": size},
            scored=True,
        )
        for size in (1, 2)
    ]
    np.testing.assert_array_equal(*(one[0]["rollout"]["tokens"] for one in found))
    np.testing.assert_allclose(*(runs.curve(one[0]) for one in found), atol=1e-5)
    assert [len(rank["scores"]) for rank in found[1]] == [8, 8]


def test_data_parallel_ranks_share_the_prompts(world, tmp_path, prompts):
    """Each generates for its own half, with the weights of now, though they are gathered late."""
    training = {"wrap_with_ddp": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True, "training_iters": 4}
    overlapped = {"optimizer": {"overlap_param_gather": True}, "training": training}
    settings = {"dataset": {"batch_size": 2}, "scored": True}
    plain = world(2)(
        generating.train, "grpo", str(tmp_path / "a"), prompts, "dense", training={"training_iters": 4}, **settings
    )
    late = world(2)(generating.train, "grpo", str(tmp_path / "b"), prompts, "dense", **overlapped, **settings)
    assert [len(rank["scores"]) for rank in late] == [4, 4]
    np.testing.assert_array_equal(late[0]["rollout"]["tokens"], plain[0]["rollout"]["tokens"])
    np.testing.assert_allclose(runs.curve(late[0]), runs.curve(plain[0]), atol=1e-6)


@pytest.mark.parametrize("path", [path for path in ROLLOUT_OPTIONS if not path.endswith("reward_model")])
def test_option_has_its_effect(world, tmp_path, prompts, path):
    stage, value, beside = ROLLOUT_OPTIONS[path]
    value = value.format(folder=os.path.dirname(prompts)) if isinstance(value, str) else value
    curves = []
    for name, own in (("plain", {}), ("changed", {path.partition(".")[2]: value})):
        training = {"training_iters": 3, **beside, **own}
        (result,) = world(1)(generating.train, stage, str(tmp_path / name), prompts, "dense", training=training)
        curves.append([runs.curve(result), runs.curve(result, "grad_norm"), runs.curve(result, "reward")])
    if path.endswith("reward_function"):
        (result,) = world(1)(generating.train, stage, str(tmp_path / "count"), prompts, "count")
        curves[0] = [runs.curve(result), runs.curve(result, "grad_norm"), runs.curve(result, "reward")]
    assert curves[0] != curves[1]
