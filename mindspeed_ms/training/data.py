"""Data of a run (training, validation, test), its length and batch sizes. Source of names: Megatron's training/data."""

from dataclasses import dataclass

from mindspeed_ms.config import spelled
from mindspeed_ms.core import comm, parallel_state
from mindspeed_ms.core import num_microbatches_calculator as calculator
from mindspeed_ms.core.logging import logger
from mindspeed_ms.training.data_samplers import PretrainingDataLoader, PretrainingRandomSampler, PretrainingSampler
from mindspeed_ms.training.data_streams import DataExhausted, MicroBatches, make_stream
from mindspeed_ms.training.initialize import get_all_config


def get_train_valid_test_num_samples(all_config=None, samples_per_epoch=None):
    """Numbers of training, validation and test samples that a run needs.

    Args:
        all_config (Optional[AllConfig]): default: the configuration of this process.
        samples_per_epoch (Optional[int]): see `training_iters_of_config`.

    Returns:
        tuple[int, int, int]: samples for training, for all evaluations during it, and for the test at its end.
    """
    all_config = all_config or get_all_config()
    training, batch = all_config.training_config, global_batch_size(all_config)
    train_samples = _train_samples(all_config, samples_per_epoch) or training.training_iters * batch
    iterations = training_iters_of_config(all_config, samples_per_epoch)
    evaluations = iterations // training.eval_interval + 1 if training.eval_interval else 1
    return train_samples, evaluations * training.eval_iters * batch, training.eval_iters * batch


def global_batch_size(all_config):
    """Number of samples of a step over all data-parallel ranks."""
    dataset = all_config.dataset_config
    if dataset.global_batch_size is not None:
        return dataset.global_batch_size
    return dataset.batch_size * dataset.micro_batch_num * parallel_state.get_data_parallel_world_size()


def init_batch_sizes(all_config):
    """Set up the calculator of micro-batches per step."""
    calculator.init_num_microbatches_calculator(comm.get_rank(), *_batch_sizes(all_config))


def _batch_sizes(all_config):
    """Arguments of `make_num_microbatches_calculator`."""
    settings = all_config.dataset_config
    sizes = global_batch_size(all_config), settings.batch_size, parallel_state.get_data_parallel_world_size()
    return settings.rampup_batch_size, *sizes, settings.decrease_batch_size_if_needed


def training_iters_of_config(all_config, samples_per_epoch=None):
    """Number of steps of the run by training_iters, else by train_samples or epochs, and batch sizes; 0 if none is set.

    Args:
        all_config (AllConfig): the configuration.
        samples_per_epoch (Optional[int]): samples of a pass over the training data, if epochs are the length of the run and it
            is known before the data is built.
    """
    training, samples = all_config.training_config, _train_samples(all_config, samples_per_epoch)
    if training.training_iters or not samples:
        return training.training_iters
    sizes = calculator.make_num_microbatches_calculator(*_batch_sizes(all_config))
    ramp_up = all_config.dataset_config.rampup_batch_size
    return calculator.iterations_of_samples(sizes, samples, ramp_up[2] if ramp_up else 0)


