"""Starts from a folder that people own, over the default configuration of gpt/pretrain_gpt.sh: what the folder decides."""

import json
import os
import shutil
from unittest import mock

import pytest

from mindspeed_ms.config import ConfigError, argument_parser, init_configs_from_args
from mindspeed_ms.config.errors import WarningNotice
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.folders import newest_manifest
from mindspeed_ms.core.dist_checkpointing.manifest import Manifest
from mindspeed_ms.training import model_folder, same_data
from mindspeed_ms.training.checkpoint_manager import StartingPoint
from mindspeed_ms.training.start_checks import check_resumed
from mindspeed_ms.training.text_datasets import TextDatasets
from tests.app.job import CPU_DEFAULT
from tests.app.test_careless import script
from tests.conversion.test_hugging_face import convert
from tests.conversion.tiny_models import CONFIGS, read_json, write_folder, write_json
from tests.documented.sandbox import write_tokenizer

TAKE = ("--use-checkpoint-args", "--load")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
STEPS = (
    "--data-path text.txt --train-iters 3 --eval-iters 0 --micro-batch-size 2 --global-batch-size 4 --seq-length 32 --lr 1e-3 "
    "--no-sample"
).split()


class Folders:
    """Hugging Face folders in `folder`; `path` is what `write_tokenizer` needs."""

    def __init__(self, folder):
        self.folder = folder

    def path(self, name):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def make(self, name, rows, **details):
        """A llama of `rows` rows with the tokenizer of 500 ids."""
        folder, _ = write_folder(self.folder / name, {**CONFIGS["llama"], "vocab_size": rows}, **details)
        write_tokenizer(self, name)
        return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folders")
    shutil.copy(os.__file__, folder / "text.txt")
    made = Folders(folder)
    made.make("hf", 512)
    made.make("half", 512, dtype="bfloat16")
    made.make("few_rows", 400)
    write_tokenizer(made, "tokenizer")
    write_folder(folder / "plain", {**CONFIGS["llama"], "vocab_size": 512})
    convert(str(folder / "hf"), folder / "native", "--save-model-type", "native")
    convert(str(folder / "hf"), folder / "megatron", "--save-model-type", "mg", "--target-tensor-parallel-size", "2")
    return folder


def over_the_default(*words):
    return init_configs_from_args(argument_parser().parse_args(["--default-config", *CPU_DEFAULT, *map(str, words)]))


@pytest.mark.parametrize(
    ("name", "files"), [("hf", "hf"), ("native", "native/hugging_face"), ("megatron", "megatron/hugging_face")]
)
def test_model_vocabulary_and_tokenizer_are_the_folders(folders, name, files):
    all_config = over_the_default(*TAKE, folders / name, "--data-path", "x")
    model, data, parallel = all_config.model_config, all_config.dataset_config, all_config.parallel_config
    assert (model.hidden_size, model.seq_length, model.vocab_size, data.vocab_size) == (32, 64, 512, 500)
    assert data.tokenizer_name_or_path == str(folders / files)
    # neither layout nor words of a configuration that was not named
    assert parallel.tensor_model_parallel_size == 1 and not parallel.sequence_parallel
    assert not [notice for notice in all_config.notices if isinstance(notice, WarningNotice)]
    assert (data.batch_size, all_config.optimizer_config.learning_rate) == (16, 0.01)
    typed = over_the_default(
        *TAKE, folders / name, "--seq-length", "32", "--tokenizer-name-or-path", folders / "tokenizer", *TP2
    )
    assert typed.dataset_config.tokenizer_name_or_path == str(folders / "tokenizer")
    assert (typed.parallel_config.tensor_model_parallel_size, typed.model_config.seq_length) == (2, 32)
    assert not [notice for notice in typed.notices if isinstance(notice, WarningNotice)]
    assert any("samples have the model's 64 positions" in notice for notice in all_config.notices)


