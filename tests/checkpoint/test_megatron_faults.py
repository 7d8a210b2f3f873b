"""Megatron checkpoints that are incomplete, damaged, of another model or layout, or say less than usual."""

import os
import pickle
import shutil
import zipfile
from types import SimpleNamespace

import pytest

from mindspeed_ms.core.dist_checkpointing import load
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.megatron.arguments import true_vocabulary
from mindspeed_ms.core.dist_checkpointing.megatron.files import is_megatron_folder, parallel_sizes
from mindspeed_ms.core.dist_checkpointing.megatron.manifest import read_megatron_manifest
from mindspeed_ms.core.dist_checkpointing.megatron.writer import MegatronTarget
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.core.dist_checkpointing.torch_file import TensorReference, TensorToWrite, read_torch_file, write_torch_file
from mindspeed_ms.testing.megatron_checkpoints import MadeUpReader
from mindspeed_ms.tools.checkpoint.__main__ import main
from mindspeed_ms.tools.converter.__main__ import main as convert_ckpt
from tests.checkpoint.test_checkpoint_args import read
from tests.checkpoint.test_megatron import GPT, LLAMA, TP2, configured, made_up


@pytest.fixture
def saved(tmp_path):
    """A checkpoint with tied embeddings on two stages and two tensor-parallel ranks."""
    return made_up("core, tied, uneven stages").write(str(tmp_path))


def change(path, alter):
    """Write a file anew after `alter(tree)`."""
    tree = read_torch_file(path)
    alter(tree)
    write_torch_file(path, tree)


def error_of(path):
    with pytest.raises(CheckpointError) as error:
        read_megatron_manifest(path)
    text = str(error.value)
    assert "\n" not in text
    return text


def file_of(saved, rank):
    return os.path.join(saved, f"mp_rank_{rank}", "model_optim_rng.pt")


def test_a_missing_rank(saved):
    shutil.rmtree(os.path.join(saved, "mp_rank_01_001"))
    text = error_of(saved)
    assert "mp_rank_01_001/model_optim_rng.pt is missing (tensor 2, pipeline 2, expert 1 parallel by its args)" in text


def test_a_rank_of_another_layout(saved):
    shutil.copytree(os.path.join(saved, "mp_rank_00_001"), os.path.join(saved, "mp_rank_00_002"))
    assert "holds mp_rank_00_002, which no rank of the layout saves" in error_of(saved)


