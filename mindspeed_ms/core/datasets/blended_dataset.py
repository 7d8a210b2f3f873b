"""BlendedDataset: several datasets mixed by weights; order and sizes: Megatron-LM core_v0.12.1."""

import math
import operator

import numpy as np

from mindspeed_ms.core.datasets.errors import DatasetError
from mindspeed_ms.core.datasets.helpers import build_blending_indices, build_exhaustive_blending_indices
from mindspeed_ms.core.datasets.index_cache import cached_arrays, content_hash
from mindspeed_ms.core.datasets.splits import normalize

_MOST_DATASETS = 32766  # the index is int16


class BlendedDataset:
    """Weighted mixture of datasets of one split. A sample is that of its dataset with `dataset_id` (int16).

    Args:
        datasets (list): the parts.
        weights (list[float or int]): their shares; without a size the number of samples that each gives.
        size (Optional[int]): samples of the mixture; None: all that the weights say.
        config (GPTDatasetConfig): its `path_to_cache` keeps the index.

    Attributes:
        dataset_index (np.ndarray): int16, the part of each sample.
        dataset_sample_index (np.ndarray): int64, the sample of that part.

    Raises:
        DatasetError: a weight that is not above 0, or a part with fewer samples than it is to give.
    """

    def __init__(self, datasets, weights, size, config):
        self.datasets = datasets
        self.split = datasets[0].index_split
        self.size = size
        self.config = config
        self._check(weights)
        self.weights = normalize(weights) if size is not None else list(weights)
        self.dataset_index, self.dataset_sample_index = self._indices()
        for dataset, count in zip(datasets, np.bincount(self.dataset_index, minlength=len(datasets))):
            if count > len(dataset):
                raise DatasetError(f"the blend takes {count} samples of the {dataset.name()}, which has {len(dataset)}.")

    def _check(self, weights):
        if len(weights) != len(self.datasets) or len(weights) > _MOST_DATASETS:
            raise DatasetError(
                f"{len(self.datasets)} datasets are blended with {len(weights)} weights: expected as many, at "
                f"most {_MOST_DATASETS}."
            )
        for dataset, weight in zip(self.datasets, weights):
            if not 0 < weight < math.inf:
                reason = (
                    "has no samples: give it more documents or leave it out"
                    if not len(dataset)
                    else (f"has the weight {weight}: expected a number above 0")
                )
                raise DatasetError(f"the {dataset.name()} {reason}.")

    def _indices(self):
        settings = {"weights": self.weights, "size": self.size}

        def build():
            if self.size is None:
                arrays = build_exhaustive_blending_indices(self.weights)
            else:
                arrays = build_blending_indices(self.weights, self.size)
            return dict(zip(("dataset_index", "dataset_sample_index"), arrays))

        name = f"{content_hash(settings)}-{type(self).__name__}-{self.split.name}"
        datasets = [dataset.dataset_path for dataset in self.datasets]
        return cached_arrays(self.config.path_to_cache, name, {"datasets": datasets, **settings}, build).values()

    def __len__(self):
        return len(self.dataset_index)

    def __getitem__(self, index):
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of a blend of {len(self)}")
        dataset = self.dataset_index[index]
        return {"dataset_id": dataset, **self.datasets[dataset][self.dataset_sample_index[index]]}
