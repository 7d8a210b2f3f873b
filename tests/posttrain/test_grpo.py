"""GRPO: the reward of a toy task rises, equally in every layout; resume; errors."""

import numpy as np
import pytest

from tests.posttrain import generating, runs


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return generating.write_prompts(str(tmp_path_factory.mktemp("prompts")))


def test_reward_rises(world, tmp_path, prompts):
    training = {"training_iters": 50, "grpo_beta": 0.01}
    (result,) = world(1)(generating.train, "grpo", str(tmp_path), prompts, training=training)
    rewards = runs.curve(result, "reward")
    print(rewards)
    assert np.mean(rewards[:5]) < 1 and np.mean(rewards[-5:]) > 4
