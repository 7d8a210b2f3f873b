"""From datasets to the iterator of micro-batches. Source of names and sample order: Megatron's training/data."""

import numpy as np
from mindspore import Tensor

from mindspeed_ms.core import num_microbatches_calculator as calculator
from mindspeed_ms.core import parallel_state
from mindspeed_ms.training.data_samplers import PretrainingRandomSampler, PretrainingSampler
from mindspeed_ms.training.global_vars import get_all_config


def get_train_valid_test_num_samples(all_config=None):
    """How many samples a run needs.

    Args:
        all_config (Optional[AllConfig]): default: the configuration of this process.

    Returns:
        tuple[int, int, int]: samples for training, for all evaluations during it, and for the test at its end.
    """
    all_config = all_config or get_all_config()
    training, dataset = all_config.training_config, all_config.dataset_config
    batch = global_batch_size(all_config)
    train_samples = dataset.train_samples or training.training_iters * batch
    iterations = training_iters_of_config(all_config)
    evaluations = iterations // training.eval_interval + 1 if training.eval_interval else 1
    return train_samples, evaluations * training.eval_iters * batch, training.eval_iters * batch


def global_batch_size(all_config):
    """Samples of a step over all data-parallel ranks."""
    dataset = all_config.dataset_config
    if dataset.global_batch_size is not None:
        return dataset.global_batch_size
    return dataset.batch_size * dataset.micro_batch_num * parallel_state.get_data_parallel_world_size()


def training_iters_of_config(all_config):
    """Steps of the run by training_iters, else by train_samples and the batch sizes; 0 if neither is set."""
    training, dataset = all_config.training_config, all_config.dataset_config
    if training.training_iters or not dataset.train_samples:
        return training.training_iters
    ramp_up = dataset.rampup_batch_size
    sizes = calculator.make_num_microbatches_calculator(
        ramp_up,
        global_batch_size(all_config),
        dataset.batch_size,
        parallel_state.get_data_parallel_world_size(),
        dataset.decrease_batch_size_if_needed,
    )
    return calculator.iterations_of_samples(sizes, dataset.train_samples, ramp_up[2] if ramp_up else 0)


def build_pretraining_data_loader(dataset, consumed_samples, all_config=None):
    """A loader of micro-batches for this data-parallel rank.

    Args:
        dataset: anything with `__len__` and `__getitem__`, whose samples are dicts of arrays; None gives None.
        consumed_samples (int): samples that earlier steps have used, over all data-parallel ranks.
        all_config (Optional[AllConfig]): default: the configuration of this process; read: micro-batch size,
            dataloader_type (cyclic shuffles), drop_remainder, seed.

    Returns:
        Optional[PretrainingDataLoader]: with dataloader_type external, the dataset itself.
    """
    if dataset is None:
        return None
    all_config = all_config or get_all_config()
    settings = all_config.dataset_config
    if settings.dataloader_type == "external":
        return dataset
    arguments = (
        len(dataset),
        consumed_samples,
        settings.batch_size,
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
        settings.drop_remainder,
    )
    if settings.dataloader_type == "cyclic" or settings.shuffle:
        sampler = PretrainingRandomSampler(*arguments, seed=all_config.training_config.random_seed)
    else:
        sampler = PretrainingSampler(*arguments)
    return PretrainingDataLoader(dataset, sampler)


class PretrainingDataLoader:
    """Iterates over micro-batches without end: dicts of numpy arrays `[micro batch, ...]`.

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
        """Go to where a run stands that has used so many samples."""
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


def split_batch(batch, micro_batch_size, num_microbatches):
    """Cut a batch into micro-batches along its first dimension.

    Args:
        batch (dict): arrays or Tensors of `micro_batch_size` rows (one micro-batch) or `num_microbatches` times as many
            (all of a step); an entry with one row, a number or None goes to each of them.

    Returns:
        list[dict]: Tensors.

    Raises:
        ValueError: not a dict, or another number of rows.
    """
    if not isinstance(batch, dict):
        raise ValueError(f"a batch is a {type(batch).__name__}: expected a dict keyed by the names of the model's construct.")
    batch = {name: _array_of_list(name, value) for name, value in batch.items()}
    rows = max((value.shape[0] for value in batch.values() if _has_rows(value)), default=1)
    for name, value in batch.items():
        _check_rows(name, value, rows)
    if rows == micro_batch_size:
        return [{name: to_tensor(value) for name, value in batch.items()}]
    if rows != micro_batch_size * num_microbatches:
        raise ValueError(
            f"a batch has {rows} rows: expected {micro_batch_size * num_microbatches} (micro batch "
            f"{micro_batch_size} x {num_microbatches} micro-batches), or {micro_batch_size} for one "
            f"micro-batch at a time. The entries are {_shapes(batch)}."
        )
    return [
        {name: to_tensor(_rows_of(value, rows, number * micro_batch_size, micro_batch_size)) for name, value in batch.items()}
        for number in range(num_microbatches)
    ]


def _array_of_list(name, value):
    if not isinstance(value, list):
        return value
    try:
        return host_array(value)
    except ValueError as error:
        raise ValueError(
            f"entry {name!r} of a batch is a list that makes no array ({error}): expected equal lengths in each dimension."
        ) from error


def _shapes(batch):
    return ", ".join(f"{name} {tuple(value.shape)}" for name, value in batch.items() if _has_rows(value))


def _has_rows(value):
    return hasattr(value, "shape") and len(value.shape) > 0


def _check_rows(name, value, rows):
    if _has_rows(value) and value.shape[0] not in (1, rows):
        raise ValueError(
            f"entry {name!r} of a batch has {value.shape[0]} rows where others have {rows}: expected the "
            "same number, or 1 for an entry that all samples share."
        )


def _rows_of(value, rows, start, count):
    if not _has_rows(value) or value.shape[0] == 1 != rows:
        return value
    return value[start : start + count]


def to_tensor(value):
    """Tensor of a batch's entry (numpy arrays are shared, not copied); None and other objects stay what they are."""
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.ascontiguousarray(host_array(value)) if np.ndim(value) else host_array(value)
        return Tensor.from_numpy(array if array.flags.writeable else array.copy())
    return value
