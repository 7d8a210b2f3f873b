"""GPTDataset, blends and index helpers against arrays recorded from Megatron-LM core_v0.12.1, bit by bit."""

import json

import numpy as np

from mindspeed_ms.core.datasets import helpers
from mindspeed_ms.core.datasets.blended_megatron_dataset_builder import build_train_valid_test_datasets
from mindspeed_ms.core.datasets.gpt_dataset import GPTDatasetConfig
from mindspeed_ms.core.datasets.splits import Split
from tests.datasets.golden import data_folder


def equal(ours, recorded):
    return ours.dtype == recorded.dtype and np.array_equal(ours, recorded)


def recordings(pattern):
    paths = sorted(data_folder().glob(pattern))
    assert paths
    for path in paths:
        recorded = np.load(path)
        yield path.name, json.loads(str(recorded["meta"])), recorded


def build(meta, cache, **settings):
    prefixes = [str(data_folder() / name) for name in meta.get("paths") or [meta["prefix"]]]
    config = GPTDatasetConfig(
        random_seed=meta["seed"],
        sequence_length=meta["seq"],
        eod_token_id=0,
        split=meta["split"],
        blend=(prefixes, meta.get("weights")),
        path_to_cache=cache,
        **meta.get("extra", {}),
        **settings,
    )
    return build_train_valid_test_datasets(meta["sizes"], config)


def check_samples(dataset, prefix, recorded, name):
    names = [key.rpartition("/")[2] for key in recorded.files if key.startswith(f"{prefix}/sample/")]
    for index in range(len(recorded[f"{prefix}/sample/tokens"])):
        sample = dataset[index]
        assert sorted(sample) == sorted(names)
        for key, value in sample.items():
            assert equal(value, recorded[f"{prefix}/sample/{key}"][index]), (name, prefix, index, key)


def check_indices(dataset, prefix, recorded, name):
    for key in ("document_index", "sample_index", "shuffle_index", "indices"):
        assert equal(getattr(dataset, key), recorded[f"{prefix}/{key}"]), (name, prefix, key)


def test_gpt_datasets(tmp_path):
    for name, meta, recorded in recordings("gptdataset_*.npz"):
        for _ in ("built", "found in the cache"):
            for split, dataset in zip(Split, build(meta, tmp_path)):
                if f"{split.name}/document_index" not in recorded.files:
                    assert dataset is None
                    continue
                check_indices(dataset, split.name, recorded, name)
                check_samples(dataset, split.name, recorded, name)


def test_blends(tmp_path):
    for name, meta, recorded in recordings("blend_*.npz"):
        for mmap in (True, False):
            for split, dataset in zip(Split, build(meta, tmp_path, mmap_bin_files=mmap)):
                assert equal(np.asarray(dataset.weights, np.float64), recorded[f"{split.name}/weights"])
                for key in ("dataset_index", "dataset_sample_index"):
                    assert equal(getattr(dataset, key), recorded[f"{split.name}/{key}"]), (name, split, key)
                for number, part in enumerate(dataset.datasets):
                    check_indices(part, f"{split.name}/part{number}", recorded, name)
                check_samples(dataset, split.name, recorded, name)


def test_helpers():
    recorded = np.load(data_folder() / "helpers.npz")
    for key in recorded.files:
        kind, number, what = key.split("/")
        of = {name.split("/")[2]: recorded[name] for name in recorded.files if name.startswith(f"{kind}/{number}/")}
        if kind == "sample_idx" and what.startswith("extra"):
            extra, drop = (int(word[-1]) for word in what.split("_"))
            epochs = len(of["docs"]) // len(of["lens"])
            ours = helpers.build_sample_idx(
                of["lens"], of["docs"], int(of["seq"]), epochs, int(of["lens"].sum()), bool(drop), bool(extra)
            )
            assert equal(ours, recorded[key]), key
        elif what == "dataset":
            ours = (
                helpers.build_blending_indices(of["w"], len(of["dataset"]))
                if kind == "blend"
                else helpers.build_exhaustive_blending_indices(of["sizes"].tolist())
            )
            assert equal(ours[0], of["dataset"]) and equal(ours[1], of["sample"]), key


def test_a_mask_that_is_not_wanted_is_not_made(tmp_path):
    _, meta, recorded = next(recordings("gptdataset_small.npz"))
    sample = build(meta, tmp_path, create_attention_mask=False)[0][0]
    assert "attention_mask" not in sample and equal(sample["tokens"], recorded["train/sample/tokens"][0])
