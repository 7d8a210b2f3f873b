"""What is wrong with options, records and folders: one clear message, nothing that looks complete, nothing lost."""

import gzip
import json
import os

import pyarrow
import pyarrow.parquet
import pytest

from mindspeed_ms.core.datasets.tokenizer import null
from mindspeed_ms.tasks.preprocess import input_files, pipeline, unfinished, workers
from mindspeed_ms.tasks.preprocess.__main__ import main
from tests.preprocess.runs import NUMBERS, all_bytes, run, stored, write_jsonl

GOLDEN = os.environ.get("MINDSPEED_MS_GOLDEN", "")
TEXT = "out/set_text_document"
ALPACA = ["--handler-name", "AlpacaStyleInstructionHandler", "--prompt-type", "qwen"]


def fails(capsys, folder, *words, tokenizer=None, prefix="out/set"):
    """The message of a run that must fail with one line, and must leave no output file and nothing that holds nothing."""
    before = set(folder.rglob("*_document.*"))
    code, printed = run(capsys, folder, *words, tokenizer=tokenizer, prefix=prefix)
    assert code == 1 and "Traceback" not in printed, printed
    assert set(folder.rglob("*_document.*")) == before
    assert all((place / "journal.json").exists() for place in folder.rglob("*.unfinished"))
    return printed.split("preprocess_data.py: ", 1)[1]


OPTIONS = {
    "--handler-name AlpacaStyleInstructHandler": "Did you mean 'AlpacaStyleInstructionHandler'?",
    "--handler-name AlpacaPretrainHandler": "use GeneralPretrainHandler",
    "--handler-name AlpacaStyleInstructionHandler": "needs a template: add --prompt-type",
    "--prompt-type qwen": "has no meaning for GeneralPretrainHandler",
    "--handler-name AlpacaStyleInstructionHandler --prompt-type qwenn": "qwen",
    "--handler-name AlpacaStyleInstructionHandler --prompt-type qwen --pack": "add --seq-length",
    "--handler-name AlpacaStyleInstructionHandler --prompt-type qwen --neat-pack": "add --pack",
    "--handler-name AlpacaStylePairwiseHandler --prompt-type qwen --pack --seq-length 9": "is for instruction data",
    "--pack --seq-length 9": "is for instruction data",
    "--workers 0": "'0' is not a number of at least 1",
    "--n-subs -1": "'-1' is not a number of at least 1",
    "--seq-lenght 9": "Did you mean '--seq-length'?",
    "--split-sentences": "for BERT only",
    "--map-keys {}": "--json-keys",
    '--handler-name AlpacaStyleInstructionHandler --prompt-type qwen --map-keys {"promt":"a"}': "Did you mean 'prompt'?",
    "--handler-name AlpacaStyleInstructionHandler --prompt-type qwen --map-keys {'a':1}": "broken JSON",
    '--handler-name SharegptStyleInstructionHandler --prompt-type qwen --map-keys {"tags":{"role":"a"}}': "'role_tag'",
}


@pytest.mark.parametrize("words", OPTIONS)
def test_options_are_checked_before_a_file_is_opened(tmp_path, capsys, monkeypatch, words):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "how"}])
    monkeypatch.setattr(pipeline, "read_batches", None)
    assert OPTIONS[words] in fails(capsys, tmp_path, "--input", path, *words.split(" "))
    assert not (tmp_path / "out").exists()


def test_missing_key_names_file_line_and_keys(tmp_path, capsys):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "how"}, {"txt": "are", "id": 1}])
    message = fails(capsys, tmp_path, "--input", path)
    assert f"{path}, line 2: asked for the key 'text' (the text of a document), found 'txt', 'id'." in message
    assert "--json-keys" in message
    path = write_jsonl(tmp_path / "chat.jsonl", [{"question": "how", "output": "fine"}])
    message = fails(capsys, tmp_path, "--input", path, *ALPACA, prefix="chat/set")
    assert f"{path}, line 1: asked for the key 'instruction'" in message and "--map-keys" in message
    pyarrow.parquet.write_table(pyarrow.table({"txt": ["how"]}), tmp_path / "data.parquet")
    message = fails(capsys, tmp_path, "--input", tmp_path / "data.parquet", prefix="parquet/set")
    assert "data.parquet: asked for the key 'text', found 'txt'" in message


