"""Datasets of plain text: tokenizer and split of the configuration, parts that are too small, settings that cannot be."""

import numpy as np
import pytest

from mindspeed_ms.core.datasets.errors import DatasetError
from mindspeed_ms.core.datasets.text_documents import CorpusError, split_text
from mindspeed_ms.core.datasets.tokenizer.hugging_face import from_folder
from mindspeed_ms.training.text_datasets import TextDatasets
from tests.preprocess.toy_tokenizer import toy_tokenizer, write_tokenizer
from tests.training.test_same_data import D, M, T, config

EVALUATED = {f"{T}.eval_interval": 1, f"{T}.eval_iters": 1}
LINES = [f"line {number} of the text\n" for number in range(400)]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(LINES))
    return {"data_path": [str(path)], **EVALUATED}


def test_the_named_tokenizer_and_split_are_used(tmp_path, text):
    all_config = config(
        tmp_path, **text, split="80,10,10", tokenizer_name_or_path=write_tokenizer(tmp_path), **{f"{M}.vocab_size": 1024}
    )
    datasets = TextDatasets(all_config)
    parts, tokenizer = datasets((9, 9, 9)), toy_tokenizer(tmp_path)
    corpus = datasets.corpus
    for tokens in (corpus.train_tokens, corpus.valid_tokens, corpus.test_tokens):
        assert tokens[-1] == tokenizer.eod == corpus.end_of_document
    texts = [tokenizer.detokenize(part.tokens).replace(tokenizer.detokenize([tokenizer.eod]), "") for part in parts]
    assert "".join(texts) == "".join(LINES)  # in order, nothing twice
    assert [round(len(part) / len("".join(LINES)), 2) for part in texts] == [0.8, 0.1, 0.1]
    again = TextDatasets(all_config).corpus  # found, not built
    assert again.folder == corpus.folder and np.array_equal(again.test_tokens, corpus.test_tokens)
    assert tokenizer.name in corpus.summary() and "test tokens" in corpus.summary()
    assert TextDatasets(config(tmp_path, **text)).corpus.folder != corpus.folder


def test_the_tokenizer_made_of_the_text_is_kept_with_the_run(tmp_path, text):
    """A checkpoint of the run is used with it; a tokenizer that the user named stays where it is."""
    all_config = config(tmp_path, **text)
    datasets = TextDatasets(all_config)
    datasets.check()
    output = tmp_path / all_config.training_config.output_dir
    assert not (output / "tokenizer.json").exists()  # the check changes nothing
    datasets((9, 9, 9))
    kept = from_folder(str(output))
    assert kept.tokenize("line 7") == datasets.corpus.tokenizer.tokenize("line 7")
    assert kept.eod == datasets.corpus.end_of_document


def test_each_part_of_its_own(tmp_path, text):
    own = {f"{name}_data_path": text["data_path"] for name in ("train", "valid", "test")}
    parts = TextDatasets(config(tmp_path, **own, **EVALUATED))((9, 9, 9))
    assert len({len(part) for part in parts}) == 1
    assert TextDatasets(config(tmp_path, **own))((9, 9, 9))[1:] == (None, None)  # nothing is evaluated


def test_shares_of_few_documents():
    documents = [("a", "".join(LINES)), ("b", "x\n" * 100)]
    parts = split_text(documents, "90,10,0")
    assert "".join(text for part in parts for _, text in part) == "".join(LINES) + "x\n" * 100 and not parts[2]
    with pytest.raises(CorpusError, match=r"split \(--split\) is 98,1,1: .* none is left for valid"):
        split_text([("a", "short\n")], "98,1,1")
    assert [len(part) for part in split_text([(str(number), "a") for number in range(20)], "50,25,25")] == [10, 5, 5]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "nofile", "merge_file": "no"}, "--vocab-file is nofile"),
        ({"merge_file": "no"}, "no tokenizer is named"),
        (
            {"tokenizer_type": "NullTokenizer", "vocab_size": 320},
            "has 321 ids, but model_config.vocab_size is 320: set it to 321",
        ),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 300}, "text.txt.*: .*reads numbers separated by blanks"),
        ({"tokenizer_name_or_path": "toy", "vocab_size": 100, f"{M}.vocab_size": 1024}, "dataset_config.vocab_size is 100"),
        ({"pad_token_id": 3}, "pad_token_id is 3: samples of plain text .* have no padding"),
        ({"eos_token_id": 3}, "eos_token_id is 3, but the BPE .* ends documents with 0"),
        ({"reset_attention_mask": True, "create_attention_mask_in_dataloader": False}, "leave one of them out"),
        ({"batch_size": 60}, "the held-out part of the text has .*fewer than one micro-batch .*--eval-iters 0"),
        ({"batch_size": 8000}, "the training part of the text has .*fewer than one micro-batch"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path, text, settings, words):
    if settings.get("tokenizer_name_or_path"):
        settings = {**settings, "tokenizer_name_or_path": write_tokenizer(tmp_path)}
    datasets = TextDatasets(config(tmp_path, **text, **settings))
    with pytest.raises(DatasetError, match=words) as caught:
        datasets.check()
    assert "\n" not in str(caught.value)


def test_without_evaluation_nothing_is_held_out_in_vain(tmp_path, text):
    few = {**text, f"{D}.batch_size": 60, f"{T}.eval_iters": 0}
    train, valid, test = TextDatasets(config(tmp_path, **few))((9, 0, 0))
    assert len(train) >= 60 and valid is None and test is None


def test_the_prompt_of_own_text(tmp_path, text):
    from mindspeed_ms.tools.training_report import held_out_prompt

    corpus = TextDatasets(config(tmp_path, **text)).corpus
    prompt = held_out_prompt(corpus)
    held_out = corpus.tokenizer.detokenize(corpus.valid_tokens)
    assert prompt and held_out.startswith(prompt)
