"""DPO, SimPO and reward models: losses of a numpy account, in every layout and split into micro-batches."""

import numpy as np
import pytest

from mindspeed_ms.testing import small_trainings
from tests.posttrain import runs

LAYOUTS = {
    "tp": ({"tensor_model_parallel_size": 2}, {}),
    "sp": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
    "pp": ({"pipeline_model_parallel_size": 2}, {}),
    "vpp": ({"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}, {}),
    "cp": ({"context_parallel_size": 2}, {}),
    "dp": ({"zero_level": "z3"}, {}),
    "lengths": ({"pipeline_model_parallel_size": 2, "variable_seq_lengths": True}, {"dataset": {"pad_to_multiple_of": 4}}),
}
STAGES = ("dpo", "simpo", "orm")
KINDS = ("chosen", "rejected")


def settings_of(stage, weights, **training):
    """Keywords of `runs.train`: from the base; the reference of DPO is another model, so that margins are not 0."""
    training = {"load_checkpoint": weights["base"], **training}
    if stage == "dpo":
        training.setdefault("ref_model", weights["other"])
    return {"training": training}


@pytest.fixture(scope="module")
def ones(world, tmp_path_factory, files, weights):
    """Training of each stage on one rank."""
    folder = tmp_path_factory.mktemp("ones")
    return {
        stage: world(1)(runs.train, stage, str(folder / stage), files["pairs"], **settings_of(stage, weights))[0]
        for stage in STAGES
    }


@pytest.fixture(scope="module")
def sums(world, tmp_path_factory, files, weights, ones):
    """{model: {kind: summed log-probabilities of the first step's answers}}, and their lengths."""
    result, order = {}, ones["simpo"]["order"][:4]
    for name in ("base", "other"):
        folder = str(tmp_path_factory.mktemp("logits"))
        arguments = {"stage": "simpo", "load": weights[name]}
        logits, batch = world(1)(runs.logits_of, folder, files["pairs"], order, **arguments)[0]
        masks = {kind: batch[f"{kind}_loss_mask"] for kind in KINDS}
        result[name] = {
            kind: (runs.log_probabilities(logits[kind], batch[f"{kind}_labels"]) * masks[kind]).sum(1) for kind in KINDS
        }
        result["lengths"] = {kind: masks[kind].sum(1).astype(np.float64) for kind in KINDS}
    return result


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def account(loss, z, beta, smoothing=0.0):
    """Loss of margins in float64."""
    if loss == "sigmoid":
        return -(1 - smoothing) * np.log(sigmoid(beta * z)) - smoothing * np.log(sigmoid(-beta * z))
    return np.maximum(0, 1 - beta * z) if loss == "hinge" else (z - 1 / (2 * beta)) ** 2


def first_step(world, folder, files, weights, stage, **training):
    settings = settings_of(stage, weights, training_iters=1, **training)
    return world(1)(runs.train, stage, str(folder), files["pairs"], **settings)[0]["lines"][0]


@pytest.mark.parametrize(
    "training",
    [
        {"dpo_loss_type": "sigmoid", "dpo_label_smoothing": 0.2, "dpo_beta": 0.5, "pref_ftx": 0.3},
        {"dpo_loss_type": "hinge"},
        {"dpo_loss_type": "ipo"},
        {"dpo_loss_type": "kto_pair"},
        {"dpo_reference_free": True, "ref_model": None},
    ],
    ids=["sigmoid", "hinge", "ipo", "kto_pair", "free"],
)
def test_dpo_is_that_of_the_account(world, tmp_path, files, weights, sums, training):
    line = first_step(world, tmp_path, files, weights, "dpo", **training)
    beta, kind, free = training.get("dpo_beta", 0.1), training.get("dpo_loss_type", "sigmoid"), "ref_model" in training
    ratios = {name: sums["base"][name] - (0 if free else sums["other"][name]) for name in KINDS}
    if kind == "kto_pair":  # in micro-batches of two
        chosen, rejected = (ratios[name].reshape(2, 2) for name in KINDS)
        kl = [np.maximum(values.mean(1, keepdims=True), 0) for values in (chosen, rejected)]
        losses = (2 - sigmoid(beta * (chosen - kl[1])) - sigmoid(beta * (kl[0] - rejected))) / 2
        assert line["kl/chosen"] == pytest.approx(kl[0].mean(), abs=1e-6)
    else:
        compared = {name: ratios[name] / sums["lengths"][name] if kind == "ipo" else ratios[name] for name in KINDS}
        z = compared["chosen"] - compared["rejected"]
        losses = account(kind, z, beta, training.get("dpo_label_smoothing", 0.0))
    losses = losses - training.get("pref_ftx", 0.0) * np.ravel(sums["base"]["chosen"] / sums["lengths"]["chosen"]).reshape(
        losses.shape
    )
    assert line["loss"] == pytest.approx(losses.mean(), rel=1e-6)
    for name in KINDS:
        assert line[f"rewards/{name}"] == pytest.approx(beta * ratios[name].mean(), rel=1e-5)
        assert line[f"response_length/{name}"] == sums["lengths"][name].mean()
    assert line["rewards/accuracies"] == (ratios["chosen"] > ratios["rejected"]).mean()
    assert line["rewards/margins"] == pytest.approx(beta * (ratios["chosen"] - ratios["rejected"]).mean(), rel=1e-5)


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo"])
def test_simpo_is_that_of_the_account(world, tmp_path, files, weights, sums, kind):
    training = {"simpo_loss_type": kind, "simpo_beta": 2.0, "gamma_beta_ratio": 0.5}
    smoothing = 0.1 if kind == "sigmoid" else 0.0
    line = first_step(world, tmp_path, files, weights, "simpo", simpo_label_smoothing=smoothing, **training)
    means = {name: sums["base"][name] / sums["lengths"][name] for name in KINDS}
    losses = account(kind, means["chosen"] - means["rejected"] - 0.5, 2.0, smoothing)
    assert line["loss"] == pytest.approx(losses.mean(), rel=1e-6)
    assert line["rewards/chosen"] == pytest.approx(2.0 * means["chosen"].mean(), rel=1e-6)


def test_orm_is_that_of_the_account(world, tmp_path, files, weights, ones):
    order = ones["orm"]["order"][:4]
    values, batch = world(1)(runs.logits_of, str(tmp_path), files["pairs"], order, stage="orm", load=weights["base"])[0]
    rewards = {kind: values[kind][np.arange(4), batch[f"{kind}_length"] - 1] for kind in KINDS}
    line = ones["orm"]["lines"][0]
    assert line["loss"] == pytest.approx(-np.log(sigmoid(rewards["chosen"] - rewards["rejected"])).mean(), rel=1e-6)
    assert line["rewards/accuracies"] == (rewards["chosen"] > rewards["rejected"]).mean()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stage", STAGES)
def test_layouts_give_one_curve(world, tmp_path, files, weights, ones, stage, layout):
    parallel, sections = LAYOUTS[layout]
    settings = {**settings_of(stage, weights), **sections}
    if layout == "dp":
        settings["dataset"] = {"batch_size": 1}
    results = world(2)(runs.train, stage, str(tmp_path), files["pairs"], parallel=parallel, **settings)
    small_trainings.assert_equal_trainings(
        [runs.with_curves(result) for result in results], [runs.with_curves(ones[stage])], False, tolerance=1e-5
    )


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_does_not_change_the_gradient(world, tmp_path, files, weights, ones, stage, rows):
    settings = {**settings_of(stage, weights), "dataset": {"batch_size": rows}}
    (split,) = world(1)(runs.train, stage, str(tmp_path), files["pairs"], **settings)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(runs.curve(split, name), runs.curve(ones[stage], name), rtol=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_experts_on_two_ranks_give_one_curve(world, tmp_path, files, weights, stage):
    training = {"load_checkpoint": weights["moe"], "training_iters": 2}
    settings = {"training": training, "moe": runs.EXPERTS, "dataset": {"batch_size": 1}}
    (one,) = world(1)(runs.train, stage, str(tmp_path / "one"), files["pairs"], **settings)
    two = world(2)(
        runs.train, stage, str(tmp_path / "two"), files["pairs"], parallel={"expert_model_parallel_size": 2}, **settings
    )
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(runs.curve(two[0], name), runs.curve(one, name), rtol=1e-5)


@pytest.mark.parametrize("stage", ["simpo", "orm"])
def test_tied_embeddings_on_two_stages(world, tmp_path, files, stage):
    (one,) = world(1)(runs.train, stage, str(tmp_path / "one"), files["pairs"], base="TIED")
    parallel = {"pipeline_model_parallel_size": 2}
    two = world(2)(runs.train, stage, str(tmp_path / "two"), files["pairs"], base="TIED", parallel=parallel)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(runs.curve(two[0], name), runs.curve(one, name), rtol=1e-5)


def test_validation_pairs_have_a_reference_too(world, tmp_path, files, weights):
    from mindspeed_ms.training.metrics import read_metrics

    training = {"load_checkpoint": weights["base"], "eval_interval": 1, "eval_iters": 1, "training_iters": 1}
    settings = {"training": training, "dataset": {"split": "50,50,0"}}
    (result,) = world(1)(runs.train, "dpo", str(tmp_path), files["pairs"], **settings)
    assert runs.curve(result) == [pytest.approx(np.log(2), abs=1e-6)]
    (line,) = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "valid_loss" in line]
    assert 0 < abs(line["valid_loss"] - np.log(2)) < 0.2
    assert line["valid_rewards/accuracies"] <= 1 and line["valid_response_length/chosen"] > 1
    assert "valid_perplexity" not in line  # of a preference there is none


def test_head_of_a_reward_model_is_trained_beside_adapters(world, tmp_path, files, weights):
    lora = {"use_lora": True, "lora_rank": 2, "target_cells": [{"target_cells": [r".*\.mapping"]}]}
    training = {"load_checkpoint": weights["base"], "save_enabled": True}
    folder = str(tmp_path)
    (first,) = world(1)(runs.train, "orm", folder, files["pairs"], training=training, lora=lora)
    assert "reward_head.weight" in first["changed"]
    resumed = {"resume_training": True, "training_iters": 4, "save_enabled": True, "load_checkpoint": folder}
    (second,) = world(1)(runs.train, "orm", folder, files["pairs"], training=resumed, lora=lora)
    assert runs.curve(second)[:3] == runs.curve(first) and len(second["lines"]) == 4


@pytest.mark.parametrize("stage", STAGES)
def test_starts_from_megatrons_checkpoints(world, tmp_path, files, stage):
    from mindspeed_ms.config import init_configs_from_dict
    from mindspeed_ms.core.dist_checkpointing.megatron.writer import MegatronTarget
    from mindspeed_ms.testing.megatron_checkpoints import MadeUpReader

    config = {"model_config": small_trainings.UNTIED, "parallel_config": {"tensor_model_parallel_size": 2}}
    reader = MadeUpReader(init_configs_from_dict(config))
    for values in reader.arrays.values():
        values *= 0.1
    MegatronTarget(reader, init_configs_from_dict(config)).write(str(tmp_path / "megatron"))
    training = {"pretrained_checkpoint": str(tmp_path / "megatron"), "training_iters": 1}
    (result,) = world(1)(runs.train, stage, str(tmp_path / "run"), files["pairs"], training=training)
    assert np.isfinite(runs.curve(result)[0])
    assert stage != "dpo" or runs.curve(result)[0] == pytest.approx(np.log(2), abs=1e-6)


def test_tokens_of_a_pair_are_those_of_two_sequences(ones):
    line = ones["simpo"]["lines"][0]
    assert line["tokens_per_second"] * line["time_ms"] / 1000 == pytest.approx(4 * 2 * runs.LENGTH)


def test_rewards_are_drawn_below_the_loss(tmp_path, ones):
    import json

    from matplotlib.image import imread

    from mindspeed_ms.training.metrics import draw_loss_curve

    heights = []
    for stage, names in (("orm", {"iteration", "loss"}), ("orm", set(ones["orm"]["lines"][0]))):
        lines = [json.dumps({name: line[name] for name in names}) for line in ones[stage]["lines"]]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        draw_loss_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")
        heights.append(imread(tmp_path / "curve.png").shape[0])
    assert heights == [600, 1200]  # loss; loss, accuracy, rewards


def test_first_loss_of_dpo_is_ln_2(world, tmp_path, files, weights):
    line = first_step(world, tmp_path, files, weights, "dpo", ref_model=None)
    assert line["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert abs(line["rewards/margins"]) < 1e-5