def test_a_named_tokenizer_with_other_ids_is_told(folders, tmp_path):
    """Two tokens have changed their places, so every id is in the vocabulary."""
    shutil.copytree(folders / "tokenizer", tmp_path / "swapped")
    path = tmp_path / "swapped" / "tokenizer.json"
    saved = json.loads(path.read_text())
    vocab = saved["model"]["vocab"]
    one, other = list(vocab)[300:302]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    path.write_text(json.dumps(saved))
    named = over_the_default(*TAKE, folders / "hf", "--seq-length", "32", "--tokenizer-name-or-path", path.parent)
    (warning,) = [notice for notice in named.notices if isinstance(notice, WarningNotice)]
    assert "gives other ids than" in warning and "2 of " in warning and str(path.parent) in warning


def test_without_a_checkpoint_yet_the_default_model_is_the_first(tmp_path):
    all_config = over_the_default("--use-checkpoint-args", "--save", tmp_path)
    assert all_config.model_config.hidden_size == 128 and all_config.parallel_config.tensor_model_parallel_size == 2


def test_one_key_of_length_and_positions_is_one_warning(folders):
    words = ["--config", *CPU_DEFAULT, *TAKE, str(folders / "hf")]
    all_config = init_configs_from_args(argument_parser().parse_args(words))
    warned = [notice for notice in all_config.notices if "max_size" in notice]
    assert len(warned) == 1 and "is not used: the checkpoint has 64" in warned[0] and all_config.model_config.seq_length == 64


def test_finetune_and_resume_training():
    """What was typed wins over a file; two typed ones contradict."""
    training = over_the_default("--load", "x", "--finetune").training_config
    assert training.finetune and not training.resume_training
    with pytest.raises(ConfigError, match="contradicts finetune"):
        over_the_default("--load", "x", "--finetune", "--resume-training")


@pytest.mark.parametrize("words", [(), ("--tokenizer-name-or-path", "{}/tokenizer"), ("--vocab-size", "500")])
def test_more_ids_than_rows(folders, words):
    with pytest.raises(ConfigError, match=r"500 ids, but the model of .* has 400 rows .*make-vocab-size-divisible-by 500"):
        over_the_default(*TAKE, folders / "few_rows", *(word.format(folders) for word in words))


def test_more_rows_by_choice(folders, tmp_path):
    wide = convert(str(folders / "few_rows"), tmp_path / "wide", "--save-model-type", "native",
                   "--make-vocab-size-divisible-by", "500")  # fmt: skip
    all_config = over_the_default(*TAKE, wide, *TP2)
    assert (all_config.model_config.vocab_size, all_config.dataset_config.vocab_size) == (500, 500)
    check_resumed(*newest_manifest(wide), all_config, False)


def test_other_rows_are_refused_before_ranks_start(folders):
    for rows, text in ((1024, "--padded-vocab-size 512.*convert_ckpt.py"), (256, "keep all of its 512 ids")):
        all_config = over_the_default(*TAKE, folders / "plain")
        all_config.model_config.vocab_size = rows
        with pytest.raises(CheckpointError, match=f"has 512 rows of vocabulary, the model here {rows} .*{text}"):
            check_resumed(*newest_manifest(str(folders / "plain")), all_config, False)


def test_a_bpe_of_the_text_gives_other_ids(folders, tmp_path):
    """Weights without their tokenizer: of another program, and converted."""
    shutil.copytree(folders / "native", tmp_path / "native")
    shutil.rmtree(tmp_path / "native" / "hugging_face")
    for folder in (folders / "plain", tmp_path / "native"):
        words = *TAKE, folder, "--data-path", folders / "text.txt", "--save", tmp_path / "out", "--seq-length", "32"
        with pytest.raises(CheckpointError, match="a tokenizer that is not named here"):
            TextDatasets(over_the_default(*words)).check()
        TextDatasets(over_the_default(*words, "--load-strict", "false")).check()