def test_map_keys_of_a_column_that_no_record_has(tmp_path, capsys):
    path = write_jsonl(tmp_path / "data.jsonl", [{"instruction": "how", "output": "fine"}] * 3)
    message = fails(capsys, tmp_path, "--input", path, *ALPACA, "--map-keys", '{"query":"inptu"}')
    assert "'inptu'" in message and "none of the first 3 records" in message and "'instruction', 'output'" in message
    message = fails(capsys, tmp_path, "--input", path, *ALPACA, "--map-keys", '{"response":""}', prefix="off/set")
    assert 'switches off response ("")' in message


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("a.jsonl", b'{"text": "how"}\n{"text": "ar\n', "a.jsonl, line 2: broken JSON"),
        ("a.jsonl", b'{"text": "how"}\n"are"\n', "a.jsonl, line 2: expected a JSON object"),
        (
            "a.jsonl",
            b'[\n{"text": "how"}\n]\n',
            "the line begins with '['. If the file is one array of records, let its name end in .json.",
        ),
        ("a.jsonl", b'[{"text": "how"}]', 'found list: \'[{"text": "how"}]\'. If the file is one array'),
        ("a.jsonl", b'{"text": "how"}\n{"text": "\xff"}\n', "a.jsonl, line 2: not UTF-8"),
        ("a.jsonl", b'{"text": "how"}\n{"text": {"a": 1}}\n', "a.jsonl, line 2: expected text for text, found dict"),
        (
            "a.jsonl",
            b'{"text": "how"}\n{"text": "a\\ud83d"}\n',
            "a.jsonl, line 2: the text cannot be tokenized: character 2 of the text ('a\\ud83d') is U+D83D, half of",
        ),
        ("a.json", b'[\n{"text": "how"},\n{"text": 1,,}\n]', "a.json, line 3: broken JSON"),
        ("a.json", b'[\n{"text": "how"}\n', "a.json, line 3: the array does not end with ']'"),
        ("a.json", b'[{"text": "how"}\n{"text": "how"}]', "a.json, line 2: expected ',' or ']'"),
        ("a.txt", b"how\n\xff\n", "a.txt, line 2: not UTF-8"),
        ("a.csv", b"text,id\nhow,1\nare\n", "a.csv, line 3: expected a cell for each of the 2 columns"),
        ("a.csv", b'text,id\nhow,1\n"are\n\nyou,2\n', "a.csv, line 3: broken csv: unexpected end of data"),
        ("a.csv", b"text,id\nhow,1\n\xff,2\n", "a.csv, line 3: not UTF-8 text"),
        ("a.csv", b"text,text\nhow,1\n", "'text' stands there twice"),
        ("a.parquet", b"PAR1 and then nothing", "a.parquet cannot be read as parquet"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "how are you?"}\n' * 999)[:-20], "a.jsonl.gz cannot be read"),
        ("a.jsonl", b"", "empty file (0 bytes)"),
        ("a.jsonl", b"\n \r\n", "nothing to write: 0 records gave no sample. There are no records in /"),
        ("a.pdf", b"%PDF", "is of an unknown format: expected a name that ends in .jsonl"),
    ],
)
def test_broken_files(tmp_path, capsys, name, content, expected):
    (tmp_path / name).write_bytes(content)
    assert expected in fails(capsys, tmp_path, "--input", tmp_path / name)


REWARDS = ["--handler-name", "AlpacaStyleProcessRewardHandler", "--placeholder-token", "<|end|>"]
PAIRS = ["--handler-name", "AlpacaStylePairwiseHandler", "--prompt-type", "qwen"]
OPENAI = ["--handler-name", "OpenAIInstructionHandler", "--prompt-type", "qwen"]


