"""The report about prepared data: numbers, marks of labels, ids outside the vocabulary, damage."""

import numpy as np
import pytest

from mindspeed_ms.core.datasets.indexed_dataset import IndexedDatasetBuilder
from mindspeed_ms.tools import inspect_data
from tests.datasets.instruction_data import neat_pack, write_field, write_sft
from tests.preprocess.toy_tokenizer import toy_tokenizer


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs the command in a folder of its own: (exit code, output, errors)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code = inspect_data.main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


def write_text(prefix, documents, dtype=np.uint16):
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype) as builder:
        for document in documents:
            builder.add_document(document)
        builder.finalize(f"{prefix}.idx")


def test_text(call, tmp_path):
    tokenizer = toy_tokenizer(tmp_path)
    ids = tokenizer.tokenize("how are you? fine")
    write_text("data", [ids, ids[:2], ids * 40])
    code, output, errors = call("data.bin", "--tokenizer", tmp_path, "--tokens", len(ids))
    assert (code, errors) == (0, "")
    total = 41 * len(ids) + 2
    assert f"text: 3 documents, 3 sequences, {total} tokens, uint16 ({2 * total} bytes)" in output
    assert f"2 to {40 * len(ids)}, mean {total / 3:.1f}, median {len(ids)}" in output
    assert f"ids: {min(ids)} to {max(ids)}, vocabulary 0 to {tokenizer.vocab_size - 1}" in output
    assert "text 0 (" in output and "\nhow are you? fine\n" in output and f"... ({39 * len(ids)} more)" in output
    assert (tmp_path / "data_lengths.png").read_bytes().startswith(b"\x89PNG") and "histogram: data_lengths.png" in output
    assert output.count("█") and "\033[" not in output


def test_conversations(call, tmp_path):
    tokenizer = toy_tokenizer(tmp_path)
    question, answer = tokenizer.tokenize("how are you?"), tokenizer.tokenize("fine")
    one = question + answer, [-100] * len(question) + answer
    length = 2 * len(one[0]) + 3
    none = [5] * 4, [-100] * 4, [1] * 4
    write_sft("chat", [neat_pack([one, one], length), none])
    arguments = "chat", "--tokenizer", tmp_path, "--no-png"
    code, output, _ = call(*arguments)
    learnt = 2 * len(answer)
    assert code == 0 and f"{1 - learnt / (length + 4):.1%} masked" in output
    assert "1 of 2 samples have no label" in output and "neat-packed: up to 2 conversations" in output
    assert "how are you?⟦fine⟧\n--- packed conversation 2\nhow are you?⟦fine⟧\n--- filling\n" in output
    colored = call(*arguments, "--color", "always")[1]
    assert "\033[2mhow are you?\033[0m\033[1;32mfine\033[0m" in colored and "⟦" not in colored
    assert not list(tmp_path.glob("*.png"))


def test_pairs(call):
    for field, sequences in (
        ("chosen_input_ids", [[1, 2, 3]]),
        ("chosen_labels", [[-100, 2, 3]]),
        ("rejected_input_ids", [[1, 4]]),
        ("rejected_labels", [[-100, 4]]),
    ):
        write_field("pairs", field, sequences)
    code, output, _ = call("pairs")
    assert code == 0 and "chosen 0 (3 tokens):\n1 ⟦2 3 ⟧" in output and "rejected 0 (2 tokens):\n1 ⟦4 ⟧" in output
    assert "histogram: pairs_lengths_rejected.png" in output


def test_the_picture_lies_beside_the_data(call, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "here").mkdir()
    write_text(tmp_path / "data" / "set", [[1, 2, 3]])
    monkeypatch.chdir(tmp_path / "here")
    beside = tmp_path / "data" / "set_lengths.png"
    assert f"  histogram: {beside}\n" in call(tmp_path / "data" / "set")[1] and beside.exists()
    assert "  histogram: mine.png\n" in call(tmp_path / "data" / "set", "--png", "mine.png")[1]
    assert list((tmp_path / "here").iterdir()) == [tmp_path / "here" / "mine.png"]
    real = inspect_data.histogram_picture

    def refuse(bars, path, title):  # root may write everywhere
        if "/" in path:
            raise PermissionError(13, "Permission denied", path)
        real(bars, path, title)

    monkeypatch.setattr(inspect_data, "histogram_picture", refuse)
    output = call(tmp_path / "data" / "set")[1]
    assert f"histogram: set_lengths.png ({beside} cannot be written (Permission denied))" in output
    assert (tmp_path / "here" / "set_lengths.png").exists()


def test_ids_outside_the_vocabulary(call):
    write_sft("chat", [([5, 99, 7], [-100, 99, 7], [1, 1, 1])])
    code, output, _ = call("chat", "--vocab-size", 50, "--png", "missing/folder.png")
    assert code == 1 and "WRONG: 1 ids of conversation are outside" in output and "WRONG: 1 labels" in output
    assert "NOTE: no histogram, missing/folder.png cannot be written" in output
    assert call("chat", "--vocab-size", 100)[0] == 0


def test_what_cannot_be_read(call, tmp_path):
    code, output, errors = call("nothing")
    assert (code, output) == (2, "") and "there is no nothing_packed_input_ids_document.bin" in errors
    write_text("data", [[1, 2, 3]])
    content = (tmp_path / "data.bin").read_bytes()
    (tmp_path / "data.bin").write_bytes(content[:4])
    code, _, errors = call("data")
    assert code == 2 and "data.bin" in errors
    (tmp_path / "data.idx").write_bytes(b"x" * 40)
    code, _, errors = call("data")
    assert code == 2 and "data.idx" in errors
    (tmp_path / "data.idx").unlink()
    assert "data.idx does not exist" in call("data")[2]
    code, _, errors = call("data", "--tokenizer", "nowhere")
    assert code == 2 and "nowhere: there is no such folder" in errors
    write_text("empty", [])
    assert call("empty")[0] == 0
