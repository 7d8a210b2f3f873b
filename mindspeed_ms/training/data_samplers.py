"""Samplers and PretrainingDataLoader: the samples of each micro-batch of a data-parallel rank.

Source: Megatron's pretraining samplers: consecutive blocks of a micro-batch per rank, data-parallel rank fastest,
counted by `consumed_samples`. Here a pass over the data is followed by the next one.
"""

import numpy as np
from mindspore import Tensor

from mindspeed_ms.core.datasets.errors import DatasetError


class PretrainingSampler:
    """Sampler of indices in order.

    Args:
        total_samples (int): samples of the dataset.
        consumed_samples (int): samples that earlier steps have used, over all data-parallel ranks.
        micro_batch_size (int): samples of a micro-batch.
        data_parallel_rank, data_parallel_size (int): this rank's place.
        drop_last (bool): a pass ends with its last whole micro-batch over all ranks; else the next pass fills it up.
        name (str): of the dataset, for errors.

    Raises:
        DatasetError: the dataset has fewer samples than one micro-batch over all ranks.
    """

    def __init__(
        self,
        total_samples,
        consumed_samples,
        micro_batch_size,
        data_parallel_rank,
        data_parallel_size,
        drop_last=True,
        name="dataset",
    ):
        self.unit = micro_batch_size * data_parallel_size
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        if total_samples <= 0:
            raise DatasetError(f"the {name} has {total_samples} samples: expected at least one.")
        if drop_last and total_samples < self.unit:
            advice = "; --eval-iters 0 evaluates nothing." if name.startswith(("validation", "test")) else "."
            raise DatasetError(
                f"the {name} has {total_samples} samples, fewer than micro batch size {micro_batch_size} "
                f"x data-parallel size {data_parallel_size} = {self.unit}: use more data, a smaller "
                "batch, or drop_remainder False" + advice
            )
        self.samples_per_epoch = total_samples // self.unit * self.unit if drop_last else total_samples
        self.samples_counted_as_epoch = self.samples_per_epoch  # less for a dataset that holds several passes

    @property
    def epoch(self):
        """Number of complete passes."""
        return self.consumed_samples // self.samples_counted_as_epoch

    def next_indices(self):
        """Dataset indices (list[int]) of this rank's next micro-batch."""
        first = self.consumed_samples + self.data_parallel_rank * self.micro_batch_size
        self.consumed_samples += self.unit
        return [self._index(position) for position in range(first, first + self.micro_batch_size)]

    def _index(self, position):
        return position % self.samples_per_epoch


class PretrainingRandomSampler(PretrainingSampler):
    """Sampler of indices in a new random order on every pass, equal on all ranks.

    Args:
        seed (int): with the number of the pass it decides the order; other arguments as in `PretrainingSampler`.
    """

    def __init__(self, *args, seed=1234, **kwargs):
        super().__init__(*args, **kwargs)
        self.seed = seed
        self._order = (None, None)

    def _index(self, position):
        epoch, place = divmod(position, self.samples_per_epoch)
        if self._order[0] != epoch:
            generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            self._order = (epoch, generator.permutation(self.total_samples))
        return int(self._order[1][place])


class PretrainingDataLoader:
    """Endless loader of micro-batches: dicts of numpy arrays `[micro batch, ...]`.

    Args:
        dataset: samples by index, each a dict of arrays or numbers.
        sampler (PretrainingSampler): which of them.
    """

    def __init__(self, dataset, sampler):
        self.dataset = dataset
        self.sampler = sampler

    def __iter__(self):
        return self

    def __next__(self):
        indices = self.sampler.next_indices()
        if hasattr(self.dataset, "micro_batch"):  # it fills samples up to one length
            return self.dataset.micro_batch(indices)
        return collate([self.dataset[index] for index in indices])

    def set_consumed_samples(self, consumed_samples):
        """Continue after `consumed_samples` samples, counted over all data-parallel ranks."""
        self.sampler.consumed_samples = consumed_samples


def collate(samples):
    """Stack samples (dicts with equal keys) into one dict of arrays.

    Raises:
        ValueError: a sample is no dict, or an entry has different shapes in different samples.
    """
    first = samples[0]
    if not isinstance(first, dict):
        raise ValueError(
            f"a sample of the dataset is a {type(first).__name__}: expected a dict of arrays, such as "
            "{'tokens': ..., 'labels': ...}."
        )
    batch = {}
    for name in first:
        arrays = [host_array(sample[name]) for sample in samples]
        if len({array.shape for array in arrays}) > 1:
            raise ValueError(
                f"entry {name!r} has shapes {sorted({array.shape for array in arrays})} in one "
                "micro-batch: expected equal ones."
            )
        batch[name] = np.stack(arrays)
    return batch


def host_array(value):
    """Numpy array of an entry of a batch; float64 becomes float32, which MindSpore's operators take."""
    array = value.asnumpy() if isinstance(value, Tensor) else np.asarray(value)
    return array.astype(np.float32) if array.dtype == np.float64 else array