def _train_samples(all_config, samples_per_epoch):
    """Samples of the training by train_samples or epochs, of whose passes each is whole global batches; 0: neither says it.

    Raises:
        ValueError: a pass is less than a global batch.
    """
    training, dataset = all_config.training_config, all_config.dataset_config
    if samples_per_epoch is None:
        return dataset.train_samples
    batch = calculator.make_num_microbatches_calculator(*_batch_sizes(all_config)).current_global_batch_size
    if samples_per_epoch < batch:
        raise _short_epoch(all_config, batch, samples_per_epoch)
    return training.epochs * (samples_per_epoch // batch * batch)


def _short_epoch(all_config, batch, samples=None):
    """Error of epochs that have no whole global batch."""
    epochs, size = (spelled(all_config, path) for path in ("training_config.epochs", "dataset_config.global_batch_size"))
    steps = samples and all_config.training_config.epochs * samples // batch
    return ValueError(
        f"{epochs} is {all_config.training_config.epochs}, but a pass over the training data has "
        f"{'less than a' if samples is None else f'{samples} samples and no'} global batch of {batch}: lower {size}"
        f"{'' if steps == 0 else ', or set training_iters (--train-iters)'}{f' to {steps}' if steps else ''}."
    )


def build_pretraining_data_loader(dataset, consumed_samples, all_config=None, name="dataset"):
    """Build a loader of micro-batches for this data-parallel rank.

    Args:
        dataset: anything with `__len__` and `__getitem__`, whose samples are dicts of arrays; None gives None.
        consumed_samples (int): samples that earlier steps have used, over all data-parallel ranks.
        all_config (Optional[AllConfig]): default: the configuration of this process; read: micro-batch size,
            dataloader_type (cyclic shuffles), drop_remainder, seed.
        name (str): of the data, for errors.

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
        sampler = PretrainingRandomSampler(*arguments, seed=all_config.training_config.random_seed, name=name)
    else:
        sampler = PretrainingSampler(*arguments, name=name)
    return PretrainingDataLoader(dataset, sampler)


@dataclass
class TrainingData:
    """Data of a training: streams of micro-batches for training, validation and test.

    Attributes:
        train, valid, test (Optional[MicroBatches]): iterators of micro-batches; None: there is no such data.
        training_iters (int): steps of the whole training.
        reads_ahead (bool): the micro-batches of a step are read before it starts, so that data that ends does so
            between steps; off for a forward step that may read other numbers of them.
    """

    train: MicroBatches
    valid: MicroBatches | None
    test: MicroBatches | None
    training_iters: int
    reads_ahead: bool = True

    def __post_init__(self):
        self._consumed_before = {"train": 0, "valid": 0}  # samples of other data, before new_dataset
        self._may_end = any(comm.world_group().all_gather_object(bool(self.train.stream.is_finite)))

    @property
    def epoch(self):
        """Number of complete epochs of the training data."""
        return self.train.stream.epoch

    def of_step(self):
        """Iterator of the next step's micro-batches.

        Raises:
            DataExhausted: on all ranks, if one of them has no more data.
        """
        if not self.reads_ahead:
            return self.train
        reason, batches = None, []
        try:
            batches = self.train.take(calculator.get_num_microbatches())
        except DataExhausted as error:
            reason = str(error)
        if self._may_end:
            reason = next((text for text in comm.world_group().all_gather_object(reason) if text), None)
        if reason:
            raise DataExhausted(reason)
        return iter(batches)

    def positions(self):
        """Positions of training and validation data, for a checkpoint."""
        saved = self._saved().items()
        return {name: {**data.stream.position(), "consumed_before": self._consumed_before[name]} for name, data in saved}

    def go_to(self, positions, consumed_samples):
        """Continue at saved `positions()`; indexed samples continue at `consumed_samples` (dict[str, int]) of the training."""
        for name, data in self._saved().items():
            position = positions.get(name, {"epoch": 0, "batches": 0})
            self._consumed_before[name] = position.get("consumed_before", 0)
            data.stream.go_to(position, consumed_samples[name] - self._consumed_before[name])

    def start_anew(self, consumed_samples):
        """Read new data from its beginning, in a training that has used `consumed_samples` (dict[str, int]) of other data."""
        self._consumed_before.update(consumed_samples)

    def _saved(self):
        return {name: data for name, data in (("train", self.train), ("valid", self.valid)) if data is not None}


def build_data(all_config, datasets_provider, loaders, get_batch_func=None, reads_ahead=True):
    """Build the TrainingData of a run.

    Args:
        all_config (AllConfig): the configuration.
        datasets_provider (Optional[Callable]): see `pretrain`.
        loaders (sequence): training, validation, test; a loader that is not None goes before the provider's dataset.
        get_batch_func (Optional[Callable]): see `pretrain`.
        reads_ahead (bool): see `TrainingData`.

    Raises:
        ValueError: there is no training data, or nothing says how long to train; `skip_train` without data to evaluate.
    """
    names = ("training data", "validation data", "test data")
    samples_per_epoch = _samples_per_epoch(all_config, datasets_provider) if loaders[0] is None else None
    loaders = [_as_loader(loader, all_config, name) for loader, name in zip(loaders, names)]
    if datasets_provider is not None:
        loaders = [
            loader if loader is not None else build_pretraining_data_loader(dataset, 0, all_config, name)
            for loader, dataset, name in zip(loaders, _provide(datasets_provider, all_config, samples_per_epoch), names)
        ]
    training_iters = resolve_training_iters(all_config, loaders[0], samples_per_epoch)
    if samples_per_epoch and isinstance(loaders[0], PretrainingDataLoader):  # its dataset holds all passes
        loaders[0].sampler.samples_counted_as_epoch = (
            _train_samples(all_config, samples_per_epoch) // all_config.training_config.epochs
        )
    train = make_stream(loaders[0], None if samples_per_epoch else all_config.training_config.epochs)
    valid, test = (
        MicroBatches(make_stream(loader, name=name), get_batch_func) if _anyone_has(loader) else None
        for loader, name in zip(loaders[1:], ("valid_data_loader", "test_data_loader"))
    )
    if all_config.training_config.skip_train and valid is None and test is None:
        raise ValueError("skip_train is set, but there is no validation or test data to evaluate.")
    return TrainingData(MicroBatches(train, get_batch_func), valid, test, training_iters, reads_ahead)


def _as_loader(loader, all_config, name):
    """Wrap indexed samples (`__getitem__` and `__len__`) in a `PretrainingDataLoader`; other loaders stay unchanged."""
    is_indexed = hasattr(loader, "__getitem__") and hasattr(loader, "__len__")
    iterates = hasattr(loader, "create_dict_iterator") or hasattr(loader, "__iter__")
    return build_pretraining_data_loader(loader, 0, all_config, name) if is_indexed and not iterates else loader


def _samples_per_epoch(all_config, datasets_provider):
    """Samples of a pass over the provider's training data, which its `samples_per_epoch` tells; else None."""
    training, known = all_config.training_config, getattr(datasets_provider, "samples_per_epoch", None)
    by_epochs = training.epochs and not (training.training_iters or all_config.dataset_config.train_samples)
    return known(all_config) if by_epochs and known is not None else None


def _provide(datasets_provider, all_config, samples_per_epoch):
    numbers = get_train_valid_test_num_samples(all_config, samples_per_epoch)
    if not numbers[0] and not all_config.training_config.epochs:
        raise ValueError(
            "train_valid_test_datasets_provider needs the number of samples: set training_iters "
            "(--train-iters), train_samples (--train-samples) or epochs (--epochs)."
        )
    if all_config.training_config.epochs and numbers[0] and not samples_per_epoch:
        path = "training_config.training_iters" if all_config.training_config.training_iters else "dataset_config.train_samples"
        unused, length = (spelled(all_config, one) for one in ("training_config.epochs", path))
        logger.warning("%s is not used: %s says how long the training is, and its data holds as many samples", unused, length)
    datasets = datasets_provider(numbers)
    if not isinstance(datasets, (tuple, list)) or len(datasets) != 3:
        raise ValueError(
            "train_valid_test_datasets_provider must return three datasets (training, validation, test; "
            f"None for one that does not exist), but returned {type(datasets).__name__}."
        )
    return datasets


def _anyone_has(loader):
    group = parallel_state.get_tensor_model_parallel_group()
    return any(group.all_gather_object(loader is not None)) if group.size > 1 else loader is not None


def resolve_training_iters(all_config, loader, samples_per_epoch=None):
    """Number of steps of the training: training_iters, else from train_samples, else from epochs and the data's length.

    Args:
        all_config (AllConfig): the configuration.
        loader: of the training data.
        samples_per_epoch (Optional[int]): see `training_iters_of_config`; None: the loader is one pass.

    Raises:
        ValueError: none of them is set, the data does not say how long it is, or a pass is less than a global batch.
    """
    training, dataset = all_config.training_config, all_config.dataset_config
    iterations = training_iters_of_config(all_config, samples_per_epoch)
    if iterations:
        return iterations
    if dataset.train_samples:
        raise ValueError(
            f"train_samples is {dataset.train_samples}, less than the first global batch of "
            f"{calculator.get_current_global_batch_size()}: there is nothing to train. Raise it."
        )
    if not training.epochs:
        raise ValueError(
            "there is nothing to train: training_iters is 0 and neither train_samples nor epochs is set. "
            "Set training_iters (--train-iters)."
        )
    lengths = [
        length
        for length in comm.world_group().all_gather_object(steps_per_epoch(loader) if loader is not None else None)
        if length is not None
    ]
    if not lengths:
        raise ValueError(
            f"epochs is {training.epochs}, but the training data does not say how many steps an epoch "
            "has: set training_iters (--train-iters) too."
        )
    if not min(lengths):
        raise _short_epoch(all_config, calculator.get_current_global_batch_size())
    return training.epochs * min(lengths)


def steps_per_epoch(loader):
    """Number of steps of an epoch; None if the loader does not know its length."""
    micro_batches = calculator.get_num_microbatches()
    if isinstance(loader, PretrainingDataLoader):
        return loader.sampler.samples_per_epoch // calculator.get_current_global_batch_size()
    if hasattr(loader, "get_dataset_size"):
        one_at_a_time = loader.get_batch_size() == calculator.get_micro_batch_size()
        return loader.get_dataset_size() // (micro_batches if one_at_a_time else 1)
    if isinstance(loader, (list, tuple)) and loader and isinstance(loader[0], dict):
        rows = max((value.shape[0] for value in loader[0].values() if getattr(value, "shape", ())), default=1)
        return len(loader) // (micro_batches if rows == calculator.get_micro_batch_size() else 1)
    return None
