"""GPT datasets and blends: against a slow plain reference, the cache with several processes, exact errors."""

import json
import math
import multiprocessing
import os
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_ms.core.datasets import helpers
from mindspeed_ms.core.datasets.blended_dataset import BlendedDataset
from mindspeed_ms.core.datasets.blended_megatron_dataset_builder import build_train_valid_test_datasets
from mindspeed_ms.core.datasets.errors import DatasetError
from mindspeed_ms.core.datasets.gpt_dataset import GPTDatasetConfig
from mindspeed_ms.core.datasets.gpt_indices import build_gpt_indices
from mindspeed_ms.core.datasets.splits import get_blend_from_list, parse_and_normalize_split
from tests.datasets.test_indexed_dataset import write

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=20).filter(any)


@settings(deadline=None)  # the first call compiles
@given(
    lengths=LENGTHS,
    sequence_length=st.integers(1, 25),
    num_samples=st.none() | st.integers(0, 60),
    extra=st.booleans(),
    drop=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_indices_equal_a_plain_reference(lengths, sequence_length, num_samples, extra, drop, seed):
    lengths, documents = np.array(lengths, np.int32), np.arange(len(lengths), dtype=np.int32)
    indices = build_gpt_indices(lengths, documents, num_samples, sequence_length, seed, extra, drop)
    tokens, epochs = int(lengths.sum()), 1
    while num_samples is not None and epochs * tokens < num_samples * sequence_length + extra:
        epochs += 1
    before_last = max(0, (epochs - 1) * tokens - extra) // sequence_length
    per_epoch = max(0, tokens - extra) // sequence_length
    separate = epochs > 1 and num_samples - before_last < int(0.80 * per_epoch)
    random = np.random.RandomState(seed)
    order = documents.tolist() * (epochs - separate)
    random.shuffle(order)
    if separate:
        last = documents.tolist()
        random.shuffle(last)
        order += last
    assert indices.document_index.tolist() == order
    # every token of the stream knows its document and place there; a sample begins at the first token that it holds
    stream = [(place, offset) for place, document in enumerate(order) for offset in range(lengths[document])]
    usable = max(0, len(stream) - extra)
    samples = usable // sequence_length if drop else math.ceil(usable / sequence_length)
    assert len(indices.sample_index) == samples + 1 and indices.sample_index.dtype == np.int32
    for number, (place, offset) in enumerate(indices.sample_index.tolist()):
        position = min(number * sequence_length, usable)
        if extra and position < len(stream) and number and number * sequence_length <= usable:
            assert stream[position] == (place, offset)
        start = sum(int(lengths[document]) for document in order[:place])
        assert start + offset == position
    shuffled = [list(range(before_last)), list(range(before_last, samples))] if separate else [list(range(samples))]
    for part in shuffled:
        random.shuffle(part)
    assert indices.shuffle_index.tolist() == [sample for part in shuffled for sample in part]


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.floats(0.001, 1), min_size=1, max_size=40), size=st.integers(0, 120), exhaustive=st.booleans())
def test_blends_equal_a_plain_reference(weights, size, exhaustive):
    sizes = [int(weight * 20) + 1 for weight in weights]
    shares = [part / sum(sizes) for part in sizes] if exhaustive else [weight / sum(weights) for weight in weights]
    size = sum(sizes) if exhaustive else size
    counts, datasets, samples = [0] * len(weights), [], []
    for sample in range(size):
        errors = [share * max(sample, 1.0) - count for share, count in zip(shares, counts)]
        candidates = [part for part in range(len(weights)) if not exhaustive or counts[part] < sizes[part]]
        best = max(candidates, key=lambda part: errors[part])
        datasets.append(best)
        samples.append(counts[best])
        counts[best] += 1
    ours = helpers.build_exhaustive_blending_indices(sizes) if exhaustive else helpers.build_blending_indices(shares, size)
    assert ours[0].tolist() == datasets and ours[1].tolist() == samples
    assert ours[0].dtype == np.int16 and ours[1].dtype == np.int64


def config(**changes):
    return GPTDatasetConfig(**{"random_seed": 1, "sequence_length": 4, "eod_token_id": 0, **changes})