def test_a_truncated_file(saved):
    path = file_of(saved, "01_000")
    with open(path, "r+b") as file:
        file.truncate(os.path.getsize(path) // 2)
    assert path in error_of(saved)


def test_ranks_that_disagree(saved, capsys):
    name, path = "decoder.layers.0.input_layernorm.weight", file_of(saved, "01_000")
    place = read_torch_file(path)["model"][name].start
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(b"\0\0\0\1")
    with CheckpointReader(saved, read_megatron_manifest(saved)) as reader:
        problem, *_ = reader.verify()
    assert "mp_rank_00_000/model_optim_rng.pt and mp_rank_01_000/model_optim_rng.pt hold different values of" in problem
    assert "layers.0.input_norm.gamma" in problem
    assert main(["verify", saved]) == 1 and problem in capsys.readouterr().out


def test_a_layout_that_is_not_that_of_the_arguments(saved):
    for rank in ("00_000", "00_001", "01_000", "01_001"):
        change(file_of(saved, rank), lambda tree: setattr(tree["args"], "tensor_model_parallel_size", 4))
    assert "mp_rank_02_000/model_optim_rng.pt" in error_of(saved) and "tensor 4" in error_of(saved)


def test_shapes_against_arguments(saved):
    for rank in ("00_000", "00_001", "01_000", "01_001"):
        change(file_of(saved, rank), lambda tree: setattr(tree["args"], "ffn_hidden_size", 32))
    text = error_of(saved)
    assert text.startswith(file_of(saved, "00_000")) and "mlp.linear_fc1.weight has shape [12, 16], expected [16, 16]" in text


def test_tensors_missing_and_left_over(saved):
    def alter(tree):
        tree["model"]["decoder.layers.0.mlp.what.weight"] = tree["model"].pop("decoder.layers.0.mlp.linear_fc1.weight")

    change(file_of(saved, "00_000"), alter)
    text = error_of(saved)
    assert "missing: decoder.layers.0.mlp.linear_fc1.weight" in text
    assert "left over: decoder.layers.0.mlp.what.weight" in text


@pytest.mark.parametrize(
    "alter, words",
    [
        (lambda tree: tree["optimizer"]["state"].pop(3), "optimizer state 3 (decoder.layers.0"),
        (lambda tree: tree["optimizer"]["state"].update({99: {}}), "optimizer states [99] belong to no parameter"),
        (
            lambda tree: tree["optimizer"]["state"][1].update(exp_avg=tree["optimizer"]["state"][0]["exp_avg"]),
            "exp_avg of optimizer parameter 1 has shape [16, 16], expected [12, 16]",
        ),
        (lambda tree: tree["optimizer"]["param_groups"][0]["params"].pop(), "parameter group 0 of the optimizer has"),
        (lambda tree: tree.update(iteration=8), "is of iteration"),
        (lambda tree: tree.update(checkpoint_version=1.0), "has checkpoint_version 1.0, whose rows of query, key"),
    ],
)
def test_a_damaged_optimizer(saved, alter, words):
    change(file_of(saved, "00_000"), alter)
    text = error_of(saved)
    assert words in text and "mp_rank_00_00" in text


def test_a_flat_buffer_of_another_size(tmp_path):
    saved = made_up("core, tied, distributed").write(str(tmp_path))
    path = os.path.join(saved, "mp_rank_00_001", "distrib_optim.pt")

    def alter(tree):
        ((dtypes, entry),) = tree[0].items()
        tree[0][dtypes] = {name: shorter(value) for name, value in entry.items()}

    def shorter(value):
        if not isinstance(value, TensorReference):
            return value
        return TensorReference(value.path, value.dtype, (value.numel - 64,), (1,), 0, value.storage)

    change(path, alter)
    text = error_of(saved)
    assert path in text and "do not fill by Megatron's rules" in text
    os.remove(path)
    assert "mp_rank_00_001/distrib_optim.pt is missing (its args say use_distributed_optimizer)" in error_of(saved)


LINEAR = "decoder.layers.0.mlp.linear_fc2.weight"
NORM = "decoder.layers.0.pre_mlp_layernorm.weight"


def half(tree, name):
    tree["model"][name] = TensorToWrite("float16", tree["model"][name].shape, bytes(2 * tree["model"][name].numel))


def twice(tree):
    tree["model"]["decoder.layers.0.mlp.linear_fc1.layer_norm_weight"] = tree["model"][NORM]


def turned(tree):
    """A matrix as the transposed view that it may be saved as."""
    one = tree["model"][LINEAR]
    tree["model"][LINEAR] = TensorReference(one.path, one.dtype, one.shape, (1, one.shape[0]), 0, one.storage)


@pytest.mark.parametrize(
    "ranks, alter, words",
    [
        (["01_000"], lambda tree: half(tree, NORM), "gamma is float16 [16], but float32 [16] in mp_rank_00_000"),
        (["01_000"], twice, "holds decoder.layers.0.pre_mlp_layernorm.weight twice, as decoder.layers.0.pre_mlp_layernorm"),
        (
            ["01_001"],
            lambda tree: [tree["model"].pop(name) for name in list(tree["model"]) if ".layers.3." in name],
            "holds [3] layers in its chunks, other ranks of the stage [4]",
        ),
        (
            ["00_001", "01_001"],
            lambda tree: tree.update(model0=tree.pop("model"), model1={}),
            "the stages hold [1, 2] chunks: expected as many in each",
        ),
        (["00_000", "01_000"], lambda tree: setattr(tree["args"], "num_layers", 6), "holds 5 layers, but its args say"),
        (["01_000"], turned, f"{LINEAR} is not stored row by row"),
    ],
)
def test_files_that_do_not_fit_each_other(saved, ranks, alter, words):
    for rank in ranks:
        change(file_of(saved, rank), alter)
    assert words in error_of(saved)


class RunsSomething:
    def __reduce__(self):
        return os.system, ("exit 1",)


def test_a_pickle_that_runs_something(saved):
    """The refusal names the file; nothing runs."""
    path = file_of(saved, "00_000")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps({"args": RunsSomething()}, protocol=2))
        file.writestr("archive/version", "3")
    assert path in error_of(saved) and f"{os.system.__module__}.system" in error_of(saved)


