"""`--merge-group-keys`: join indexed files that were written separately."""

import os

from mindspeed_ms.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from mindspeed_ms.core.datasets.indexed_format import IndexedDatasetError, get_bin_path, get_idx_path
from mindspeed_ms.tasks.preprocess.errors import PreprocessError
from mindspeed_ms.tasks.preprocess.unfinished import make_writable


def merge_groups(inputs, keys, run):
    """For each key join the pairs in a folder whose names contain it, in order of their names, as `PREFIX_KEY`.

    Args:
        inputs (list[str]): one folder.
        keys (list[str]): parts of names.
        run (Run): output prefix and whether to overwrite.

    Returns:
        list[str]: lines for the user.

    Raises:
        PreprocessError: no folder, no pair for a key, half a pair, files that do not fit together.
    """
    if len(inputs) != 1 or not os.path.isdir(inputs[0]):
        raise PreprocessError(f"--merge-group-keys needs a folder of .bin and .idx files as --input, got {' '.join(inputs)}.")
    targets = {key: f"{run.output_prefix}_{key}" for key in keys}
    groups = {key: _pairs(inputs[0], key, targets[key]) for key in keys}
    for target in targets.values():
        for path in (get_bin_path(target), get_idx_path(target)):
            if os.path.exists(path) and not run.overwrite:
                raise PreprocessError(f"{path} exists: give another --output-prefix, or replace it with --overwrite-output.")
    make_writable(os.path.dirname(run.output_prefix) or ".")
    return [_merge(groups[key], targets[key]) for key in keys]


def _pairs(folder, key, target):
    """Prefixes of the pairs; not the target's, which an earlier join may have left in the folder."""
    names = {
        name
        for name in os.listdir(folder)
        if key in name
        and name.endswith((".bin", ".idx"))
        and os.path.realpath(os.path.join(folder, os.path.splitext(name)[0])) != os.path.realpath(target)
    }
    stems = sorted({os.path.splitext(name)[0] for name in names})
    if not stems:
        raise PreprocessError(f"--merge-group-keys {key}: no .bin and .idx files in {folder} have it in their names.")
    for stem in stems:
        for path in (get_bin_path(stem), get_idx_path(stem)):
            if path not in names:
                raise PreprocessError(f"--merge-group-keys {key}: in {folder}, {stem} is half a pair: {path} is missing.")
    return [os.path.join(folder, stem) for stem in stems]


def _merge(prefixes, target):
    try:
        with IndexedDatasetBuilder(get_bin_path(target), IndexedDataset(prefixes[0]).dtype) as builder:
            for prefix in prefixes:
                builder.add_index(prefix)
            builder.finalize(get_idx_path(target))
    except IndexedDatasetError as error:
        raise PreprocessError(str(error)) from error
    return f"{target}: {len(prefixes)} pairs joined"