def test_a_partial_sample_is_filled_up(tmp_path):
    prefix = write(tmp_path / "x", [[5, 6, 0], [7, 8, 9]])
    options = {"blend_per_split": (None, ([prefix], None), None), "reset_position_ids": True, "reset_attention_mask": True}
    dataset = build_train_valid_test_datasets([0, None, 0], config(drop_last_partial_validation_sequence=False, **options))[1]
    assert len(dataset) == 2
    texts = sorted((dataset[index] for index in range(2)), key=lambda sample: sample["loss_mask"].sum())
    assert texts[0]["loss_mask"].tolist() == [1, 0, 0, 0] and texts[0]["labels"][1:].tolist() == [0, 0, 0]
    assert texts[1]["loss_mask"].tolist() == [1, 1, 1, 1]  # the padding of one sample stays with it
    whole = texts[1]
    end = whole["tokens"].tolist().index(0) if 0 in whole["tokens"] else None
    if end is not None and end < 3:
        assert whole["position_ids"][end + 1] == 0 and whole["attention_mask"][0, end + 1, end]


def test_padding_and_unknown_ids(tmp_path):
    prefix = write(tmp_path / "x", [[5, 6, 7, 3, 5]])
    plain = config(blend=([prefix], None), split="1", pad_token_id=7, vocab_size=7)
    sample = build_train_valid_test_datasets([1, 0, 0], plain)[0][0]
    assert sample["tokens"].tolist() == [5, 6, 0, 3] and sample["labels"].tolist() == [6, 0, 3, 5]
    assert sample["loss_mask"].tolist() == [1, 0, 1, 1]
    with pytest.raises(DatasetError, match=f"train data of {re.escape(prefix)} has token id 7: .* has 7 ids"):
        build_train_valid_test_datasets([1, 0, 0], config(blend=([prefix], None), split="1", vocab_size=7))[0][0]
    with pytest.raises(IndexError, match="which has 1"):
        build_train_valid_test_datasets([1, 0, 0], plain)[0][1]


def test_made_up_data():
    datasets = build_train_valid_test_datasets([50, 5, 5], config(mock=True, sequence_length=64, vocab_size=100))
    for dataset in datasets:
        sample = dataset[3]
        assert sample["tokens"].max() < 100 and sample["labels"].tolist() != sample["tokens"].tolist()
    steps = np.diff(datasets[0][0]["tokens"])
    assert np.isin(steps, [1, -98]).sum() > 50  # it counts


def _sum_of_samples(prefix, cache, barrier, results):
    barrier.wait()
    settings = config(blend=([prefix, prefix], [0.5, 0.5]), split="8,1,1", path_to_cache=cache)
    dataset = build_train_valid_test_datasets([300, 20, 20], settings)[0]
    results.put(int(sum(dataset[index]["tokens"].sum() for index in range(len(dataset)))))


