"""use_checkpoint_args: the model is the checkpoint's, whatever was typed."""

import os

import pytest

from mindspeed_ms.config import (
    AllConfig,
    ConfigError,
    TransformerConfig,
    argument_parser,
    init_configs_from_args,
    init_configs_from_dict,
    page,
    require_available,
)
from mindspeed_ms.config.__main__ import main as config_command
from mindspeed_ms.config.errors import WarningNotice
from mindspeed_ms.testing import checkpoint_runs as runs
from tests.checkpoint.test_format import damage
from tests.tools.test_checkpoint import CONFIG, save

TYPED = ["--use-checkpoint-args", "--micro-batch-size", "1", "--train-iters", "4", "--lr", "0.01"]


@pytest.fixture
def saved(tmp_path):
    save(tmp_path / "run")
    return str(tmp_path / "run")


def read(*words):
    return init_configs_from_args(argument_parser().parse_args([*TYPED, *words]))


def test_the_checkpoint_wins(saved):
    all_config = read(
        "--load",
        saved,
        "--num-layers",
        "7",
        "--norm-epsilon",
        "0.5",
        "--hidden-size",
        "16",
        "--swiglu",
        "--normalization",
        "RMSNorm",
        "--use-fused-rmsnorm",
    )
    model = all_config.model_config
    for name, value in CONFIG["model_config"].items():
        assert getattr(model, name) == ("FusedRMSNorm" if name == "normalization" else value), name
    assert model.norm_epsilon == 1e-5 and model.num_query_groups == 4 and model.qkv_has_bias
    warned = [notice for notice in all_config.notices if isinstance(notice, WarningNotice)]
    assert len(warned) == 2 and all("is not used: the checkpoint has" in notice for notice in warned)
    assert f"warning: {warned[0]}" in page(all_config).splitlines()
    assert "--num-layers = 7" in warned[0] and "has 4" in warned[0] and "--norm-epsilon = 0.5" in warned[1]
    assert "iter_0000007" in all_config.provenance["model_config.ffn_hidden_size"]
    require_available(all_config)


def test_what_was_typed_stays_where_megatron_keeps_it(saved):
    all_config = read(
        "--load",
        saved,
        "--seq-length",
        "32",
        "--vocab-size",
        "20",
        "--make-vocab-size-divisible-by",
        "8",
        "--tensor-model-parallel-size",
        "2",
    )
    model = all_config.model_config
    (warned,) = [notice for notice in all_config.notices if isinstance(notice, WarningNotice)]
    assert "--seq-length = 32" in warned and "stays although the checkpoint has 8" in warned
    assert model.seq_length == 32 and model.vocab_size == 32 and model.num_layers == 4


def test_check_accepts_it(capsys, saved):
    assert config_command(["check", *TYPED, "--load", saved]) == 0
    text = capsys.readouterr().out
    assert "num_layers" in text and "not available" not in text


def test_without_a_checkpoint(tmp_path, saved):
    with pytest.raises(ConfigError, match="none is named: set load_checkpoint"):
        read()
    for flag in ("--load", "--pretrained-checkpoint"):  # what the model would be is no further problem
        with pytest.raises(
            ConfigError, match=f"^command line: --use-c.* {tmp_path}/nowhere holds no checkpoint: it does not exist"
        ):
            read(flag, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"^training_config.use_checkpoint_args = True: takes .* it does not exist"):
        init_configs_from_dict({"training_config": {"use_checkpoint_args": True, "load_checkpoint": str(tmp_path / "nowhere")}})
    with pytest.raises(ConfigError, match="no checkpoint of iteration 3"):
        read("--load", saved, "--ckpt-step", "3")
    damage(tmp_path / "run" / "iter_0000007" / "manifest.json", "flip")
    with pytest.raises(ConfigError, match=r"manifest\.json is damaged"):
        read("--load", saved)