QUESTION = {"role": "user", "content": "how"}
ANSWER = {"role": "assistant", "content": "fine"}
SHAPES = [
    (ALPACA, {"instruction": "how", "output": "fine", "history": True}, "history must be a list of [question, answer]"),
    (ALPACA, {"instruction": "how", "output": "fine", "tools": True}, "the tools must be a json list of objects"),
    (OPENAI, {"messages": [QUESTION, ANSWER], "tools": '{"name": 1}'}, "objects with a name each, but one is {'name': 1}"),
    (
        ["--handler-name", "OpenAIInstructionHandler", "--prompt-type", "llama3"],
        {"messages": [QUESTION, ANSWER], "tools": [{"name": "f", "parameters": True}]},
        "the parameters of the tools are no json schema",
    ),
    (OPENAI, {"messages": [QUESTION, {**ANSWER, "content": [{"type": "text"}]}]}, "expected text for a message, found list"),
    (
        PAIRS,
        {"instruction": "how", "chosen": {"role": "x"}, "rejected": "b"},
        "expected text for the chosen answer, found dict",
    ),
]


@pytest.mark.parametrize("words, record, expected", SHAPES)
def test_values_of_another_shape_are_named(tmp_path, capsys, words, record, expected):
    path = write_jsonl(tmp_path / "data.jsonl", [record])
    message = fails(capsys, tmp_path, "--input", path, *words)
    assert message.startswith(f"{path}, line 1: ") and expected in message


HALVES = [
    (ALPACA, {"instruction": "how", "output": "fine \udc00"}),
    (ALPACA, {"instruction": "\ud83d", "output": "fine", "system": "S"}),
    (PAIRS, {"instruction": "how", "chosen": "fine", "rejected": "\ud83d"}),
    (OPENAI, {"messages": [{"role": "user", "content": "how"}, {"role": "assistant", "content": "\udfff\ud800"}]}),
    (REWARDS, {"input": "\ud83d <|end|>", "value": ["+"]}),
]


@pytest.mark.parametrize(
    "words, record, tokenizer",
    # the recorded sentencepiece model has no placeholder
    [(*half, None) for half in HALVES] + [(*half, "sentencepiece") for half in HALVES if GOLDEN and half[0] is not REWARDS],
)
def test_half_of_a_surrogate_pair_is_named(tmp_path, capsys, words, record, tokenizer):
    tokenizer = tokenizer and ["--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", f"{GOLDEN}/data/sp.model"]
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    message = fails(capsys, tmp_path, "--input", tmp_path / "a.jsonl", *words, tokenizer=tokenizer)
    assert "a.jsonl, line 1: the text cannot be tokenized: character " in message and "half of a surrogate pair" in message
    code, printed = run(
        capsys,
        tmp_path,
        "--input",
        tmp_path / "a.jsonl",
        *words,
        "--on-invalid",
        "skip",
        tokenizer=tokenizer,
        prefix="skip/set",
    )
    assert code == 1 and "1 text that cannot be tokenized (first: " in printed


def test_missing_input_names_the_nearest(tmp_path, capsys):
    write_jsonl(tmp_path / "corpus.jsonl", [{"text": "how"}])
    assert f"Did you mean {tmp_path}/corpus.jsonl?" in fails(capsys, tmp_path, "--input", tmp_path / "corpus.json")
    assert "no file matches" in fails(capsys, tmp_path, "--input", tmp_path / "*.parquet")
    assert "twice" in fails(capsys, tmp_path, "--input", tmp_path / "corpus.jsonl", tmp_path / "*.jsonl")


