"""Streams of batches of any data loader (epochs, resuming, broadcasting), and the iterator of micro-batches."""

from collections import deque

import numpy as np
from mindspore import Tensor, mint

from mindspeed_ms.core import num_microbatches_calculator as calculator
from mindspeed_ms.core import parallel_state
from mindspeed_ms.core.context_parallel import marked_like
from mindspeed_ms.training.data_samplers import PretrainingDataLoader, host_array


class DataExhausted(StopIteration):
    """Error: the data has no further batch, because its last epoch is over or it cannot be started again."""


class BatchStream:
    """Stream of a loader's batches over as many epochs as needed.

    Args:
        loader: a `PretrainingDataLoader`, a MindSpore dataset, or an iterable of dicts. An iterator that cannot be
            started again gives one epoch.
        max_epochs (Optional[int]): stop after so many.

    Attributes:
        epoch (int): epochs that are complete.
        batches (int): batches taken from the current one.
    """

    def __init__(self, loader, max_epochs=None):
        self.loader = loader
        self.max_epochs = max_epochs
        self.epoch = self.batches = 0
        self._iterator = None
        self._can_restart = isinstance(loader, PretrainingDataLoader) or not hasattr(loader, "__next__")

    @property
    def is_finite(self):
        """Whether the stream may end."""
        return self.max_epochs is not None or not self._can_restart

    def __iter__(self):
        return self

    def __next__(self):
        if self._iterator is None:
            self._start_epoch()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._end_epoch()
            return next(self)
        self.batches += 1
        return batch

    def _start_epoch(self):
        if self.max_epochs is not None and self.epoch >= self.max_epochs:
            raise DataExhausted(f"all {self.max_epochs} epochs are over")
        if self.epoch and not self._can_restart:
            raise DataExhausted(
                "the data loader is an iterator that cannot be started again; pass a list or an "
                "object whose __iter__ begins anew"
            )
        if hasattr(self.loader, "create_dict_iterator"):
            self._iterator = self.loader.create_dict_iterator(num_epochs=1, output_numpy=True)
        else:
            self._iterator = iter(self.loader)

    def _end_epoch(self):
        if self.batches == 0:
            raise ValueError("the training data is empty: the loader gave no batch.")
        self.epoch, self.batches, self._iterator = self.epoch + 1, 0, None

    def position(self):
        """Position of the stream, the argument of `go_to`."""
        return {"epoch": self.epoch, "batches": self.batches}

    def go_to(self, position, consumed_samples):
        """Go to a saved position by reading over used batches; `consumed_samples` serves loaders that count samples."""
        del consumed_samples
        self.epoch = position["epoch"] if self._can_restart else 0
        self.batches, self._iterator = 0, None
        for _ in range(position["batches"]):
            next(self)


class SampleStream(BatchStream):
    """Stream of a `PretrainingDataLoader`, whose epochs are counted in samples."""

    def __next__(self):
        sampler = self.loader.sampler
        if self.max_epochs is not None and sampler.epoch >= self.max_epochs:
            raise DataExhausted(f"all {self.max_epochs} epochs are over")
        if sampler.epoch != self.epoch:
            self.epoch, self.batches = sampler.epoch, 0
        self.batches += 1
        return next(self.loader)

    def go_to(self, position, consumed_samples):
        """Go to `consumed_samples`, without reading."""
        self.loader.set_consumed_samples(consumed_samples)
        self.epoch, self.batches = self.loader.sampler.epoch, position["batches"]


class BroadcastStream:
    """Stream that broadcasts the first rank's batches to all tensor-parallel ranks.

    Args:
        stream (Optional[BatchStream]): the batches, on the first rank; None on the others.
    """

    def __init__(self, stream):
        self._stream = stream
        self._group = parallel_state.get_tensor_model_parallel_group()
        self.is_finite = self._share(stream.is_finite if stream is not None else None)
        self.epoch = 0

    def _share(self, value):
        return self._group.broadcast_object(value, parallel_state.get_tensor_model_parallel_src_rank())

    def __iter__(self):
        return self

    def __next__(self):
        answer = None
        if self._stream is not None:
            try:
                batch = next(self._stream)
                answer = ("batch", batch, self._stream.epoch)
            except (DataExhausted, ValueError, OSError) as error:
                answer = ("error", error, 0)
        kind, value, self.epoch = self._share(answer)
        if kind == "error":
            raise value
        return value

    def position(self):
        """Position of the first rank's stream; see `BatchStream.position`."""
        return self._share(self._stream.position() if self._stream is not None else None)

    def go_to(self, position, consumed_samples):
        """Move the first rank's stream to a saved position."""
        if self._stream is not None:
            self._stream.go_to(position, consumed_samples)


class MicroBatches:
    """Iterator of micro-batches: batches of a stream, cut as needed.

    Args:
        stream: iterator of batches.
        get_batch_func (Optional[Callable]): `(stream) -> dict`, the full local batch or one micro-batch.
    """

    def __init__(self, stream, get_batch_func=None):
        self.stream = stream
        self._get_batch = get_batch_func or next
        self._waiting = deque()

    def __iter__(self):
        return self

    def __next__(self):
        if not self._waiting:
            batch = self._get_batch(self.stream)
            self._waiting.extend(split_batch(batch, calculator.get_micro_batch_size(), calculator.get_num_microbatches()))
        return self._waiting.popleft()

    def take(self, count):
        """Take the next `count` micro-batches (list[dict])."""
        return [next(self) for _ in range(count)]


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
        {name: to_tensor(_rows_of(value, number * micro_batch_size, micro_batch_size)) for name, value in batch.items()}
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


def _rows_of(value, start, count):
    if not _has_rows(value) or value.shape[0] == 1:
        return value
    if not isinstance(value, Tensor):
        return value[start : start + count]
    return marked_like(mint.narrow(value, 0, start, count), value)


def to_tensor(value):
    """Convert an entry of a batch to a Tensor (numpy arrays are shared, not copied); None and other objects stay."""
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.ascontiguousarray(host_array(value)) if np.ndim(value) else host_array(value)
        return Tensor.from_numpy(array if array.flags.writeable else array.copy())
    return value


def make_stream(loader, max_epochs=None, name="train_data_loader"):
    """Build the stream of a loader's batches.

    Args:
        loader: an iterable of dicts, a MindSpore dataset, or None on ranks whose tensor-parallel rank is not 0 (they get
            the first rank's batches).
        max_epochs (Optional[int]): epochs after which the stream ends.
        name (str): of the loader, for messages.

    Raises:
        ValueError: no data on tensor-parallel rank 0, or an object of another kind.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    present = group.all_gather_object(loader is not None) if group.size > 1 else [loader is not None]
    if not present[0]:
        raise ValueError(
            f"{name} is None on tensor-parallel rank 0: it must have the data (other tensor-parallel ranks may pass None)."
        )
    stream = None if loader is None else _stream_of(loader, max_epochs, name)
    return stream if all(present) else BroadcastStream(stream if group.rank == 0 else None)


def _stream_of(loader, max_epochs, name):
    if isinstance(loader, PretrainingDataLoader):
        return SampleStream(loader, max_epochs)
    if hasattr(loader, "create_dict_iterator") or hasattr(loader, "__iter__"):
        return BatchStream(loader, max_epochs)
    raise ValueError(
        f"{name} is a {type(loader).__name__}: expected an iterable of dicts, a MindSpore dataset, or "
        "samples by __getitem__ and __len__."
    )