KEPT = (
    *("num_attention_heads", "seq_length", "max_position_embeddings", "norm_epsilon", "params_dtype"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "consumed_train_samples"),
)
SHOWN = (
    *("hidden_size", "ffn_hidden_size", "num_layers", "vocab_size", "normalization", "kv_channels", "num_query_groups"),
    *("hidden_act", "position_embedding_type", "qk_layernorm", "add_bias_linear", "qkv_has_bias"),
    "untie_embeddings_and_output_weights",
)


@pytest.mark.parametrize("case", ["core", "core, qk norm, distributed", "legacy"])
def test_arguments_that_lack_what_the_weights_show(tmp_path, case):
    """Older and foreign savers keep fewer arguments: sizes, biases, norms, activation and groups follow from the weights."""

    def alter(tree):
        for name in [name for name in vars(tree["args"]) if name not in KEPT]:
            delattr(tree["args"], name)
        vars(tree["args"]).update(kv_channels=None, ffn_hidden_size=None, padded_vocab_size=None)

    saved = made_up(case).write(str(tmp_path / case))
    wanted = read_megatron_manifest(saved)
    for name in os.listdir(saved):
        change(os.path.join(saved, name, "model_optim_rng.pt"), alter)
    found = read_megatron_manifest(saved)
    assert set(found.tensors) == set(wanted.tensors)
    for name in SHOWN:
        assert found.args["model_config"][name] == wanted.args["model_config"][name], name


def test_true_vocabulary():
    """Rows of extra ids and of the NullTokenizer's end-of-document token are no padding; never more than there are."""
    for arguments, rows in (
        ({"vocab_size": 100, "padded_vocab_size": 128}, 100),
        ({"vocab_size": 100, "padded_vocab_size": 128, "vocab_extra_ids": 3, "tokenizer_type": "NullTokenizer"}, 104),
        ({"vocab_size": 200, "padded_vocab_size": 128}, 128),
        ({"vocab_size": None, "padded_vocab_size": 128}, 128),
        ({}, None),
    ):
        assert true_vocabulary(arguments) == rows


