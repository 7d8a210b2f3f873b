"""A training of each stage that was ended and goes on gives the bits of one that was not; the reference stays what it was."""

import os
import shutil

import numpy as np
import pytest

from tests.posttrain import runs

DATA = {"sft": "chats", "dpo": "pairs", "simpo": "pairs", "orm": "pairs", "prm": "steps"}


def resumed(world, folder, files, weights, stage, ranks=1, **settings):
    """(an uninterrupted training, the second half of an interrupted one) of four steps."""
    data, folder = files[DATA[stage]], str(folder)
    base = {"pretrained_checkpoint": weights["base"], "training_iters": 4, "save_enabled": True, "resume_training": True}
    whole = world(ranks)(runs.train, stage, os.path.join(folder, "whole"), data, training=base, **settings)
    half = {**base, "exit_interval": 2}
    world(ranks)(runs.train, stage, os.path.join(folder, "half"), data, training=half, **settings)
    return whole, world(ranks)(runs.train, stage, os.path.join(folder, "half"), data, training=base, **settings)


@pytest.mark.parametrize("stage", DATA)
def test_resume_is_bit_equal(world, tmp_path, files, weights, stage):
    (whole,), (second,) = resumed(world, tmp_path, files, weights, stage)
    for name in set(whole["lines"][0]) - {"time_ms", "tokens_per_second"}:
        assert runs.curve(second, name) == runs.curve(whole, name), name
    assert set(second["weights"]) == set(whole["weights"])
    for name, (_, values) in whole["weights"].items():
        np.testing.assert_array_equal(second["weights"][name][1], values, err_msg=name)


def reference(folder):
    from mindspeed_ms.tasks.posttrain.reference import FILE

    with np.load(os.path.join(folder, FILE)) as file:
        return {name: file[name] for name in file.files}


def test_reference_stays_after_training_and_resume(world, tmp_path, files, weights):
    resumed(world, tmp_path, files, weights, "dpo")
    (again,) = world(1)(  # the same, computed anew by the base
        runs.train,
        "dpo",
        str(tmp_path / "again"),
        files["pairs"],
        training={"load_checkpoint": weights["base"], "training_iters": 4},
    )
    found, fresh = reference(tmp_path / "half"), reference(tmp_path / "again")
    assert set(found) == set(fresh) and len(found) == 3
    for name, values in fresh.items():
        np.testing.assert_array_equal(found[name], values)
    assert np.isfinite(again["lines"][0]["loss"])


def test_lost_reference_is_computed_anew_or_asked_for(world, tmp_path, files, weights):
    """Without the file: from the base that is still named; else the error names the option."""
    from mindspeed_ms.tasks.posttrain.reference import FILE

    (whole,), _ = resumed(world, tmp_path, files, weights, "dpo")
    folder, data = str(tmp_path / "half"), files["pairs"]
    longer = {"training_iters": 5, "save_enabled": False, "resume_training": True}
    os.remove(os.path.join(folder, FILE))
    with pytest.raises(Exception, match=r"no log-probabilities of the reference model yet.*name them with --ref-model"):
        world(1)(runs.train, "dpo", folder, data, training=longer)
    (named,) = world(1)(runs.train, "dpo", folder, data, training={**longer, "ref_model": weights["base"]})
    assert runs.curve(named)[:4] == runs.curve(whole)
    with pytest.raises(Exception, match="is of another reference model than"):
        world(1)(runs.train, "dpo", folder, data, training={**longer, "training_iters": 6, "ref_model": weights["other"]})


def test_resume_in_another_layout_reads_the_file(world, tmp_path, files, weights):
    """The weights of the reference are not needed any more, and are not there."""
    shutil.copytree(weights["base"], tmp_path / "base")
    start = {"pretrained_checkpoint": str(tmp_path / "base"), "exit_interval": 2}
    common = {"training_iters": 4, "save_enabled": True, "resume_training": True}
    folder, data = str(tmp_path / "run"), files["pairs"]
    world(1)(runs.train, "dpo", folder, data, training={**common, **start})
    shutil.rmtree(tmp_path / "base")
    before = reference(folder)
    two = world(2)(runs.train, "dpo", folder, data, training=common, parallel={"tensor_model_parallel_size": 2})
    for name, values in reference(folder).items():
        np.testing.assert_array_equal(values, before[name])
    assert len(two[0]["lines"]) == 4


