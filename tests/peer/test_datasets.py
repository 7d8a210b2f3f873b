"""GPT datasets of random files and options against megatron-core's own (needs the `[peer]` extra)."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_ms.core.datasets.blended_megatron_dataset_builder import build_train_valid_test_datasets
from mindspeed_ms.core.datasets.errors import DatasetError
from mindspeed_ms.core.datasets.gpt_dataset import GPTDatasetConfig
from mindspeed_ms.core.datasets.indexed_dataset import IndexedDatasetBuilder
from mindspeed_ms.core.datasets.splits import Split

pytestmark = pytest.mark.peer
CASES = 80


def write_files(folder, random):
    """Prefixes of three datasets with short, long and empty documents."""
    prefixes = []
    for name, dtype, most, documents in (("a", np.uint16, 90, 300), ("b", np.int32, 8, 700), ("c", np.uint16, 600, 60)):
        with IndexedDatasetBuilder(f"{folder}/{name}.bin", dtype) as builder:
            for _ in range(documents):
                ids = random.randint(1, 50, random.randint(0 if name == "b" else 1, most))
                builder.add_document(np.append(ids, 0), [len(ids) // 3, len(ids) + 1 - len(ids) // 3])
            builder.finalize(f"{folder}/{name}.idx")
        prefixes.append(f"{folder}/{name}")
    return prefixes


def random_case(random, prefixes):
    """Options, sizes and data of one case."""

    def blend(needs_weights):
        chosen = [str(prefix) for prefix in random.permutation(prefixes)[: random.randint(1, 4)]]
        return chosen, [float(weight) for weight in random.rand(len(chosen)) + 0.01] if needs_weights else None

    extra = bool(random.randint(4))
    config = {
        "random_seed": int(random.randint(1, 2**31)),
        "sequence_length": int(random.randint(2, 80)),
        "add_extra_token_to_sequence": extra,
        "drop_last_partial_validation_sequence": bool(random.randint(2)),
        **{
            name: bool(random.randint(2))
            for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask")
        },
    }
    weights, kind = bool(random.randint(2)), random.choice(["blend", "blend_per_split", "mock"], p=[0.65, 0.3, 0.05])
    if kind == "blend":
        config.update(blend=blend(weights), split=str(random.choice(["969,30,1", "8,1,1", "0.7,0.3", "1", "98, 1, 1"])))
    elif kind == "blend_per_split":
        config.update(blend_per_split=[blend(weights), blend(weights) if random.randint(3) else None, blend(weights)])
    sizes = [int(random.randint(1, 4000)), int(random.randint(1, 400)), int(random.randint(1, 60))]
    if not weights and random.randint(2):
        sizes = [None if kind != "mock" else 5] * 3
    return {
        "config": config,
        "sizes": sizes,
        "eod": 0,
        "pad": [None, 7, 0][random.randint(3)],
        "samples": 12,
        "prefixes": prefixes,
    }


def ours(case):
    config = dict(case["config"])
    mock = not config.get("blend") and not config.get("blend_per_split")
    config = GPTDatasetConfig(eod_token_id=case["eod"], pad_token_id=case["pad"], mock=mock, **config)
    result = {}
    for split, dataset in zip(Split, build_train_valid_test_datasets(case["sizes"], config)):
        if dataset is None:
            continue
        if hasattr(dataset, "datasets"):
            result.update({f"{split.name}/{key}": getattr(dataset, key) for key in ("dataset_index", "dataset_sample_index")})
        for number, part in enumerate(getattr(dataset, "datasets", [dataset])):
            for key in ("document_index", "sample_index", "shuffle_index"):
                result[f"{split.name}/part{number}/{key}"] = getattr(part, key)
        for index in range(min(case["samples"], len(dataset))):
            result.update({f"{split.name}/sample{index}/{key}": value for key, value in dataset[index].items()})
    return result


def test_random_cases(tmp_path):
    random = np.random.RandomState(int(os.environ.get("MINDSPEED_MS_PEER_SEED", "0")))
    prefixes = write_files(tmp_path, random)
    cases = [random_case(random, prefixes) for _ in range(CASES)]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("megatron_datasets.py")
    subprocess.run([sys.executable, str(script), str(tmp_path / "cases.json"), str(tmp_path)], check=True)
    compared = 0
    for number, case in enumerate(cases):
        theirs = np.load(tmp_path / f"{number}.npz")
        if "refused" in theirs.files:
            with contextlib.suppress(DatasetError):  # ours may serve more cases
                ours(case)
            continue
        compared += 1
        mine = ours(case)
        assert sorted(theirs.files) == sorted(mine), (case, set(theirs.files) ^ set(mine))
        for key in theirs.files:
            assert theirs[key].dtype == mine[key].dtype and np.array_equal(theirs[key], mine[key]), (key, case)
    assert compared > 0.7 * CASES
