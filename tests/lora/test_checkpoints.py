"""Trainings with adapters from a base: resuming, adapters alone in checkpoints, other bases and settings."""

import copy
import os

import numpy as np
import pytest

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.folders import newest_manifest
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.models.adapter_files import read_adapters, with_adapters
from mindspeed_ms.models.adapters import MergedReader
from mindspeed_ms.testing import checkpoint_runs as runs
from mindspeed_ms.testing.small_trainings import whole_weights
from mindspeed_ms.training import adapter_start
from tests.lora.test_layouts import LORA, is_adapter

TP2 = {"tensor_model_parallel_size": 2}


@pytest.fixture(scope="module")
def base(world, tmp_path_factory):
    """Folder of a base."""
    folder = tmp_path_factory.mktemp("base")
    world(2)(runs.train, folder, model="untied", training={"exit_interval": 2})
    return folder


def adapters_from(folder, base, parts=1, lora=None, **settings):
    """Training with adapters from a base, in several parts."""
    training = {"pretrained_checkpoint": str(base), "resume_training": True, **settings.pop("training", {})}
    settings = {"model": "untied", "lora": {**LORA, **(lora or {})}, **settings}
    results = [
        runs.train(folder, training={**training, **({"exit_interval": 3} if part < parts - 1 else {})}, **settings)
        for part in range(parts)
    ]
    return {**results[-1], "log": [text for result in results for text in result["log"]]}


@pytest.fixture(scope="module")
def whole(world, base, tmp_path_factory):
    """A training in one go: (folder, results of its ranks)."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, world(2)(adapters_from, folder, base, parallel=TP2, lora={"lora_dropout": 0.1})


def test_resumed_with_adapters_alone_in_checkpoints(world, base, whole, tmp_path):
    lora = {"lora_ckpt_filter": True, "lora_dropout": 0.1}
    parts = world(2)(adapters_from, tmp_path, base, 2, lora, parallel=TP2)
    for one, other in zip(whole[1], parts):
        assert one["losses"] == other["losses"] and one["norms"] == other["norms"]
        for name, (_, values) in one["weights"].items():
            np.testing.assert_array_equal(values, other["weights"][name][1], err_msg=name)
    trained = whole_weights(parts)
    with CheckpointReader(base / "iter_0000002") as reader, CheckpointReader(tmp_path / "iter_0000004") as saved:
        keys = set(reader.manifest.tensors)
        assert {key for key in saved.manifest.tensors if not key.startswith("optimizer.")} == set(filter(is_adapter, trained))
        for name, values in trained.items():
            if is_adapter(name):
                np.testing.assert_array_equal(values, saved.read_whole(name))
            else:
                assert name in keys
                np.testing.assert_array_equal(values, reader.read_whole(name))
    assert any(f"loaded the base {base}" in text for text in parts[0]["log"])
    place, manifest, alone = with_adapters(str(tmp_path / "iter_0000004"), saved.manifest)
    assert place == str(base / "iter_0000002")
    cell = "language_model.encoder.layers.1.mlp.mapping"
    with MergedReader(place, manifest, alone) as merged:
        expected = trained[f"{cell}.weight"] + 2.0 * trained[f"{cell}.lora_b"] @ trained[f"{cell}.lora_a"]
        np.testing.assert_allclose(merged.read_whole(f"{cell}.weight"), expected, atol=1e-6)
    full = read_adapters(whole[0], None)
    assert all((full.tensors[key] == values).all() for key, values in alone.tensors.items())


def start(folder, **settings):
    """One step from adapters of another folder."""
    training = {"training_iters": 1, **settings.pop("training", {})}
    return runs.train(folder, training=training, model="untied", **settings)


def test_adapters_of_another_folder_go_on(world, base, whole, tmp_path):
    lora = {**LORA, "lora_load": str(whole[0]), "lora_dropout": 0.0}
    still = {"learning_rate": 1e-30, "weight_decay": 0.0}
    training = {"load_checkpoint": str(base), "save_enabled": False}
    got = world(1)(start, tmp_path, training=training, lora=lora, optimizer=still)[0]["weights"]
    for name, values in whole_weights(whole[1]).items():
        np.testing.assert_array_equal(got[name][1], values, err_msg=name)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sizes": {"hidden_size": 48}}, "another base than the model of this run: .*hidden_size is 48 there and 32 in the"),
        ({"sizes": {"num_layers": 2}}, "num_layers is 2 there and 4 in the adapter"),
        ({"lora": {"lora_alpha": 7}}, "lora_alpha is 7 here and 6 there"),
        ({"lora": {"lora_rank": 2}}, "lora_rank is 2 here and 3 there"),
        ({"lora": {"target_cells": [{"target_cells": [r".*_proj"]}]}}, "target_cells is"),
    ],
)
def test_other_adapters_are_refused(world, whole, tmp_path, settings, words):
    lora = {**LORA, **settings.get("lora", {}), "lora_load": str(whole[0])}
    with pytest.raises(CheckpointError, match=words):
        world(1)(start, tmp_path, sizes=settings.get("sizes"), lora=lora)


def test_what_does_not_go_together(world, base, whole, tmp_path):
    with pytest.raises(CheckpointError, match="holds adapters, and the run has none: set use_lora"):
        world(1)(start, tmp_path, training={"load_checkpoint": str(whole[0])})
    with pytest.raises(CheckpointError, match="holds no adapters: name the folder"):
        world(1)(start, tmp_path, lora={**LORA, "lora_load": str(base)})
    assert not os.path.exists(tmp_path / "iter_0000001")


def test_what_a_resumed_training_takes_of_its_adapters(base, whole, tmp_path, monkeypatch):
    """Its checkpoint's, `lora_load` may be gone; of the settings and, where the base is elsewhere, of the base that it had."""

    def found(manifest, resumes=True, **lora):
        config = runs.make_config(tmp_path, "untied", lora={**LORA, "lora_load": str(tmp_path / "gone"), **lora})
        return adapter_start.find_adapter_start(place, manifest, config, resumes)

    place, manifest = newest_manifest(str(whole[0]))
    assert found(manifest) == adapter_start.AdapterStart()
    with pytest.raises(CheckpointError, match="gone holds no adapters: it does not exist"):
        found(manifest, resumes=False)
    with pytest.raises(CheckpointError, match="other settings: lora_alpha is 7 here and 6 there"):
        found(manifest, lora_alpha=7)
    alone, other = copy.copy(manifest), newest_manifest(str(base))[1]
    alone.tensors = {name: stored for name, stored in manifest.tensors.items() if is_adapter(name)}
    monkeypatch.setattr(adapter_start, "base_of", lambda *_: ("there", other))
    assert found(alone) == adapter_start.AdapterStart("there")
    del other.tensors["language_model.encoder.layers.1.mlp.mapping.weight"]
    with pytest.raises(CheckpointError, match=r"another base than there: it has no .*layers\.1\.mlp\.mapping"):
        found(alone)