def test_a_bpe_over_own_weights_without_a_tokenizer_is_named(folders, caplog, monkeypatch):
    monkeypatch.setattr(same_data.logger, "propagate", True)
    own = {"tokenizer": {"name": "the BPE x", "vocab_size": 300, "hash": "1"}, "data": None}
    saved = Manifest(1, fingerprint={"tokenizer": None, "data": None})
    same_data.check("there", saved, own, over_the_default(), False)
    assert "there names no tokenizer: make sure that its ids are those of the BPE x" in caplog.text


def test_rows_that_the_ranks_cannot_share(folders, tmp_path):
    """The padding is another, no row is lost."""
    odd = Folders(tmp_path).make("odd", 515)
    assert over_the_default(*TAKE, odd, *TP2, "--make-vocab-size-divisible-by", "1").model_config.vocab_size == 516
    assert over_the_default(*TAKE, odd, *TP2).model_config.vocab_size == 768


def test_own_runs_give_their_tokenizer_and_bpe(folders, tmp_path, monkeypatch):
    from mindspeed_ms.config import from_checkpoint

    def taken(resumes, dataset=None, name=None):
        fingerprint = {"tokenizer": {"name": name}, "data": None} if name else None
        manifest = Manifest(
            1, args={"model_config": {"vocab_size": 512}, "dataset_config": dataset or {}}, fingerprint=fingerprint
        )
        found = from_checkpoint.FoundCheckpoint(str(tmp_path), str(tmp_path / "iter_0000001"), manifest, resumes)
        monkeypatch.setattr(from_checkpoint, "_find", lambda settings: found)
        return over_the_default("--use-checkpoint-args", "--num-attention-heads", "4").dataset_config.tokenizer_name_or_path

    monkeypatch.setattr("mindspeed_ms.config.beneath.flags_of_a_model", lambda args: [])
    path = str(folders / "tokenizer")
    monkeypatch.setattr(from_checkpoint, "_drop_defaults", lambda settings: None)
    assert taken(True, {"tokenizer_name_or_path": path, "tokenizer_type": "PretrainedFromHF"}) == path
    assert taken(False, {"tokenizer_name_or_path": "nowhere"}) is None
    assert taken(False, name=f"the BPE {path}") == path
    assert taken(True, name=f"the BPE {path}") is None
    # files of the model that the run started from
    shutil.copytree(folders / "hf", tmp_path / "hugging_face")
    assert taken(True, name=f"the BPE {path}") is None and taken(True, name="x") == str(tmp_path / "hugging_face")
    assert taken(True, {"tokenizer_name_or_path": path, "tokenizer_type": "PretrainedFromHF"}, "x") == path


def test_a_run_keeps_the_files_of_its_model(folders, tmp_path, caplog):
    """Once; those of the model that it starts from, and of its own tokenizer."""
    write_folder(tmp_path / "other", {**CONFIGS["qwen2"], "vocab_size": 512})
    write_json(tmp_path / "other", "generation_config.json", {})

    def run(name, resumes=False, tokenizer=None, trained=None):
        words = ("--tokenizer-name-or-path", tokenizer) if tokenizer else ()
        all_config = over_the_default("--save", tmp_path / "out", *words)
        if not tokenizer:
            all_config.dataset_config.tokenizer_name_or_path = None
        start = StartingPoint(name and str(name), resumes, {"tokenizer": trained and {"name": trained}, "data": None})
        model_folder.keep(start, all_config)
        kept = tmp_path / "out" / "hugging_face"
        return (read_json(kept)["model_type"], sorted(set(os.listdir(kept)) - {"config.json"})) if kept.exists() else None

    files = sorted(set(os.listdir(folders / "hf")) - {"config.json", "model.safetensors"})
    assert run(None) is None
    (tmp_path / "out").mkdir()
    for name in ("hf", "native/iter_0000000", "megatron/iter_0000001"):
        assert run(folders / name, tokenizer=folders / "hf" if name == "hf" else None) == ("llama", files)
        kept = tmp_path / "out" / "hugging_face"
        assert run(tmp_path / "other", resumes=True) == ("llama", files) and kept.exists()
        assert run(tmp_path / "out" / "iter_0000003", resumes=True) == ("llama", files)
        assert run(tmp_path / "out" / "iter_0000003") == ("llama", files)
        shutil.rmtree(kept)
        assert run(folders / name, resumes=True) == ("llama", files)
    assert run(folders / "hf", trained="the BPE text.txt") == ("llama", [])
    assert run(tmp_path / "other", tokenizer=folders / "tokenizer") == ("qwen2", ["generation_config.json", *files])
    assert run(None)[0] == "qwen2" and "delete it if they are of another model" in caplog.text
    with mock.patch("shutil.copyfile", side_effect=OSError("disk full")):
        assert run(folders / "hf")[0] == "qwen2" and "needs --hf-cfg-dir" in caplog.text
    assert os.listdir(tmp_path / "out") == ["hugging_face"]


