"""Builder of the training, validation and test datasets of a configuration; sizes and cases: Megatron-LM core_v0.12.1."""

import math

from mindspeed_ms.core.datasets.blended_dataset import BlendedDataset
from mindspeed_ms.core.datasets.errors import DatasetError
from mindspeed_ms.core.datasets.gpt_dataset import GPTDataset, open_indexed_dataset
from mindspeed_ms.core.datasets.indexed_dataset import IndexedDataset
from mindspeed_ms.core.datasets.splits import (
    DEFAULT_SPLIT,
    Split,
    check_weights,
    convert_split_vector_to_split_matrix,
    normalize,
    parse_and_normalize_split,
    split_documents,
)

_MARGIN = 0.5  # per cent of samples that the parts of a blend have more than they should need
_MOCK_SPLIT = "1,1,1"
_ALL = (0.0, 1.0)


def build_train_valid_test_datasets(sizes, config):
    """Build the datasets of a configuration. Every rank may call this: one process builds the indices, the others load them.

    Args:
        sizes (Sequence[Optional[int]]): samples that training, validation and test need; None: one pass over the documents
            (not with weights). A blend by weights may have some samples more.
        config (GPTDatasetConfig): with `blend`, `blend_per_split` or `mock`.

    Returns:
        list[Optional[GPTDataset or BlendedDataset]]: train, valid, test; None for a split without data.

    Raises:
        FileNotFoundError: files are missing.
        DatasetError: files are damaged, weights need a size, a split has no documents or a part of a blend no samples.
    """
    if config.mock:
        return _parts(None, _matrix(_MOCK_SPLIT), sizes, config)
    for blend in (config.blend, *(config.blend_per_split or ())):
        if blend is not None and blend[1] is not None:
            check_weights(*blend)
    if config.blend_per_split is None:
        if config.blend is None:
            raise DatasetError("no data is named: give prefixes of indexed files (--data-path), or mock data.")
        prefixes, weights = config.blend
        matrix = _matrix(config.split or DEFAULT_SPLIT)
        if len(prefixes) == 1 and weights is None:
            return _parts(prefixes[0], matrix, sizes, config)
        return _blends(prefixes, weights, matrix, sizes, config)
    datasets = []
    for split, blend in zip(Split, config.blend_per_split):
        matrix = [_ALL if other is split else None for other in Split]
        if blend is None:
            datasets.append(None)
        elif len(blend[0]) == 1:
            datasets.append(_parts(blend[0][0], matrix, sizes, config)[split.value])
        else:
            datasets.append(_blends(*blend, matrix, sizes, config)[split.value])
    return datasets


def check_split(prefix, split, wanted):
    """Check that a split leaves documents of an indexed dataset to each part that is used.

    Args:
        prefix (str): of its files.
        split (Optional[str]): shares of training, validation and test.
        wanted (Sequence[bool]): which of them are used.

    Raises:
        DatasetError: training data gets nothing, or a share leaves no document to a part that is used.
    """
    documents = len(IndexedDataset(prefix))
    for part, bookends, is_used in zip(Split, _matrix(split or DEFAULT_SPLIT), wanted):
        is_empty = bookends is None or not len(split_documents(bookends, documents))
        if is_used and is_empty and (bookends is not None or part is Split.train):
            raise DatasetError(
                f"split (--split) is {split or DEFAULT_SPLIT}: of the {documents} documents of {prefix} none is left for "
                f"{part.name} data. Give more documents or a larger share"
                + ("." if part is Split.train else ", or evaluate nothing (--eval-iters 0).")
            )


def _matrix(split):
    return convert_split_vector_to_split_matrix(parse_and_normalize_split(split))


def _parts(prefix, matrix, sizes, config):
    """GPTDatasets of one prefix, one per split."""
    indexed = open_indexed_dataset(prefix, config)
    return [
        None if bookends is None else GPTDataset(indexed, prefix, split_documents(bookends, len(indexed)), size, split, config)
        for split, bookends, size in zip(Split, matrix, sizes)
    ]


def _blends(prefixes, weights, matrix, sizes, config):
    """BlendedDatasets of several prefixes, one per split."""
    weights = None if weights is None else normalize(weights)
    if weights is not None and any(bookends and size is None for bookends, size in zip(matrix, sizes)):
        raise DatasetError(
            f"the weights of {', '.join(prefixes)} need a number of samples: set the length of the training "
            "(--train-iters or --train-samples), or leave the weights out."
        )
    wanted = [[_share(size, weights, part) for size in sizes] for part in range(len(prefixes))]
    parts = [
        _parts(prefix, matrix, [None if size is None else math.ceil(size * (1 + _MARGIN / 100)) for size in row], config)
        for prefix, row in zip(prefixes, wanted)
    ]
    blends = []
    for split, bookends, size in zip(Split, matrix, sizes):
        datasets = [row[split.value] for row in parts]
        if bookends is None or (weights is None and size == 0):
            blends.append(None)
        elif weights is None:
            lengths = [len(dataset) for dataset in datasets]
            blends.append(BlendedDataset(datasets, lengths, None if size is None else min(size, sum(lengths)), config))
        else:
            blends.append(BlendedDataset(datasets, weights, sum(row[split.value] for row in wanted), config))
    return blends


def _share(size, weights, part):
    return None if weights is None or size is None else math.ceil(size * weights[part])
