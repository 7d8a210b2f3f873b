"""Datasets of megatron-core: `python megatron_datasets.py CASES.json OUT_FOLDER`.

CASES is a list of {"config": fields of GPTDatasetConfig, "sizes", "eod", "pad", "samples"}; OUT_FOLDER/<number>.npz receives
the index arrays and the first samples of each split, or `refused`.
"""

import json
import multiprocessing
import shutil
import sys
from pathlib import Path

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

SPLITS = ("train", "valid", "test")


class Tokenizer:
    """The two ids that datasets ask for."""

    def __init__(self, eod, pad):
        self.eod = eod
        if pad is not None:
            self.pad = pad
        self.unique_identifiers = {"class": "Tokenizer"}


def arrays_of(dataset, samples):
    """Index arrays and samples (dict)."""
    result = {}
    parts = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
    if isinstance(dataset, BlendedDataset):
        result.update(dataset_index=dataset.dataset_index, dataset_sample_index=dataset.dataset_sample_index)
    for number, part in enumerate(parts):
        # 0.12.1 writes the mask of a padded sample into the one that all samples share
        part.masks_and_position_ids_are_cacheable = False
        for key in ("document_index", "sample_index", "shuffle_index"):
            result[f"part{number}/{key}"] = getattr(part, key)
    for index in range(min(samples, len(dataset))):
        for key, value in dataset[index].items():
            result[f"sample{index}/{key}"] = np.asarray(value)
    return result


def run(case):
    """Arrays (dict) of one case."""
    config = dict(case["config"])
    for prefix in case["prefixes"]:  # the kept indices do not know all options
        shutil.rmtree(Path(prefix) / "cache", ignore_errors=True)
    config = GPTDatasetConfig(tokenizer=Tokenizer(case["eod"], case["pad"]), **config)
    kind = MockGPTDataset if config.mock else GPTDataset
    datasets = BlendedMegatronDatasetBuilder(kind, case["sizes"], lambda: True, config).build()
    return {
        f"{split}/{key}": value
        for split, dataset in zip(SPLITS, datasets)
        if dataset is not None
        for key, value in arrays_of(dataset, case["samples"]).items()
    }


def write(case, path):
    """Run a case into a file."""
    try:
        arrays = run(case)
    except AssertionError as error:  # how megatron-core refuses a case
        arrays = {"refused": str(error)}
    np.savez(path, **arrays)


if __name__ == "__main__":
    for number, one in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        path = Path(sys.argv[2]) / f"{number}.npz"
        process = multiprocessing.get_context("fork").Process(target=write, args=(one, path))
        process.start()
        process.join(5)
        if process.is_alive():  # without a single token it counts epochs for ever
            process.kill()
            process.join()
            np.savez(path, refused="endless")