def test_reference_of_the_checkpoint_goes_before_one_that_lies_in_the_folder(world, tmp_path, files, weights):
    """A run goes on elsewhere, where a training against another reference has left its file."""
    (whole,), _ = resumed(world, tmp_path, files, weights, "dpo")
    used, common = tmp_path / "used", {"save_enabled": True, "resume_training": True, "training_iters": 4}
    other = {**common, "pretrained_checkpoint": weights["other"], "exit_interval": 1}
    world(1)(runs.train, "dpo", str(used), files["pairs"], training=other)
    for name in os.listdir(used):
        if name.startswith(("iter", "latest")):
            os.rename(used / name, tmp_path / f"away_{name}")
    shutil.rmtree(tmp_path / "half" / "iter_0000004")
    (tmp_path / "half" / "latest_checkpointed_iteration.txt").write_text("2", encoding="utf-8")
    elsewhere = {**common, "load_checkpoint": str(tmp_path / "half"), "exit_interval": 3}
    world(1)(runs.train, "dpo", str(used), files["pairs"], training=elsewhere)
    (second,) = world(1)(runs.train, "dpo", str(used), files["pairs"], training=common)
    assert runs.curve(second)[-2:] == runs.curve(whole)[-2:]


def test_adapters_have_the_base_as_reference(world, tmp_path, files, weights):
    """ln 2 at the first step, though adapters are loaded that are not zero: the reference is computed without them."""
    lora = {"use_lora": True, "lora_rank": 2, "target_cells": [{"target_cells": [r".*\.mapping"]}]}
    training = {"load_checkpoint": weights["base"], "save_enabled": True}
    (one,) = world(1)(runs.train, "dpo", str(tmp_path / "one"), files["pairs"], training=training, lora=lora)
    assert runs.curve(one)[0] == pytest.approx(np.log(2), abs=1e-6)
    loaded = {**lora, "lora_load": str(tmp_path / "one")}
    (two,) = world(1)(runs.train, "dpo", str(tmp_path / "two"), files["pairs"], training=training, lora=loaded)
    found = [reference(tmp_path / name) for name in ("one", "two")]
    for name, values in found[0].items():
        np.testing.assert_array_equal(values, found[1][name], err_msg=name)
    assert abs(runs.curve(two)[0] - np.log(2)) > 1e-3
    for name, (_, values) in one["weights"].items():
        if not name.endswith(("lora_a", "lora_b")):
            np.testing.assert_array_equal(values, two["weights"][name][1], err_msg=name)


def logits_with_and_without_adapters():
    """Logits with adapters that are not zero, with them switched off, and of the model without them."""
    from mindspore import Tensor

    from mindspeed_ms.core import storage
    from mindspeed_ms.core.tensor_parallel.lora import adapters_switched_off
    from mindspeed_ms.legacy.model.gpt_model import GPTModel
    from mindspeed_ms.testing.parity.runner import start
    from mindspeed_ms.testing.small_trainings import UNTIED, make_config
    from mindspeed_ms.training.model_setup import get_model

    found, tokens = [], Tensor(np.arange(16, dtype=np.int32)[None])
    for lora in ({"use_lora": True, "target_cells": [{"target_cells": [r".*\.mapping", r".*_proj"]}]}, {}):
        runs.reset()
        config = make_config(UNTIED, lora=lora)
        start(config, 7)
        cell = get_model(lambda config=config, **ends: GPTModel(config.model_config, **ends), config)[0].module
        for name, parameter in cell.parameters_and_names():
            if name.endswith("lora_b"):
                storage.write(parameter, Tensor(np.ones(parameter.shape, np.float32)))
        found.append(cell(tokens).asnumpy())
        with adapters_switched_off([cell]):
            found.append(cell(tokens).asnumpy())
        np.testing.assert_array_equal(cell(tokens).asnumpy(), found[-2])
    return found


def test_adapters_are_switched_off_for_the_reference(world):
    ((adapted, off, base, _),) = world(1)(logits_with_and_without_adapters)
    np.testing.assert_array_equal(off, base)
    assert abs(adapted - off).max() > 0.1
