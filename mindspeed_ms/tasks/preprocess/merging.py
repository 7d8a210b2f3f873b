"""`--merge-group-keys`: join indexed files that were written separately."""

import os

from mindspeed_ms.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from mindspeed_ms.core.datasets.indexed_format import IndexedDatasetError, get_bin_path, get_idx_path
from mindspeed_ms.tasks.preprocess.errors import PreprocessError
from mindspeed_ms.tasks.preprocess.unfinished import make_writable


def merge_groups(inputs, keys, run):
    """Join, for each key, the pairs in a folder whose names contain it, in the order of their names, to `PREFIX_KEY`.

    Args:
        inputs (list[str]): one folder.
        keys (list[str]): parts of names.
        run (Run): output prefix and whether to overwrite.

    Returns:
        list[str]: lines for the user.

    Raises:
        PreprocessError: no folder, no pair for a key, half a pair, a part that lacks one of the keys, files that do not fit
            together.
    """
    if len(inputs) != 1 or not os.path.isdir(inputs[0]):
        raise PreprocessError(f"--merge-group-keys needs a folder of .bin and .idx files as --input, got {' '.join(inputs)}.")
    targets = {key: f"{run.output_prefix}_{key}" for key in keys}
    groups = {key: _pairs(inputs[0], key, targets.values()) for key in targets}
    _check_parts(groups)
    for target in targets.values():
        for path in (get_bin_path(target), get_idx_path(target)):
            if os.path.exists(path) and not run.overwrite:
                raise PreprocessError(f"{path} exists: give another --output-prefix, or replace it with --overwrite-output.")
    make_writable(os.path.dirname(run.output_prefix) or ".")
    return [_merge(groups[key], targets[key]) for key in targets]


def _pairs(folder, key, targets):
    """Prefixes of the pairs in a folder, without targets of an earlier join."""
    results = {os.path.realpath(target) for target in targets}
    names = {
        name
        for name in os.listdir(folder)
        if key in name
        and name.endswith((".bin", ".idx"))
        and os.path.realpath(os.path.join(folder, os.path.splitext(name)[0])) not in results
    }
    stems = sorted({os.path.splitext(name)[0] for name in names})
    if not stems:
        raise PreprocessError(f"--merge-group-keys {key}: no .bin and .idx files in {folder} have it in their names.")
    for stem in stems:
        for path in (get_bin_path(stem), get_idx_path(stem)):
            if path not in names:
                raise PreprocessError(f"--merge-group-keys {key}: in {folder}, {stem} is half a pair: {path} is missing.")
    return [os.path.join(folder, stem) for stem in stems]


def _check_parts(groups):
    """Check that each part is in every group, since the joined files are read side by side.

    Args:
        groups (dict[str, list[str]]): prefixes by key.
    """
    parts = {
        key: {os.path.basename(prefix).replace(key, "*"): prefix for prefix in prefixes} for key, prefixes in groups.items()
    }
    for key, of_key in parts.items():
        for other, of_other in parts.items():
            missing = sorted(of_other.keys() - of_key.keys())
            if missing:
                raise PreprocessError(
                    f"--merge-group-keys {' '.join(groups)}: {key} has {len(of_key)} pairs and {other} has {len(of_other)}; of "
                    f"the part of {of_other[missing[0]]} there is no {missing[0].replace('*', key)}. Their joined files would "
                    "not belong together: preprocess that part again, or join keys that do not belong together one by one."
                )
    for part, prefix in next(iter(parts.values())).items():
        if "_packed_" in prefix:  # fields of the same samples
            counts = {of_key[part]: len(_opened(of_key[part])) for of_key in parts.values()}
            if len(set(counts.values())) > 1:
                found = ", ".join(f"{name}: {count}" for name, count in counts.items())
                raise PreprocessError(
                    f"--merge-group-keys {' '.join(groups)}: the fields of a part have different numbers of samples ({found}): "
                    "they do not come from one run. Preprocess that part again."
                )


def _opened(prefix):
    try:
        return IndexedDataset(prefix)
    except IndexedDatasetError as error:
        raise PreprocessError(str(error)) from error


def _merge(prefixes, target):
    try:
        with IndexedDatasetBuilder(get_bin_path(target), IndexedDataset(prefixes[0]).dtype) as builder:
            for prefix in prefixes:
                builder.add_index(prefix)
            builder.finalize(get_idx_path(target))
    except IndexedDatasetError as error:
        raise PreprocessError(str(error)) from error
    return f"{target}: {len(prefixes)} pairs joined"