def test_invalid_records_can_be_skipped(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "how"}\n{"text": "ar\n{"id": 1}\n{"text": "you"}\n')
    code, printed = run(capsys, tmp_path, "--input", tmp_path / "a.jsonl", "--on-invalid", "skip")
    assert code == 0 and len(stored(tmp_path, TEXT)) == 2
    assert "1 broken JSON (first: " in printed and "1 key 'text' is missing (first: " in printed


def test_empty_documents_are_no_documents(tmp_path, capsys):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "5 7"}, {"text": ""}, {"text": None}, {"text": " "}, {"text": "8"}])
    code, printed = run(capsys, tmp_path, "--input", path, "--append-eod", tokenizer=NUMBERS)
    assert code == 0 and "3 empty document (first: " in printed and "line 2)" in printed
    assert stored(tmp_path, TEXT) == [[5, 7, 500], [8, 500]]


def test_ids_never_wrap(tmp_path, capsys, monkeypatch):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "5"}, {"text": "501"}])
    message = fails(capsys, tmp_path, "--input", path, tokenizer=NUMBERS)
    assert "data.jsonl, line 2: " in message and "501" in message
    monkeypatch.setattr(null.NullTokenizer, "check_ids", lambda self, ids: None)  # a tokenizer that does not look
    message = fails(capsys, tmp_path, "--input", path, tokenizer=[*NUMBERS[:-1], "400"], prefix="other/set")
    assert "data.jsonl, line 2: the id 501 is not below the vocabulary size 401" in message
    message = fails(capsys, tmp_path, "--input", path, "--pad-vocab-size-to", "400", tokenizer=NUMBERS, prefix="third/set")
    assert "has 501 ids" in message


@pytest.mark.parametrize("size, width", [(65498, 2), (65499, 4), (70000, 4)])
def test_width_follows_the_vocabulary(tmp_path, capsys, size, width):
    """Megatron's border: the end of document counts too."""
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": f"5 {size - 1}"}])
    run(capsys, tmp_path, "--input", path, "--append-eod", tokenizer=[*NUMBERS[:-1], str(size)])
    assert stored(tmp_path, TEXT) == [[5, size - 1, size]]
    assert (tmp_path / f"{TEXT}.bin").stat().st_size == 3 * width


def test_output_folders(tmp_path, capsys, monkeypatch):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "how"}])
    assert "is a folder" in fails(capsys, tmp_path, "--input", path, prefix="out/")
    (tmp_path / "file").write_text("")
    assert "the output cannot be written" in fails(capsys, tmp_path, "--input", path, prefix="file/set")
    code, printed = run(capsys, tmp_path, "--input", path, prefix="new/deep/set")
    assert code == 0, printed
    monkeypatch.chdir(tmp_path)
    assert main(["--input", str(path), "--tokenizer-name-or-path", ".", "--output-prefix", "bare"]) == 0
    assert (tmp_path / "bare_text_document.idx").exists()


def test_read_only_folder(tmp_path, capsys, monkeypatch):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "how"}])

    def refuse(name, *args, **kwargs):
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(unfinished, "open", refuse, raising=False)  # root may write everywhere
    message = fails(capsys, tmp_path, "--input", path)
    assert "the output cannot be written: Permission denied" in message and "--output-prefix" in message


def test_output_that_exists_is_kept(tmp_path, capsys):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "how"}])
    run(capsys, tmp_path, "--input", path)
    before = all_bytes(tmp_path / "out")
    message = fails(capsys, tmp_path, "--input", path, "--append-eod")
    assert "exists" in message and "--overwrite-output" in message and all_bytes(tmp_path / "out") == before
    code, _ = run(capsys, tmp_path, "--input", path, "--append-eod", "--overwrite-output")
    assert code == 0 and all_bytes(tmp_path / "out") != before


