"""Policies of PPO and GRPO: resumed, with a reference, with a critic."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.posttrain import generating, runs

ROOT = Path(__file__).parents[2]
STAGES = ("grpo", "trl_ppo")


@pytest.mark.parametrize("settings", [{"training_iters": 4}, generating.SEVERAL], ids=["one step", "middle of a rollout"])
@pytest.mark.parametrize("stage", STAGES)
def test_resume_is_bit_equal(world, tmp_path, prompts, stage, settings):
    base = {**settings, "save_enabled": True, "resume_training": True}
    (whole,) = world(1)(generating.train, stage, str(tmp_path / "whole"), prompts, "dense", training=base)
    folder = str(tmp_path / "half")
    world(1)(generating.train, stage, folder, prompts, "dense", training={**base, "exit_interval": 2})
    (second,) = world(1)(generating.train, stage, folder, prompts, "dense", training=base)
    for name in set(whole["lines"][0]) - {"time_ms", "tokens_per_second"}:
        assert runs.curve(second, name) == runs.curve(whole, name), name
    for name, (_, values) in whole["weights"].items():
        np.testing.assert_array_equal(second["weights"][name][1], values, err_msg=name)


def test_answers_are_kept_as_long_as_a_checkpoint_needs_them(world, tmp_path, prompts):
    """Also for a run that saves elsewhere."""
    base = {**generating.SEVERAL, "training_iters": 12, "save_enabled": True, "resume_training": True}
    (whole,) = world(1)(generating.train, "grpo", str(tmp_path / "whole"), prompts, "dense", training=base)
    kept = {"keep_checkpoint_max": 1, "save_interval": 6, "exit_interval": 10}
    folder = tmp_path / "half"
    world(1)(generating.train, "grpo", str(folder), prompts, "dense", training={**base, **kept})
    assert sorted(os.listdir(folder / "rollouts")) == ["rollout_0000001.npz", "rollout_0000002.npz"]
    other = {**base, "load_checkpoint": str(folder)}
    (second,) = world(1)(generating.train, "grpo", str(tmp_path / "other"), prompts, "dense", training=other)
    assert runs.curve(second)[-2:] == runs.curve(whole)[-2:]


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_goes_on_in_a_folder_that_another_one_has_used(world, tmp_path, prompts, stage):
    """Reference and answers are those of the checkpoint, and are kept for the next start; not those that lie there."""
    base = {**generating.SEVERAL, "save_enabled": True, "resume_training": True}
    whole, first, used = (str(tmp_path / name) for name in ("whole", "first", "used"))
    world(1)(generating.train, stage, used, prompts, "count", training={**base, "exit_interval": 1, "seed": 3})
    for name in list(os.listdir(used)):
        if name.startswith(("iter", "latest")):
            os.rename(os.path.join(used, name), tmp_path / f"away_{name}")
    world(1)(generating.train, stage, first, prompts, "dense", training={**base, "exit_interval": 2})
    elsewhere = {**base, "load_checkpoint": first, "exit_interval": 3}
    world(1)(generating.train, stage, used, prompts, "dense", training=elsewhere)
    (second,) = world(1)(generating.train, stage, used, prompts, "dense", training=base)
    (expected,) = world(1)(generating.train, stage, whole, prompts, "dense", training=base)
    for name in ("loss", "reward", "kl"):
        assert runs.curve(second, name)[-4:] == runs.curve(expected, name)[-4:], name


def test_damaged_files_of_a_run_are_named(world, tmp_path, prompts):
    folder, base = tmp_path / "run", {**generating.SEVERAL, "save_enabled": True, "resume_training": True}
    world(1)(generating.train, "grpo", str(folder), prompts, training={**base, "exit_interval": 2})
    (folder / "reference.json").write_text('{"weights": ', encoding="utf-8")
    with pytest.raises(Exception, match=r"reference\.json is damaged .*: remove it, and name what"):
        world(1)(generating.train, "grpo", str(folder), prompts, training=base)


def test_a_training_may_lie_in_the_folder_that_it_started_from(world, tmp_path, prompts):
    """Its own files do not make its reference another one."""
    folder, run = str(tmp_path / "hf"), str(tmp_path / "hf" / "run")
    world(1)(generating.train, "grpo", str(tmp_path / "base"), prompts, training={"training_iters": 1, "save_enabled": True})
    words = ["--load-dir", str(tmp_path / "base"), "--save-dir", folder, "--save-model-type", "hf", "--model-type-hf", "llama"]
    done = subprocess.run([sys.executable, "convert_ckpt.py", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    base = {"pretrained_checkpoint": folder, "save_enabled": True, "resume_training": True}
    world(1)(generating.train, "grpo", run, prompts, training={**base, "exit_interval": 1})
    (second,) = world(1)(generating.train, "grpo", run, prompts, training=base)
    assert len(second["lines"]) == 3


def test_damaged_arrays_are_named(tmp_path):
    from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
    from mindspeed_ms.tasks.posttrain.reference import read_arrays

    np.savez(tmp_path / "some.npz", a=np.arange(1000))
    data = (tmp_path / "some.npz").read_bytes()
    for damaged in (b"", data[:50], data[:-30], data[:200] + b"xxxx" + data[204:], b"no zip"):
        (tmp_path / "some.npz").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"some\.npz is damaged"):
            read_arrays(str(tmp_path / "some.npz"))


def test_answers_for_another_plan_are_not_learnt_from(world, tmp_path, prompts):
    """The run goes on with more passes over a rollout than it began with: the kept answers are drawn anew, and a warning."""
    training = {**generating.SEVERAL, "save_enabled": True, "resume_training": True}
    world(1)(generating.train, "grpo", str(tmp_path), prompts, "dense", training={**training, "exit_interval": 2})
    kept = (tmp_path / "rollouts" / "rollout_0000000.npz").read_bytes()
    changed = {**training, "ppo_epochs": 4}
    (result,) = world(1)(generating.train, "grpo", str(tmp_path), prompts, "dense", training=changed)
    assert len(result["lines"]) == 6 and (tmp_path / "rollouts" / "rollout_0000000.npz").read_bytes() != kept


def test_answers_of_a_spare_checkpoint_are_kept(world, tmp_path, prompts):
    """The spare one is older than the rollout that is learnt from now."""
    training = {**generating.SEVERAL, "training_iters": 7, "save_enabled": True, "resume_training": True}
    training |= {"save_interval": 100, "non_persistent_save_interval": 3, "exit_interval": 5}
    world(1)(generating.train, "grpo", str(tmp_path), prompts, training=training)
    assert "rollout_0000000.npz" in os.listdir(tmp_path / "rollouts")


def test_base_is_the_reference_of_adapters(world, tmp_path, prompts):
    (result,) = world(1)(
        generating.train, "grpo", str(tmp_path), prompts, "dense", lora=generating.LORA, optimizer={"learning_rate": 0.05}
    )
    kl = runs.curve(result, "kl")
    assert abs(kl[0]) < 1e-9 and kl[-1] > 1e-4


def test_adapters_are_no_part_of_a_reference_that_is_named(world, tmp_path, prompts):
    """The base by its name is the same reference as the base."""
    saved = {"training_iters": 1, "save_enabled": True}
    world(1)(generating.train, "grpo", str(tmp_path / "base"), prompts, training=saved)
    base, settings = str(tmp_path / "base"), {"lora": generating.LORA, "optimizer": {"learning_rate": 0.05}}
    curves = []
    for name, own in (("own", {}), ("named", {"ref_model": base})):
        training = {"pretrained_checkpoint": base, **own}
        (result,) = world(1)(generating.train, "grpo", str(tmp_path / name), prompts, "dense", training=training, **settings)
        curves.append(runs.curve(result, "kl"))
    assert curves[0] == curves[1] and curves[0][-1] > 1e-4


def test_reference_is_another_checkpoint(world, tmp_path, prompts):
    """Its divergence is there at the first step; the policy starts from its own weights all the same."""
    saved = {"training_iters": 1, "save_enabled": True, "seed": 5}
    world(1)(generating.train, "grpo", str(tmp_path / "other"), prompts, training=saved)
    results = [
        world(1)(generating.train, "grpo", str(tmp_path / name), prompts, training={"grpo_beta": 0.1, **training})[0]
        for name, training in (("own", {}), ("with", {"ref_model": str(tmp_path / "other")}))
    ]
    assert runs.curve(results[0], "kl")[0] == 0 and runs.curve(results[1], "kl")[0] > 0.01
    assert runs.curve(results[0], "reward")[0] == runs.curve(results[1], "reward")[0]
    assert results[0]["lines"][0]["response_length"] == results[1]["lines"][0]["response_length"]


def test_reference_of_another_run_is_refused(world, tmp_path, prompts):
    folder, base = str(tmp_path / "run"), {"training_iters": 4, "save_enabled": True, "resume_training": True}
    world(1)(generating.train, "grpo", folder, prompts, training={**base, "exit_interval": 2})
    world(1)(generating.train, "grpo", str(tmp_path / "other"), prompts, training={"training_iters": 1, "save_enabled": True})
    with pytest.raises(Exception, match="is of another reference model than"):
        world(1)(generating.train, "grpo", folder, prompts, training={**base, "ref_model": str(tmp_path / "other")})
    os.remove(os.path.join(folder, "reference.json"))
    with pytest.raises(Exception, match=r"no reference\.json beside .*name it with --ref-model"):
        world(1)(generating.train, "grpo", folder, prompts, training=base)


def test_a_language_model_gets_a_critic(world, tmp_path, prompts):
    """It is the reference too; the base of a resumed run is found again, and with its weights changed it is refused."""
    base = {"training_iters": 1, "save_enabled": True}
    world(1)(generating.train, "grpo", str(tmp_path / "base"), prompts, training=base)
    training = {"pretrained_checkpoint": str(tmp_path / "base"), "save_enabled": True, "resume_training": True}
    run = str(tmp_path / "run")
    (first,) = world(1)(generating.train, "trl_ppo", run, prompts, training={**training, "exit_interval": 2})
    assert abs(runs.curve(first, "kl")[0]) < 1e-9 and any(name.startswith("reward_head") for name in first["weights"])
    (second,) = world(1)(generating.train, "trl_ppo", run, prompts, training=training)
    assert len(second["lines"]) == 3
    weights = next((tmp_path / "base").glob("iter_*"))
    (weights / "another_file").write_text("x", encoding="utf-8")
    with pytest.raises(Exception, match="is of another reference model than"):
        world(1)(generating.train, "trl_ppo", run, prompts, training={**training, "training_iters": 5})


def test_a_policy_generates_and_is_trained_on_without_its_critic(world, tmp_path, prompts, policy):
    assert len(world(1)(continued, policy)[0]) == 4
    training = {"pretrained_checkpoint": policy}
    (result,) = world(1)(generating.train, "grpo", str(tmp_path), prompts, training=training)
    assert abs(runs.curve(result, "kl")[0]) < 1e-9 and not any(name.startswith("reward") for name in result["weights"])


def continued(folder):
    """Ids that the model of a folder continues with."""
    from mindspeed_ms.inference.engine import Engine
    from mindspeed_ms.inference.loading import load
    from mindspeed_ms.inference.sampling import SamplingParams

    runs.reset()
    engine = Engine(load(folder, slots=1).runner)
    (answer,) = engine.generate([(1, 2)], SamplingParams(max_new_tokens=4, temperature=0))
    return answer.token_ids


def test_checks_of_a_start_leave_the_critic_out(tmp_path, policy):
    from mindspeed_ms.core.dist_checkpointing.folders import newest_manifest
    from mindspeed_ms.training.start_checks import check_resumed

    config = runs.configuration("grpo", tmp_path, "data", model=generating.SMALL, training={"num_generations": 4})
    check_resumed(*newest_manifest(policy, None), config, False, True)


def test_a_policy_is_converted_without_its_critic(tmp_path, policy):
    from safetensors.numpy import load_file

    words = ["--load-dir", policy, "--save-dir", str(tmp_path / "hf"), "--save-model-type", "hf", "--model-type-hf", "llama"]
    done = subprocess.run([sys.executable, "convert_ckpt.py", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "the critic's head, and the optimizer's state, are left out" in done.stderr + done.stdout
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    assert "lm_head.weight" in load_file(file) and not [name for name in load_file(file) if "reward" in name]