def test_processes_that_build_at_once_share_one_index(tmp_path):
    random = np.random.RandomState(0)
    prefix = write(tmp_path / "x", [random.randint(1, 50, 20) for _ in range(100)])
    context, cache = multiprocessing.get_context("fork"), str(tmp_path / "cache")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_sum_of_samples, args=(prefix, cache, barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    sums = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert len(sums) == 1
    names = [name for name in os.listdir(cache) if name != ".lock"]
    assert len(names) == 6 and not [name for name in names if name.startswith(".")]
    entry = tmp_path / "cache" / next(name for name in names if "GPTDataset-train" in name)
    assert json.loads((entry / "description.json").read_text())["dataset_path"] == prefix


def test_the_cache_follows_the_content(tmp_path):
    def train(cache=tmp_path / "cache", **changes):
        settings = config(**{"blend": ([prefix], None), "split": "1", "path_to_cache": str(cache), **changes})
        return build_train_valid_test_datasets([3, 0, 0], settings)[0]

    prefix = write(tmp_path / "x", [[1, 2, 3, 4, 5, 6], [7, 8, 9]])
    first = train()
    assert isinstance(first.sample_index, np.memmap) and np.array_equal(train().sample_index, first.sample_index)
    assert len(train(add_extra_token_to_sequence=False).document_index) != 0 and len(os.listdir(tmp_path / "cache")) == 3
    write(tmp_path / "x", [[1, 2, 3, 4], [7]])  # the same name, other documents
    assert len(train().document_index) == 2 * 3
    entry = next(
        path
        for path in (tmp_path / "cache").iterdir()
        if path.is_dir() and train().document_index.filename and path == type(path)(train().document_index.filename).parent
    )
    array = entry / "sample_index.npy"
    array.write_bytes(array.read_bytes()[:-8])
    with pytest.raises(DatasetError, match=r"damaged .*delete that folder"):
        train()
    with pytest.raises(OSError, match=r"cannot be kept .*data-cache-path"):
        train(cache=tmp_path / "x.bin")


def test_a_folder_that_cannot_be_written_is_told(tmp_path, caplog):
    prefix = write(tmp_path / "x", [[1, 2, 3, 4, 5, 6]])
    (tmp_path / "x").write_text("a file where the cache beside the data would be")
    dataset = build_train_valid_test_datasets([2, 0, 0], config(blend=([prefix], None), split="1"))[0]
    assert len(dataset) >= 2 and "--data-cache-path" in caplog.text


@pytest.mark.parametrize(
    "words, message",
    [
        (["0", "a", "1", "b"], "weight of data a is '0'"),
        (["-1", "a", "1", "b"], "weight of data a is '-1'"),
        (["nan", "a"], "weight of data a is 'nan'"),
        (["0.3", "a", "b", "c"], "weight of data c is 'b'"),
        (["0.3", "a", "0.7"], "here one is missing"),
        (["a", " "], "a prefix is empty"),
        (["1e308", "a", "1e308", "b"], "their sum is too large"),
    ],
)
def test_bad_names_of_data(words, message):
    with pytest.raises(DatasetError, match=message):
        get_blend_from_list(words)


@pytest.mark.parametrize("weights", [[-1.0, 2.0], [math.nan, 1.0], [1.0, math.inf], [0.0, 1.0], [1.0], [1e308, 1e308]])
@pytest.mark.parametrize("per_split", [False, True])
def test_weights_that_are_no_shares(tmp_path, weights, per_split):
    """A caller of the builder gets the words of the command line, not an error of float arithmetic."""
    blend = ([write(tmp_path / name, [[1, 2, 3]] * 5) for name in "ab"], weights)
    settings = config(blend_per_split=(blend, None, None)) if per_split else config(blend=blend, split="1")
    with pytest.raises(DatasetError, match=r"the weight of data .* is|have 1 weights|sum is too large"):
        build_train_valid_test_datasets([4, 0, 0], settings)


def test_names_of_data():
    assert get_blend_from_list(None) is None
    assert get_blend_from_list(["a", "b", "c"]) == (["a", "b", "c"], None)
    assert get_blend_from_list(["a", "b"]) == (["a", "b"], None)
    assert get_blend_from_list(["30", " a ", "70", "b"]) == (["a", "b"], [30.0, 70.0])


@pytest.mark.parametrize("split", ["a,b", "1,2,3,4", "0,0,0", "-1,2", "", "1,,2", "nan", "1e3,1", "9" * 400])
def test_bad_splits(split):
    with pytest.raises(DatasetError, match=re.escape(f"split is {split!r}")):
        parse_and_normalize_split(split)


def test_too_little_data(tmp_path):
    prefix, short = write(tmp_path / "x", [[1, 2, 3]] * 5), write(tmp_path / "s", [[1, 2]])
    with pytest.raises(DatasetError, match=r"valid data of .*: 3 samples are wanted, but .* none of the 5 documents"):
        build_train_valid_test_datasets([3, 3, 3], config(blend=([prefix], None), split="99,1,0"))
    assert len(build_train_valid_test_datasets([6, 0, 0], config(blend=([short], None), split="1"))[0]) >= 6  # epochs
    assert len(build_train_valid_test_datasets([None] * 3, config(blend=([short], None), split="1"))[0]) == 0
    with pytest.raises(DatasetError, match="has no samples"):
        build_train_valid_test_datasets([None] * 3, config(blend=([prefix, short], None), split="1"))
    with pytest.raises(DatasetError, match="need a number of samples"):
        build_train_valid_test_datasets([None] * 3, config(blend=([prefix, short], [1, 2]), split="1"))
    with pytest.raises(FileNotFoundError, match=r"missing.idx"):
        build_train_valid_test_datasets([1, 0, 0], config(blend=([str(tmp_path / "missing")], None), split="1"))
    dataset = build_train_valid_test_datasets([2, 0, 0], config(blend=([prefix], None), split="1"))[0]
    with pytest.raises(DatasetError, match="takes 90 samples"):
        BlendedDataset([dataset, dataset], [0.9, 0.1], 100, config())


def test_each_split_from_its_own_files(tmp_path):
    prefixes = [write(tmp_path / name, [[first] * 9] * 4) for name, first in (("a", 1), ("b", 2), ("c", 3))]
    blends = ((prefixes[:1], None), (prefixes[1:], [1.0, 3.0]), None)
    train, valid, test = build_train_valid_test_datasets([5, 8, 0], config(blend_per_split=blends))
    assert test is None and set(train[0]["tokens"]) == {1} and len(valid) == 8
    assert [int(valid[index]["tokens"][0]) for index in range(8)].count(3) == 6
