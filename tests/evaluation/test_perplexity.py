"""Perplexity: each token once, whatever window, stride and batch; equal to a direct forward."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_ms.core.datasets.indexed_dataset import IndexedDatasetBuilder
from mindspeed_ms.inference.sampling import RequestError
from mindspeed_ms.tasks.evaluation.errors import EvaluationError
from mindspeed_ms.tasks.evaluation.perplexity import Document, check, documents_of, evaluate, windows_of
from mindspeed_ms.testing.inference import TableRunner
from tests.inference.texts import byte_level_tokenizer


@given(st.integers(0, 60), st.integers(2, 20), st.data())
def test_each_token_is_scored_once_after_enough_context(length, window, data):
    stride = data.draw(st.integers(1, window - 1))
    windows = windows_of(length, window, stride)
    scored = [token for _, stop, first in windows for token in range(first, stop)]
    assert scored == list(range(1, length))
    for start, stop, first in windows:
        assert stop - start <= window and first > start
        assert start == 0 or first - start >= window - stride


def test_it_is_the_mean_of_a_direct_forward():
    runner = TableRunner(64, 256)
    generator = np.random.default_rng(3)
    documents = [Document(generator.integers(0, 64, size), None) for size in (50, 1, 0, 7, 120)]
    direct = np.concatenate([runner.score([one.ids.tolist()])[0].log_probabilities for one in documents if one.ids.size > 1])
    for batch_size in (1, 3):
        for window, stride in ((None, None), (200, 3), (120, 119)):
            result = evaluate(runner, documents, batch_size, window, stride)
            assert result["tokens"] == 49 + 6 + 119
            assert math.isclose(result["mean_nll"], -direct.mean(), rel_tol=1e-12)
            assert math.isclose(result["perplexity"], math.exp(-direct.mean()), rel_tol=1e-12)
            assert "bits_per_byte" not in result
    assert check(documents, runner) == (120, 60) and check(documents, runner, 21) == (21, 10)  # half of the window
    of_texts = evaluate(runner, [Document(documents[0].ids, 90), Document(documents[4].ids, 110)], 2)
    assert math.isclose(of_texts["bits_per_byte"], of_texts["mean_nll"] * (49 + 119) / math.log(2) / 200, rel_tol=1e-12)
    result = evaluate(runner, documents[:1], 2, 20, 5)
    parts = []
    for start, stop, first in windows_of(50, 20, 5):
        parts.append(runner.score([documents[0].ids[start:stop].tolist()])[0].log_probabilities[first - start - 1 :])
    assert math.isclose(result["mean_nll"], -np.concatenate(parts).mean(), rel_tol=1e-12)


def test_documents_of_texts_records_and_token_files(tmp_path):
    tokenizer = byte_level_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("Grüße", encoding="utf-8")
    (one,) = documents_of(str(tmp_path / "a.txt"), tokenizer)
    assert one.size == 7 and one.ids.tolist() == tokenizer.tokenize("Grüße")
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("abc", "de")))
    assert [document.size for document in documents_of(str(tmp_path / "a.jsonl"), tokenizer)] == [3, 2]
    with IndexedDatasetBuilder(str(tmp_path / "b.bin")) as builder:
        for parts in ([[1, 2], [3]], [[4, 5, 6]]):
            for part in parts:
                builder.add_item(np.array(part))
            builder.end_document()
        builder.finalize(str(tmp_path / "b.idx"))
    for name in ("b", "b.bin", "b.idx"):
        documents = documents_of(str(tmp_path / name), None)
        assert [document.ids.tolist() for document in documents] == [[1, 2, 3], [4, 5, 6]]
        assert [document.size for document in documents] == [None, None]
    result = evaluate(TableRunner(tokenizer.vocab_size), documents_of(str(tmp_path / "a.txt"), tokenizer), 1)
    assert math.isclose(result["bits_per_byte"], result["mean_nll"] * result["tokens"] / math.log(2) / 7)


@pytest.mark.parametrize(
    ("window", "stride", "words"),
    [
        (300, None, "window is 300: expected 2 to 256"),
        (1, None, "window is 1"),
        (10, 10, "stride is 10: expected 1 to 9"),
        (10, 0, "stride is 0"),
    ],
)
def test_windows_out_of_range(window, stride, words):
    with pytest.raises(RequestError, match=words):
        evaluate(TableRunner(64, 256), [Document(np.arange(30), None)], 1, window, stride)


def test_ids_of_another_vocabulary_and_nothing_to_predict(tmp_path):
    with pytest.raises(EvaluationError, match="token id 64: the model's vocabulary has 64 ids"):
        evaluate(TableRunner(64, 256), [Document(np.array([1, 64]), None)], 1)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(EvaluationError, match="nothing to predict"):
        documents_of(str(tmp_path / "a.txt"), byte_level_tokenizer(tmp_path / "tokenizer"))
    with pytest.raises(EvaluationError, match="nowhere"):
        documents_of(str(tmp_path / "nowhere"), None)
