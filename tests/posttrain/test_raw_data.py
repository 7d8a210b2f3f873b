"""Raw records are prepared as preprocess_data.py does, once; every option of post-training has its effect."""

import json
import os
import shutil

import pytest

from tests.posttrain import runs
from tests.posttrain.options import OPTIONS
from tests.preprocess.toy_tokenizer import write_tokenizer

CHATS = [
    {"instruction": "Name a prime.", "input": "Below ten.", "output": "7"},
    {"instruction": "Say it.", "output": "it"},
    {"instruction": "Count.", "output": "1 2 3"},
]
TALKS = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]
STEPS = [{"input": "one step ки another ки", "value": ["+", "-"]}, {"input": "one @ ки", "value": ["-"]}]
PAIRS = [
    {"instruction": "Name a prime.", "chosen": "7", "rejected": "8"},
    {"instruction": "Say it.", "chosen": "it", "rejected": "that"},
]


def write(path, records):
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    return str(path)


def prepared(stage, folder, data, **dataset):
    """Stored samples (lists of arrays by field) of a raw file, or the text of the error."""
    from mindspeed_ms.core.datasets.instruction_builder import dataset_class_of
    from mindspeed_ms.core.datasets.instruction_files import InstructionFiles
    from mindspeed_ms.tasks.posttrain.raw_data import prepare_raw_data

    all_config = runs.configuration(stage, folder, data, model={"vocab_size": 1024, "seq_length": 128}, dataset=dataset)
    try:
        (prefix,) = prepare_raw_data(all_config)["data_path"]
    except ValueError as error:
        return str(error)
    files = InstructionFiles(prefix, dataset_class_of(all_config).fields)
    return [{name: values.tolist() for name, values in files[number].items()} for number in range(len(files))]


