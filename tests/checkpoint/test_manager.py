"""CheckpointManager with stand-ins: order of saves, and a checkpoint that exists already."""

from types import SimpleNamespace

import pytest


def saves(folder, loaded_from, monkeypatch):
    """(manager at iteration 4 that resumed from `loaded_from`, list that takes its calls)."""
    from mindspeed_ms.training import checkpoint_manager, checkpointing
    from mindspeed_ms.training.trainer import TrainState

    settings = SimpleNamespace(
        save_enabled=True,
        output_dir=str(folder),
        keep_checkpoint_max=5,
        async_save=True,
        crc_check=False,
        ckpt_format=None,
        prefix="network",
        no_save_optim=False,
        no_save_rng=False,
        no_load_rng=True,
        new_dataset=True,
    )
    calls = []
    monkeypatch.setattr(checkpointing, "save_checkpoint", lambda *arguments: calls.append("save"))
    manager = checkpoint_manager.CheckpointManager(
        SimpleNamespace(training_config=settings),
        checkpoint_manager.StartingPoint(str(loaded_from / "iter_0000004"), True),
        TrainState(),
        [],
        None,
        None,
        SimpleNamespace(positions=dict, start_anew=lambda consumed: None),
    )
    manager._savers[False] = SimpleNamespace(wait=lambda: calls.append("wait"))
    manager._resume(SimpleNamespace(manifest=SimpleNamespace(states={"train_state": {"iteration": 4}})))
    return manager, calls


def test_a_save_waits_for_the_spare_one_before(tmp_path, monkeypatch):
    manager, calls = saves(tmp_path, tmp_path, monkeypatch)
    manager.state.iteration = 5
    manager.save()
    assert calls == ["wait", "save"]
    manager.save()  # exists now
    assert calls == ["wait", "save"]


@pytest.mark.parametrize("same", [True, False])
def test_what_was_loaded_is_saved_into_another_folder_alone(tmp_path, monkeypatch, same):
    manager, calls = saves(tmp_path, tmp_path if same else tmp_path / "other", monkeypatch)
    manager.save()
    assert calls == ([] if same else ["wait", "save"])
