"""A training that was ended and continued gives the same bits as one that was not."""

import numpy as np
import pytest

from mindspeed_ms.testing import checkpoint_runs as runs
from tests.datasets.test_indexed_dataset import write

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
FP16 = {"fp16": True, "loss_scale_value": 2.0**18, "loss_scale_factor": 2.0, "loss_scale_window": 2, "hysteresis": 1}
CASES = {
    "tp2pp2": (4, {"parallel": {**TP2, **PP2}}),
    "dp2 distributed optimizer, dropout": (
        2,
        {"training": {"use_distributed_optimizer": True, "bf16": True}, "sizes": DROPOUT},
    ),
    "fp16 with a dynamic scale": (1, {"training": FP16, "model": "untied"}),
    "ramp-up in mid-epoch": (
        2,
        {"row_count": 25, "dataset": {"rampup_batch_size": [4, 4, 12], "shuffle": True, "train_samples": 44}},
    ),
    "blended indexed files": (2, {"blend": True, "sizes": DROPOUT}),
    "z3, dropout, saved beside the training": (
        2,
        {"parallel": {"zero_level": "z3"}, "sizes": DROPOUT, "training": {"async_save": True}},
    ),
}


class Blend:
    """Samples of two of Megatron's indexed files, mixed; those that were read are noted by their tokens."""

    def __init__(self, folder):
        from mindspeed_ms.training import gpt_datasets

        names = {"data_path": ["0.3", str(folder / "x"), "0.7", str(folder / "y")], "split": "1,0,0"}
        count = runs.STEPS * runs.GLOBAL_BATCH
        self.samples = gpt_datasets.build_datasets(runs.make_config(folder, dataset=names), (count, 0, 0))[0]
        self.read = []

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        sample = self.samples[index]
        self.read.append((sample.pop("dataset_id"), sample["tokens"].tolist()))
        return sample


def whole(folder, row_count=None, blend=False, **settings):
    rows = Blend(folder.parent) if blend else row_count and runs.Rows(row_count)
    return runs.train(folder, rows=rows, **settings)


def in_parts(folder, row_count=None, blend=False, **settings):
    training = {**settings.pop("training", {}), "resume_training": True}
    parts = [
        whole(folder, row_count, blend, training={**training, "exit_interval": 3}, **settings),
        whole(folder, row_count, blend, training=training, **settings),
    ]
    return parts[0]["rows"], parts[1]


@pytest.mark.parametrize("case", CASES)
def test_same_layout_same_bits(world, tmp_path, case):
    size, settings = CASES[case]
    for number, name in enumerate("xy"):
        write(tmp_path / name, [np.random.RandomState(row + 99 * number).randint(0, 60, 40) for row in range(40)])
    expected = world(size)(whole, tmp_path / "whole", **settings)
    found = world(size)(in_parts, tmp_path / "parts", **settings)
    for (rows, part), reference in zip(found, expected):
        assert part["iteration"] == reference["iteration"]
        for name in ("losses", "norms", "lr", "scale"):
            assert part[name] == reference[name], name
        assert rows[: len(reference["rows"])] + part["rows"] == reference["rows"]
        for name, (_, values) in reference["weights"].items():
            assert np.array_equal(part["weights"][name][1], values), name
