"""A checkpoint of another model, and what a continued run does otherwise, are told."""

import os
import shutil

import pytest

from mindspeed_ms.testing import checkpoint_runs as runs
from tests.checkpoint.test_options import fails, resume


@pytest.fixture(scope="module")
def saved(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    world(1)(runs.train, folder, training={"exit_interval": 2})
    return folder


def other_model(folder, load):
    """Same shapes, another meaning: refused where the training goes on, a warning for weights or without load_strict."""
    heads = {"num_attention_heads": 8}
    text = fails(folder / "a", load, sizes=heads)
    assert "num_attention_heads is 8 here and 4 there" in text, text
    assert "norm_epsilon" in fails(folder / "b", load, sizes={"norm_epsilon": 0.125})
    loose = resume(folder / "c", load, {"load_strict": False}, sizes=heads)
    weights = runs.train(folder / "d", training={"load_checkpoint": str(load)}, sizes=heads)
    return [any("of another model" in line for line in result["log"]) for result in (loose, weights)]


def test_another_model_of_the_same_shapes(world, tmp_path, saved):
    assert world(1)(other_model, tmp_path, saved) == [[True, True]]


def test_what_makes_another_model():
    from mindspeed_ms.config.same_model import differences, has_effect, is_same

    own = {
        "normalization": "FusedRMSNorm",
        "apply_layernorm_1p": True,
        "group_query_attention": False,
        "num_query_groups": 4,
        "rotary_base": 1.0,
        "rope_scaling": {"type": "yarn", "factor": 4.0},
        "position_embedding_type": "rope",
        "hidden_dropout": 0.0,
    }
    saved = {
        **own,
        "normalization": "RMSNorm",
        "apply_layernorm_1p": False,
        "num_query_groups": 2,
        "rotary_base": 2.0,
        "rope_scaling": {"type": "yarn", "factor": 8.0},
        "hidden_dropout": 0.5,
    }

    def names(saved, own):
        return [path.partition(".")[2] for path, _, _ in differences(saved, own)]

    assert names({"model_config": saved}, {"model_config": own}) == ["rotary_base", "rope_scaling", "apply_layernorm_1p"]
    assert names({}, {"model_config": own}) == names({"model_config": {}}, {"model_config": own}) == []
    own["position_embedding_type"] = "none"
    assert names({"model_config": saved}, {"model_config": own}) == ["position_embedding_type", "apply_layernorm_1p"]
    wide = {"sliding_window": None, "window_attn_skip_freq": None, "qk_layernorm": False}
    own = {**wide, "window_attn_skip_freq": [2]}
    assert names({"model_config": wide}, {"model_config": own}) == []
    own = {"sliding_window": 8, "window_attn_skip_freq": [2], "qk_layernorm": True}
    assert names({"model_config": wide}, {"model_config": own}) == ["qk_layernorm", "sliding_window", "window_attn_skip_freq"]
    gelu = {"hidden_act": "gelu", "mlp_has_bias": True, "bias_gelu_fusion": True, "kv_lora_rank": 8}
    assert has_effect("model_config.bias_gelu_fusion", gelu) and not has_effect("model_config.kv_lora_rank", gelu)
    for change in ({"hidden_act": "swiglu"}, {"mlp_has_bias": False}):
        assert not has_effect("model_config.bias_gelu_fusion", {**gelu, **change})
    experts, dense = {"num_experts": 8, "moe_router_topk": 2}, {"num_experts": 1, "moe_router_topk": 1}
    assert names({"moe_config": experts}, {"moe_config": {**experts, "moe_router_topk": 4}}) == ["moe_router_topk"]
    assert names({"moe_config": experts}, {"moe_config": dense}) == ["num_experts"]
    assert is_same("true", True) and is_same("GELU", "gelu") and not is_same("gelu", "relu") and not is_same(None, 0)


def own_checkpoints(folder, load):
    resume(folder, load, {"save_interval": 1, "save_enabled": True})
    return resume(folder, load)["log"]


def test_checkpoints_that_a_load_leaves_aside_are_named(world, tmp_path, saved):
    (log,) = world(1)(own_checkpoints, tmp_path / "own", saved)
    assert any("has checkpoints of its own" in line for line in log)


def test_a_damaged_tracker_says_what_to_do(tmp_path):
    from mindspeed_ms.core.dist_checkpointing import folders
    from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError

    path = os.path.join(tmp_path, folders.TRACKER_FILE)
    open(path, "w").close()
    with pytest.raises(CheckpointError, match="Delete it"):
        folders.read_tracker(tmp_path)


def test_an_older_number_in_the_tracker_is_told(world, tmp_path, saved):
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    shutil.copytree(folder / "iter_0000002", folder / "iter_0000004")
    os.utime(folder / "latest_checkpointed_iteration.txt")
    (log,) = world(1)(resume, tmp_path / "again", folder)
    assert any("iterations [4]" in line and "left aside" in line for line in log["log"]), log["log"]