@pytest.mark.parametrize("arguments", [["--resume-training"], ["--load", "{new}"]])
def test_the_first_launch_starts_from_the_beginning(tmp_path, saved, arguments):
    """The usual script names the same folder for loading and saving, which is empty at first."""
    new = str(tmp_path / "new")
    words = [
        "--save",
        new,
        *(word.format(new=new) for word in arguments),
        "--num-layers",
        "2",
        "--hidden-size",
        "16",
        "--seq-length",
        "8",
        "--num-attention-heads",
        "4",
        "--max-position-embeddings",
        "8",
        "--vocab-size",
        "24",
    ]
    first = read(*words)
    assert first.model_config.num_layers == 2 and any("holds no checkpoint yet" in notice for notice in first.notices)
    with pytest.raises(ConfigError, match=f"{new} holds none"):
        read(*words, "--exit-on-missing-checkpoint")
    assert read(*words, "--pretrained-checkpoint", saved).model_config.num_layers == 4
    os.rename(saved, new)
    assert read(*words).model_config.num_layers == 4


@pytest.mark.parametrize("word", ["y", "YES", "On", "1", 1])
def test_the_switch_reads_as_every_switch(saved, word):
    training = {"use_checkpoint_args": word, "load_checkpoint": saved}
    assert init_configs_from_dict({"training_config": training}).model_config.num_layers == 4


def test_a_model_that_is_made_by_hand_comes_too_early(saved):
    training = read("--load", saved).training_config
    with pytest.raises(ConfigError, match="made by hand"):
        require_available(AllConfig(model_config=TransformerConfig(**CONFIG["model_config"]), training_config=training))


def first_launch(folder):
    """The same arguments, launched twice."""
    arguments = {"load_checkpoint": str(folder), "resume_training": True, "use_checkpoint_args": True}
    first = runs.train(folder, training={**arguments, "exit_interval": 2})
    return sorted(first["losses"]), sorted(runs.train(folder, training=arguments, sizes={"num_layers": 3})["losses"])


def test_the_same_script_starts_and_goes_on(world, tmp_path):
    assert world(1)(first_launch, tmp_path / "run") == [([1, 2], [1, 2, 3, 4])]


def continued(folder, load):
    """A run that knows nothing of its model goes on."""
    first = runs.train(load, training={"exit_interval": 2}, sizes={"hidden_act": "swiglu", "normalization": "RMSNorm"})
    wrong = {"num_layers": 3, "num_attention_heads": 8, "ffn_hidden_size": 48}
    second = runs.train(
        folder, training={"load_checkpoint": str(load), "resume_training": True, "use_checkpoint_args": True}, sizes=wrong
    )
    assert any(line.startswith("model_config.num_layers = 3") and "is not used" in line for line in second["log"])
    return sorted(first["losses"]) + sorted(second["losses"])


def test_training_goes_on_with_the_checkpoints_model(world, tmp_path):
    assert world(1)(continued, tmp_path / "b", tmp_path / "a") == [[1, 2, 3, 4]]


def test_mappings_and_experts_are_the_checkpoints_too(monkeypatch):
    from mindspeed_ms.config import from_checkpoint
    from mindspeed_ms.config.settings import nested_settings
    from mindspeed_ms.core.dist_checkpointing.manifest import Manifest

    def taken(saved, typed):
        settings = nested_settings({"training_config": {"use_checkpoint_args": True}, **typed})
        found = from_checkpoint.FoundCheckpoint("there", "there", Manifest(1, args=saved), False)
        monkeypatch.setattr(from_checkpoint, "_find", lambda settings: found)
        from_checkpoint.ask_checkpoint(settings)
        values = {path: setting.value for path, setting in settings.by_path.items() if not path.startswith("training")}
        return values, [str(notice).split(" is not used")[0] for notice in settings.notices]

    scaled = {"model_config": {"rope_scaling": {"type": "yarn", "factor": 4.0}}}
    typed = {"model_config": {"rope_scaling": {"factor": 8.0}}}
    lost = ["model_config.rope_scaling.factor = 8.0 ()"]
    assert taken(scaled, typed) == ({"model_config.rope_scaling.type": "yarn", "model_config.rope_scaling.factor": 4.0}, lost)
    assert taken({"model_config": {"rope_scaling": None}}, typed) == ({}, lost)
    experts = {"model_config": {"num_experts": None}, "moe_config": {"num_experts": 8, "moe_router_topk": 2}}
    values, told = taken(experts, {"model_config": {"num_experts": 4}})
    assert values == {"model_config.num_experts": None, "moe_config.num_experts": 8, "moe_config.moe_router_topk": 2}
    assert told == ["model_config.num_experts = 4 ()"]