def test_merging(tmp_path, capsys):
    for number in range(3):
        path = write_jsonl(tmp_path / f"{number}.jsonl", [{"text": f"{number} {number}"}])
        run(capsys, tmp_path, "--input", path, prefix=f"parts/{number}", tokenizer=NUMBERS)
    words = ["--input", tmp_path / "parts", "--merge-group-keys", "text_document"]
    code, printed = run(capsys, tmp_path, *words, tokenizer=[])
    assert code == 0, printed
    assert stored(tmp_path, "out/set_text_document") == [[0, 0], [1, 1], [2, 2]]
    for _ in range(2):  # the second time the first result lies among the parts
        code, printed = run(capsys, tmp_path, *words, "--overwrite-output", tokenizer=[], prefix="parts/all")
        assert code == 0 and len(stored(tmp_path, "parts/all_text_document")) == 3, printed
    os.remove(tmp_path / "parts" / "1_text_document.idx")
    code, printed = run(capsys, tmp_path, *words, tokenizer=[], prefix="again/set")
    assert code == 1 and "half a pair" in printed
    (tmp_path / "file").write_text("")
    code, printed = run(capsys, tmp_path, *words[:-1], "0_text", tokenizer=[], prefix="file/set")
    assert code == 1 and "the output cannot be written" in printed and "--output-prefix" in printed
    code, printed = run(capsys, tmp_path, *words[:-1], "image", tokenizer=[], prefix="again/set")
    assert code == 1 and "have it in their names" in printed


def test_groups_that_do_not_fit_together_are_not_merged(tmp_path, capsys):
    """Fields that are read side by side: every part must have every one of them, with the same number of samples."""
    for number in range(3):
        path = write_jsonl(tmp_path / f"{number}.jsonl", [{"instruction": "how", "output": "fine"}] * (number + 1))
        run(capsys, tmp_path, "--input", path, *ALPACA, prefix=f"parts/{number}")
    parts, keys = tmp_path / "parts", ["input_ids", "labels", "attention_mask"]
    words = ["--input", parts, "--merge-group-keys"]
    for _ in range(2):  # the second time the first results lie among the parts
        code, printed = run(capsys, tmp_path, *words, *keys, "--overwrite-output", tokenizer=[], prefix="parts/all")
        assert code == 0 and printed.count("3 pairs joined") == 3, printed
    for path in [*parts.glob("all_*"), *parts.glob("1_packed_attention_mask_document.*")]:
        path.unlink()
    for order in (keys, keys[::-1]):
        message = fails(capsys, tmp_path, *words, *order, tokenizer=[])
        assert "attention_mask has 2 pairs and " in message and "there is no 1_packed_attention_mask_document" in message
    for ending in ("bin", "idx"):
        (parts / f"1_packed_attention_mask_document.{ending}").write_bytes(
            (parts / f"2_packed_attention_mask_document.{ending}").read_bytes()
        )
    message = fails(capsys, tmp_path, *words, *keys, tokenizer=[])
    assert "different numbers of samples" in message and "1_packed_attention_mask_document: 3" in message
    code, printed = run(capsys, tmp_path, *words, "labels", "input_ids", tokenizer=[])  # nobody asked for the masks
    assert code == 0, printed


def test_nothing_that_looks_like_data_is_passed_over(tmp_path):
    (tmp_path / "set.unfinished").mkdir()  # of an interrupted run, with its journal
    (tmp_path / "set.unfinished" / "journal.json").write_text("{}")
    for name in ("a.jsonl", "b.csv.gz", "c.parquet", "d.parquet.gz", ".hidden.jsonl"):
        (tmp_path / name).write_text(json.dumps({}))
    files, ignored = input_files.expand_inputs([str(tmp_path)])
    assert [os.path.basename(file.path) for file in files] == ["a.jsonl", "b.csv.gz", "c.parquet"]
    assert [os.path.basename(path) for path in ignored] == ["d.parquet.gz"]


def test_there_are_never_more_processes_than_are_of_use(tmp_path, capsys, monkeypatch):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "how"}])
    monkeypatch.setattr(workers, "cores", lambda: 2)
    monkeypatch.setattr(workers, "ProcessPoolExecutor", lambda count, *_: pytest.fail(f"{count} processes"))
    with pytest.raises(pytest.fail.Exception, match="8 processes"):
        run(capsys, tmp_path, "--input", path, "--n-subs", "100000")
    assert "100000 processes are asked for" in capsys.readouterr().out
