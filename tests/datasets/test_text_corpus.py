"""Text as training data: what is held out, what the folder holds, who builds it."""

import json
import math
import multiprocessing

import numpy as np
import pytest

from mindspeed_ms.core.datasets import text_corpus, text_documents

DOCUMENTS = [(f"document {number}", f"the number {number} is followed by {number + 1}\n" * 20) for number in range(40)]


def build(folder, vocab_size=300, documents=DOCUMENTS):
    training, validation = text_documents.hold_out(documents)
    return text_corpus.build_text_corpus(folder, training, validation, vocab_size)


def test_tokens_give_the_text_back(tmp_path):
    corpus = build(tmp_path)
    decode = corpus.tokenizer.detokenize
    pieces = np.split(np.asarray(corpus.train_tokens), np.flatnonzero(corpus.train_tokens == corpus.end_of_document) + 1)
    texts = [decode(list(piece[:-1])) for piece in pieces if len(piece)]
    names = dict(DOCUMENTS)
    assert texts == [names[name] for name in corpus.train_documents]
    assert int(corpus.train_tokens.max()) < corpus.vocab_size <= 300 and corpus.train_tokens.dtype == np.uint16
    assert corpus.valid_documents == ("document 9", "document 19", "document 29", "document 39")


def test_special_token_in_a_text_stays_text(tmp_path):
    corpus = build(tmp_path, documents=[*DOCUMENTS, ("odd", f"a{text_corpus.END_OF_DOCUMENT}b")])
    assert int((corpus.train_tokens == corpus.end_of_document).sum()) == len(corpus.train_documents)


def test_unigram_entropy():
    assert text_corpus.unigram_entropy([0, 1, 2, 3]) == pytest.approx(math.log(4))
    assert text_corpus.unigram_entropy([7, 7, 7]) == 0.0
    assert text_corpus.unigram_entropy([0, 0, 0, 5]) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))


def test_few_documents_are_cut_into_pieces():
    text = "".join(f"line {number}\n" for number in range(60000))
    training, validation = text_documents.hold_out([("long", text)])
    assert (
        len(validation) == 2
        and "".join(
            piece
            for _, piece in sorted(training + validation, key=lambda item: int(item[0].partition("[")[2].partition(":")[0]))
        )
        == text
    )
    assert all(piece.endswith("\n") for _, piece in training)


def test_a_short_file_is_cut_too():
    training, validation = text_documents.hold_out([("short", "a line of text\n" * 40)])
    assert len(training) > 8 * len(validation) > 0
    with pytest.raises(text_documents.CorpusError, match="too few to hold a part out"):
        text_documents.hold_out([("tiny", "a")])


def test_settings_and_text_decide_the_folder(tmp_path):
    assert build(tmp_path).folder == build(tmp_path).folder
    assert build(tmp_path, vocab_size=290).folder != build(tmp_path).folder
    assert build(tmp_path, documents=DOCUMENTS[1:] + DOCUMENTS[:1]).folder != build(tmp_path).folder


def _build_in_process(folder, results):
    results.put(str(build(folder).folder))


def test_several_processes_build_once(tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_build_in_process, args=(tmp_path, results)) for _ in range(4)]
    for process in processes:
        process.start()
    folders = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(60)
    assert len(folders) == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != ".lock") == [folders.pop().rpartition("/")[2]]


def test_interrupted_build_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(text_corpus.json, "dumps", _fail)
    with pytest.raises(OSError, match="disk full"):
        build(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def _fail(*args, **kwargs):
    raise OSError("disk full")


def test_incomplete_folder_is_named(tmp_path):
    folder = build(tmp_path).folder
    (folder / "valid.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no valid\.npy"):
        build(tmp_path)
    for content in (b"", bytes(100)):
        (folder / "valid.npy").write_bytes(content)
        with pytest.raises(text_documents.CorpusError, match="is damaged"):
            build(tmp_path)


def test_standard_library_is_text_in_a_fixed_order():
    documents = text_documents.standard_library_documents(size_limit=600_000)
    assert documents == text_documents.standard_library_documents(size_limit=600_000)
    assert sum(len(text.encode()) for _, text in documents) <= 600_000
    assert not any(name.startswith(("test/", "site-packages/")) for name, _ in documents)


def test_own_text(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "b.txt").write_text("zwei", encoding="utf-8")
    (tmp_path / "books" / "a.txt").write_text("eins ä", encoding="utf-8")
    documents = text_documents.text_documents([tmp_path / "books"])
    assert [text for _, text in documents] == ["eins ä", "zwei"]


@pytest.mark.parametrize(
    "name, error, expected",
    [
        ("missing", FileNotFoundError, "missing does not exist"),
        ("indexed", FileNotFoundError, "indexed files"),
        ("binary", text_documents.CorpusError, "not UTF-8 text"),
        ("empty", text_documents.CorpusError, "no text"),
    ],
)
def test_bad_paths(tmp_path, name, error, expected):
    (tmp_path / "indexed.idx").write_bytes(b"MMIDIDX")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\xd8")
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(error, match=expected):
        text_documents.text_documents([tmp_path / name])


def test_vocabulary_too_small(tmp_path):
    with pytest.raises(ValueError, match="at least 257"):
        build(tmp_path, vocab_size=256)


def test_description_is_complete(tmp_path):
    corpus = build(tmp_path)
    description = json.loads((corpus.folder / "corpus.json").read_text())
    assert description["unigram_entropy"] == pytest.approx(text_corpus.unigram_entropy(corpus.train_tokens))
    assert len(description["train_documents"]) + len(description["valid_documents"]) == len(DOCUMENTS)
