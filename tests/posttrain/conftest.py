"""Data and starting weights of the stages, made once."""

import pytest

from tests.posttrain import generating, runs


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Prefixes of small data by kind."""
    folder = tmp_path_factory.mktemp("posttrain")
    return {
        "chats": runs.write_conversations(str(folder / "chats")),
        "pairs": runs.write_pairs(str(folder / "pairs")),
        "steps": runs.write_steps(str(folder / "steps")),
    }


@pytest.fixture(scope="session")
def weights(world, tmp_path_factory, files):
    """Folders of two checkpoints of the same model, "base" and "other", and of one with experts, "moe"."""
    folder = tmp_path_factory.mktemp("weights")
    for name, seed, settings in (("base", 7, {}), ("other", 8, {}), ("moe", 7, {"moe": runs.EXPERTS})):
        training = {"save_enabled": True, "training_iters": 1, "seed": seed}
        world(1)(runs.train, "sft", str(folder / name), files["chats"], training=training, **settings)
    return {name: str(folder / name) for name in ("base", "other", "moe")}


@pytest.fixture(scope="session")
def prompts(tmp_path_factory):
    return generating.write_prompts(str(tmp_path_factory.mktemp("prompts")))


@pytest.fixture(scope="session")
def policy(world, tmp_path_factory, prompts):
    """Folder of a policy with a critic, trained for two steps."""
    folder = str(tmp_path_factory.mktemp("policy"))
    world(1)(generating.train, "trl_ppo", folder, prompts, training={"save_enabled": True, "training_iters": 2})
    return folder


@pytest.fixture(scope="session")
def reward_model(world, tmp_path_factory, files):
    """Folder of a reward model that was trained with dropout."""
    folder = str(tmp_path_factory.mktemp("rewards"))
    training = {"save_enabled": True, "training_iters": 2}
    data = runs.write_pairs(folder + "/small", vocabulary=32)
    world(1)(runs.train, "orm", folder, data, model={**generating.SMALL, "hidden_dropout": 0.5}, training=training)
    return folder