@pytest.fixture
def tokenizer(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    return {"tokenizer_type": "PretrainedFromHF", "tokenizer_name_or_path": write_tokenizer(folder), "prompt_type": "qwen"}


def test_records_are_those_of_preprocessing(world, tmp_path, tokenizer):
    from mindspeed_ms.tasks.preprocess.__main__ import main

    data, folder = write(tmp_path / "chats.jsonl", CHATS), str(tmp_path / "run")
    (found,) = world(1)(prepared, "sft", folder, data, **tokenizer)
    words = ["--input", data, "--output-prefix", str(tmp_path / "own"), "--handler-name", "AlpacaStyleInstructionHandler"]
    words += ["--prompt-type", "qwen", "--tokenizer-name-or-path", tokenizer["tokenizer_name_or_path"], "--seq-length", "128"]
    assert main(words) == 0
    (expected,) = world(1)(stored, str(tmp_path / "own"))
    assert found == expected and len(found) == 3
    before = sorted(os.listdir(tmp_path / "run" / "data"))
    assert world(1)(prepared, "sft", folder, data, **tokenizer)[0] == found
    assert sorted(os.listdir(tmp_path / "run" / "data")) == before  # they were found again
    write(data, CHATS[:2])
    assert len(world(1)(prepared, "sft", folder, data, **tokenizer)[0]) == 2


def stored(prefix):
    """Stored samples of conversations."""
    from mindspeed_ms.core.datasets.instruction_files import SFT_FIELDS, InstructionFiles

    files = InstructionFiles(prefix, SFT_FIELDS)
    return [{name: values.tolist() for name, values in files[number].items()} for number in range(len(files))]


def test_handlers_follow_from_stage_and_columns(world, tmp_path, tokenizer):
    folder = str(tmp_path / "run")
    (talks,) = world(1)(prepared, "sft", folder, write(tmp_path / "talks.jsonl", TALKS), **tokenizer)
    messages = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    assert world(1)(prepared, "sft", folder, write(tmp_path / "messages.jsonl", messages), **tokenizer)[0] == talks
    (pairs,) = world(1)(prepared, "orm", folder, write(tmp_path / "pairs.jsonl", PAIRS), **tokenizer)
    assert set(pairs[0]) == {f"{kind}_{part}" for kind in ("chosen", "rejected") for part in ("input_ids", "labels")}


@pytest.mark.parametrize(
    "records, words",
    [
        ([*PAIRS, {"instruction": "x", "chosen": "same", "rejected": "same"}], "line 3: both answers are the same"),
        ([*PAIRS, {"instruction": "x", "chosen": "fine", "rejected": " "}], "line 3"),
        (CHATS, "line 1: asked for the key 'chosen'"),
    ],
)
def test_bad_records_are_named(world, tmp_path, tokenizer, records, words):
    data = write(tmp_path / "pairs.jsonl", records)
    for _ in range(2):  # nothing is left that a second try would find
        assert f"{data}, {words}" in world(1)(prepared, "dpo", str(tmp_path / "run"), data, **tokenizer)[0]


def test_a_kill_before_the_judgement_does_not_let_bad_records_in(world, tmp_path, tokenizer, monkeypatch):
    """The files are written and the run is killed: the next one judges them all the same."""
    from mindspeed_ms.tasks.posttrain import raw_data

    def killed(*_):
        raise KeyboardInterrupt

    data = write(tmp_path / "pairs.jsonl", [*PAIRS, {**PAIRS[0], "rejected": ""}])
    monkeypatch.setattr(raw_data, "_refuse_answers", killed)
    with pytest.raises(KeyboardInterrupt):
        prepared("dpo", str(tmp_path / "run"), data, **tokenizer)
    monkeypatch.undo()
    for _ in range(2):
        assert "1 empty rejected answer" in prepared("dpo", str(tmp_path / "run"), data, **tokenizer)


def test_answer_that_fills_the_sequence(world, tmp_path, tokenizer):
    data = write(tmp_path / "pairs.jsonl", [*PAIRS, {**PAIRS[0], "chosen": "7 " * 200}])
    (text,) = world(1)(prepared, "orm", str(tmp_path / "run"), data, **tokenizer)
    assert text.startswith(
        f"1 pairs whose longer answer fills --seq-length by itself (first: {data}, line 3): that leaves no room"
    )


def test_what_is_left_out_is_told_in_each_run(tmp_path, tokenizer, monkeypatch):
    from mindspeed_ms.tasks.posttrain import raw_data

    told = []
    monkeypatch.setattr(raw_data.logger, "warning", lambda text, *values: told.append(text % values))
    data = write(tmp_path / "chats.jsonl", [*CHATS, {**CHATS[0], "output": ""}])
    for _ in range(2):
        prepared("sft", str(tmp_path / "run"), data, **tokenizer)
    assert told == [f"{data}: 1 empty answer (first: {data}, line 4)"] * 2


def test_settings_of_records_are_not_ignored_in_silence(world, tmp_path, files, caplog):
    from mindspeed_ms.tasks.posttrain import raw_data

    dataset = {"prompt_type": "qwen", "reset_position_ids": True}
    all_config = runs.configuration("sft", tmp_path, files["chats"], dataset=dataset)
    with caplog.at_level("WARNING", "mindspeed_ms"):
        raw_data.logger.propagate, before = True, raw_data.logger.propagate
        try:
            assert raw_data.prepare_raw_data(all_config) == {}
        finally:
            raw_data.logger.propagate = before
    assert "prompt_type: no effect, since the data is prepared already" in caplog.text


def test_what_raw_records_need(world, tmp_path, tokenizer):
    data, missing = write(tmp_path / "chats.jsonl", CHATS), str(tmp_path / "none.jsonl")
    (text,) = world(1)(prepared, "sft", str(tmp_path), missing, **tokenizer)
    advice = "Nothing is downloaded: give files, folders or patterns."
    assert text == f"dataset_config.data_path: {missing} does not exist. {advice}"
    os.mkdir(tmp_path / "nothing")
    (text,) = world(1)(prepared, "sft", str(tmp_path), str(tmp_path / "nothing"), **tokenizer)
    assert text.startswith("dataset_config.data_path: the folder ") and "holds no data file" in text
    assert "need a tokenizer: set --tokenizer-name-or-path" in world(1)(prepared, "sft", str(tmp_path), data)[0]
    plain = {name: value for name, value in tokenizer.items() if name != "prompt_type"}
    assert "needs a template: add --prompt-type NAME" in world(1)(prepared, "sft", str(tmp_path), data, **plain)[0]
    (text,) = world(1)(prepared, "sft", str(tmp_path), data, **tokenizer, prompt_type_path="nowhere.json")
    assert text == "--prompt-type-path is nowhere.json: No such file or directory."
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    (text,) = world(1)(prepared, "sft", str(tmp_path), str(tmp_path / "empty.jsonl"), **tokenizer)
    assert text.startswith(f"dataset_config.data_path: {tmp_path}/empty.jsonl: empty file")
    (text,) = world(1)(prepared, "sft", str(tmp_path), str(tmp_path / "chat.jsonl"), **tokenizer)
    assert text.startswith(
        f"dataset_config.data_path: {tmp_path}/chat.jsonl does not exist. Did you mean {tmp_path}/chats.jsonl?"
    )
    assert len(world(1)(prepared, "sft", str(tmp_path), str(tmp_path / "ch*.jsonl"), **tokenizer)[0]) == 3
    other = {**tokenizer, "handler_name": "AlpacaStylePairwiseHandler"}
    (text,) = world(1)(prepared, "sft", str(tmp_path), data, **other)
    assert "writes pairwise data, and stage sft trains on instruction data" in text


RAW = {"sft": ("chats", CHATS), "prm": ("steps", STEPS)}


@pytest.mark.parametrize("path", [path for path in OPTIONS if path.startswith("dataset_config")])
def test_option_of_raw_records_has_its_effect(world, tmp_path, tokenizer, path):
    from mindspeed_ms.tasks.preprocess import templates

    stage, value, beside = OPTIONS[path]
    name, records = RAW[stage]
    shutil.copy(os.path.join(os.path.dirname(templates.__file__), "templates.json"), tmp_path / "templates.json")
    text = (tmp_path / "templates.json").read_text(encoding="utf-8").replace("You are a helpful assistant.", "Help.")
    (tmp_path / "templates.json").write_text(text, encoding="utf-8")
    data, folder = write(tmp_path / f"{name}.jsonl", records), str(tmp_path / "run")
    settings = {**tokenizer, **beside}
    if stage == "prm":
        del settings["prompt_type"]
    value = value.format(folder=tmp_path) if isinstance(value, str) else value
    (plain,) = world(1)(prepared, stage, folder, data, **settings)
    (changed,) = world(1)(prepared, stage, folder, data, **{**settings, path.partition(".")[2]: value})
    if path.endswith("reward_tokens"):
        return  # decides the loss, see test_prm
    assert changed != plain


@pytest.mark.parametrize("path", [path for path in OPTIONS if path.startswith("training_config")])
def test_option_of_a_loss_has_its_effect(world, tmp_path, files, weights, path):
    stage, value, _ = OPTIONS[path]
    value = value.format(**weights) if isinstance(value, str) else value
    training = {"load_checkpoint": weights["base"], "training_iters": 2}
    curves = []
    for name, own in (("plain", {}), ("changed", {path.partition(".")[2]: value})):
        (result,) = world(1)(runs.train, stage, str(tmp_path / name), files["pairs"], training={**training, **own})
        curves.append([runs.curve(result), runs.curve(result, "grad_norm")])
    assert curves[0] != curves[1]
