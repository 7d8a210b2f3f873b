"""Samples cut from an array of tokens, with Megatron's three options for documents."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_ms.core.datasets.token_dataset import TokenDataset

TOKENS = np.array([5, 6, 0, 7, 8, 9, 0, 0, 4, 3, 2, 0, 1], np.uint16)


@given(length=st.integers(2, 200), sequence_length=st.integers(1, 40))
def test_samples_cover_the_tokens_once(length, sequence_length):
    tokens = np.arange(length, dtype=np.uint16)
    if length <= sequence_length:
        with pytest.raises(ValueError, match="too few"):
            TokenDataset(tokens, sequence_length)
        return
    dataset = TokenDataset(tokens, sequence_length)
    samples = [dataset[index] for index in range(len(dataset))]
    read = np.concatenate([sample["tokens"] for sample in samples])
    assert np.array_equal(read, tokens[: len(read)]) and length - len(read) - 1 < sequence_length
    assert np.array_equal(np.concatenate([sample["labels"] for sample in samples]), read + 1)


def test_plain_sample():
    sample = TokenDataset(TOKENS, 6)[1]
    assert sample["tokens"].tolist() == [0, 0, 4, 3, 2, 0] and sample["labels"].tolist() == [0, 4, 3, 2, 0, 1]
    assert sample["position_ids"].tolist() == [0, 1, 2, 3, 4, 5] and sample["loss_mask"].tolist() == [1] * 6
    assert "attention_mask" not in sample
    assert {name: value.dtype.name for name, value in sample.items()} == {
        "tokens": "int32",
        "labels": "int32",
        "position_ids": "int32",
        "loss_mask": "float32",
    }


def test_options_for_documents():
    options = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    sample = TokenDataset(TOKENS, 6, end_of_document=0, **options)[0]  # 5 6 0 | 7 8 9
    assert sample["position_ids"].tolist() == [0, 1, 2, 0, 1, 2]
    assert sample["loss_mask"].tolist() == [1, 1, 0, 1, 1, 1]
    visible = ~sample["attention_mask"][0]
    expected = np.zeros((6, 6), bool)
    expected[:3, :3] = expected[3:, 3:] = np.tri(3, dtype=bool)
    assert np.array_equal(visible, expected)
    sample = TokenDataset(TOKENS, 6, end_of_document=0, **options)[1]  # 0 | 0 | 4 3 2 0
    assert sample["position_ids"].tolist() == [0, 0, 0, 1, 2, 3]
    assert sample["loss_mask"].tolist() == [0, 0, 1, 1, 1, 0]


def test_mistakes():
    with pytest.raises(ValueError, match="id that ends a document"):
        TokenDataset(TOKENS, 6, eod_mask_loss=True)
    with pytest.raises(IndexError):
        TokenDataset(TOKENS, 6)[2]
    with pytest.raises(ValueError, match="positive"):
        TokenDataset(TOKENS, 0)


def test_intervals_say_what_the_mask_says():
    options = {"reset_attention_mask": True, "end_of_document": 0}
    places = np.arange(6)
    for index in range(2):
        whole, short = (TokenDataset(TOKENS, 6, **options, mask_as_intervals=short)[index] for short in (False, True))
        first, stop = np.moveaxis(short["attention_mask"][0], -1, 0)[..., None]
        assert short["attention_mask"].dtype == np.int32 and short["attention_mask"].shape == (1, 6, 2)
        assert np.array_equal(whole["attention_mask"][0], (places < first) | (places >= stop))