def losses(folder, name, words):
    """Losses of three steps of the script, as the last rank sees them."""
    code, errors = script(folder, ["--default-config", *CPU_DEFAULT, *STEPS, *TAKE, name, "--save", "out", *words])
    assert code == 0, errors
    with open("out/metrics.jsonl", encoding="utf-8") as file:
        return [line["loss"] for line in map(json.loads, file) if "loss" in line]


def test_the_first_losses_are_those_of_the_folder(world, folders, tmp_path):
    """In any layout, and from its conversions."""
    runs = [(1, "hf", ()), (2, "hf", TP2), (2, "hf", PP2), (2, "megatron", TP2), (1, "native", ()), (1, "half", ("--bf16",))]
    runs.append((1, "half", ("--fp16", "--initial-loss-scale", "1024")))
    found = []
    for size, name, words in runs:
        place = tmp_path / f"{len(found)}"
        place.mkdir()
        shutil.copy(folders / "text.txt", place)
        found.append(world(size)(losses, place, str(folders / name), words)[-1])
    assert all(len(one) == 3 for one in found)
    for one in found[1:-2]:
        assert one == pytest.approx(found[0], rel=1e-6)
    # a training's checkpoint goes back without more words, since it keeps the files of its model
    back = convert(tmp_path / "3" / "out", tmp_path / "back", "--save-model-type", "hf")
    assert read_json(back)["some_field_of_yours"] and os.path.exists(os.path.join(back, "tokenizer.json"))
    for one in found[-2:]:
        assert one == pytest.approx(found[0], rel=5e-3) and one != found[0]


def test_mindspeeds_conversion_of_qwen_trains_with_more_ranks(world, tmp_path):
    """MindSpeed-LLM's command for Qwen2.5, cut in two, starts a training cut in four, with the losses of the model's folder."""
    made = Folders(tmp_path)
    config = {**CONFIGS["qwen2"], "vocab_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    folder, _ = write_folder(tmp_path / "Qwen2.5", config, dtype="bfloat16")
    write_tokenizer(made, "Qwen2.5")
    words = (
        f"--use-mcore-models --model-type GPT --load-model-type hf --save-model-type mg --target-tensor-parallel-size 2 "
        f"--target-pipeline-parallel-size 1 --add-qkv-bias --tokenizer-model {folder}/tokenizer.json --model-type-hf llama2 "
        "--params-dtype bf16"
    )
    megatron = convert(folder, f"{folder}/mcore_tp2_pp1/", *words.split())
    found = []
    for size, name in ((1, folder), (4, megatron)):
        place = tmp_path / str(size)
        place.mkdir()
        shutil.copy(os.__file__, place / "text.txt")
        layout = ("--tensor-model-parallel-size", str(size)) + (("--sequence-parallel",) if size > 1 else ())
        found.append(world(size)(losses, place, name, (*layout, "--train-iters", "2"))[-1])
    assert len(found[0]) == 2 and found[1] == pytest.approx(found[0], rel=1e-6)
