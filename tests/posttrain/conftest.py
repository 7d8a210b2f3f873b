"""Data and starting weights of the stages, made once."""

import pytest

from tests.posttrain import runs


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