def test_release(tmp_path):
    """Weights without a training: folder `release`, which the tracker names."""
    config = configured(LLAMA, parallel=TP2)
    path = MegatronTarget(MadeUpReader(config, with_optimizer=False, iteration=0), config).write(str(tmp_path))
    assert path.endswith("release") and (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "release"
    manifest = read_megatron_manifest(str(tmp_path))
    assert manifest.has_only_weights and manifest.not_resumable


def test_a_folder_that_exists_is_not_touched(saved):
    with pytest.raises(CheckpointError, match="exists already"):
        made_up("core, tied, uneven stages").write(os.path.dirname(saved))
    assert main(["verify", saved]) == 0


def test_the_model_is_the_checkpoints(tmp_path):
    """use_checkpoint_args: no flag of the model is given; padded rows stay, and so does the form of gelu."""
    config = configured({**GPT, "bias_gelu_fusion": True, "norm_epsilon": 1e-6}, parallel=TP2)
    MegatronTarget(MadeUpReader(config), config).write(str(tmp_path))
    model = read("--load", str(tmp_path)).model_config
    for name, value in {**GPT, "norm_epsilon": 1e-6, "bias_gelu_fusion": True}.items():
        if not name.endswith("_has_bias"):
            assert getattr(model, name) == value, name


def test_features_that_do_not_exist_here_are_named(saved):
    """Arguments of features that change the numbers, not the tensors."""
    for rank in ("00_000", "00_001", "01_000", "01_001"):
        change(file_of(saved, rank), lambda tree: vars(tree["args"]).update(geglu=True, hidden_dropout=0.1))
    assert read_megatron_manifest(saved).refused == ["--geglu"]


def test_a_file_in_place_of_another_ranks(saved):
    shutil.copy(file_of(saved, "00_000"), file_of(saved, "01_000"))
    text = error_of(saved)
    assert f"{file_of(saved, '01_000')} is a copy of {file_of(saved, '00_000')}" in text


def test_a_flat_buffer_in_place_of_another_ranks(tmp_path):
    saved = made_up("core, tied, distributed").write(str(tmp_path))
    paths = [os.path.join(saved, f"mp_rank_00_00{stage}", "distrib_optim.pt") for stage in range(2)]
    shutil.copy(*paths)
    assert f"{paths[1]} is a copy of {paths[0]}" in error_of(saved)


def test_the_iteration_that_is_asked_for(saved):
    with pytest.raises(CheckpointError, match="iter_0000005 is no checkpoint of Megatron"):
        read_megatron_manifest(os.path.dirname(saved), 5)
    assert read_megatron_manifest(os.path.dirname(saved), 7).iteration == 7


def test_sizes_from_folders_and_older_arguments():
    """Sizes {tp, pp, ep, expert_tp} by the arguments, as far as they say them."""
    for arguments, names, sizes in (
        ({"model_parallel_size": 2}, ["mp_rank_00"], (2, 1, 1, 2)),
        ({}, ["mp_rank_00_000", "mp_rank_01_001"], (2, 2, 1, 2)),
        ({"num_experts": 4}, ["mp_rank_00_001_003"], (1, 2, 4, 1)),
        ({"num_experts": 4, "expert_model_parallel_size": 4}, ["mp_rank_00_003"], (1, 1, 4, 1)),
        ({"expert_tensor_parallel_size": 1, "tensor_model_parallel_size": 2}, ["mp_rank_00"], (2, 1, 1, 2)),
    ):
        found = parallel_sizes(arguments, names)
        assert tuple(found[name] for name in ("tp", "pp", "ep", "expert_tp")) == sizes


def test_ours_is_not_taken_for_megatrons(tmp_path):
    (tmp_path / "mp_rank_00").mkdir()
    assert is_megatron_folder(tmp_path)
    (tmp_path / "manifest.json").touch()
    assert not is_megatron_folder(tmp_path)


def test_an_untied_head_with_the_embeddings_values(tmp_path):
    """Both in one file: arguments that do not say it are of an untied model."""
    config = configured(LLAMA)
    target = MegatronTarget(MadeUpReader(config), config)
    arrays = target.reader.arrays
    arrays["language_model.output_layer.weight"] = arrays["language_model.embedding.word_embeddings.weight"]
    saved = target.write(str(tmp_path))
    change(os.path.join(saved, "mp_rank_00", "model_optim_rng.pt"), without_tying)
    assert read_megatron_manifest(saved).args["model_config"]["untie_embeddings_and_output_weights"]


def without_tying(tree):
    del tree["args"].untie_embeddings_and_output_weights


def test_expert_parallel_ranks_are_equal_on_a_stage_without_experts(tmp_path):
    """As Megatron saves them: one optimizer there, whose buffers only the first rank has."""
    saved = made_up("core, experts on one stage, distributed").write(str(tmp_path))
    shutil.copy(file_of(saved, "00_000_000"), file_of(saved, "00_000_001"))
    assert not os.path.exists(os.path.join(saved, "mp_rank_00_000_001", "distrib_optim.pt"))
    assert isinstance(read_torch_file(file_of(saved, "00_000_000"))["optimizer"], dict)
    assert isinstance(read_torch_file(file_of(saved, "00_001_000"))["optimizer"], list)
    assert not read_megatron_manifest(saved).not_resumable
    shutil.copy(file_of(saved, "00_001_000"), file_of(saved, "00_001_001"))
    assert "is a copy of" in error_of(saved)


def test_a_changed_byte(saved, capsys, monkeypatch):
    path = file_of(saved, "01_000")
    tensor = next(one for one in read_torch_file(path)["model"].values() if isinstance(one, TensorReference))
    with open(path, "r+b") as file:
        file.seek(tensor.storage.start)
        byte = file.read(1)[0]
        file.seek(tensor.storage.start)
        file.write(bytes([byte ^ 8]))
    assert main(["verify", saved]) == 1
    words = "mp_rank_01_000/model_optim_rng.pt: the check sum of its record"
    assert words in capsys.readouterr().out
    result = os.path.join(os.path.dirname(saved), "result")
    assert convert_ckpt(["--load-dir", saved, "--save-dir", result, "--save-model-type", "native"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{saved} is damaged: " in error and words in error and not os.path.exists(result)
    monkeypatch.setattr(load, "on_rank_zero", lambda doing, call, *arguments: call(*arguments))
    monkeypatch.setattr(load, "on_all_ranks", lambda doing, call, *arguments: [call(*arguments)])
    monkeypatch.setattr(load, "comm", SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1))
    assert load.find_checkpoint(saved) == saved
    with pytest.raises(CheckpointError, match=words):
        load.find_checkpoint(saved, crc_check=True)
