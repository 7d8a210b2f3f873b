"""Source of the checkpoint tool: finds and opens the checkpoint of a path on the command line."""

import os

from mindspeed_ms.config import init_configs_from_yaml
from mindspeed_ms.core.dist_checkpointing import folders
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.foreign import foreign_format, is_foreign_folder, what_was_found
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.core.logging import logger


def open_checkpoint(path, iteration=None, config=None):
    """Open a checkpoint's folder, or the newest complete one in the folder of a run: CheckpointReader.

    Args:
        path (str): `output`, `output/iter_0000100` or a file in it, or a folder of a foreign format (`foreign`).
        iteration (Optional[int]): which of a run.
        config (Optional): yaml of the model, or its AllConfig; needed for formats whose files do not say it.

    Raises:
        CheckpointError: none there.
        DamagedCheckpointError: the one that is named, or all of a run, are not complete.
    """
    path = folder_of(path)
    found = foreign_format(path)
    if found is not None and found.needs_config and config is None:
        raise CheckpointError(f"{path} is of {found.title} format: give the configuration of its model with --config.")
    model = config if found is not None and found.needs_config else None
    if isinstance(model, str | os.PathLike):
        model = init_configs_from_yaml(model)
    place, manifest = folders.newest_manifest(path, iteration, model, _passed_over)
    return CheckpointReader(place, manifest)


def _passed_over(problem):
    logger.warning("passed over a checkpoint: %s", problem)


def all_checkpoints(path, iteration=None):
    """Folders of all checkpoints of a path: one checkpoint, or all of a run, oldest iteration first.

    Raises:
        CheckpointError: none there.
    """
    path = folder_of(path)
    named = folders.named_checkpoint(path, iteration)
    if named is not None:
        return [named]
    found = [
        folders.checkpoint_folder(place, number)
        for place in (path, folders.spare_folder(path))
        for number in sorted(folders.iterations_in(place))
    ]
    named = folders.read_tracker(path)
    if named is not None:
        tracked = os.path.join(path, named) if named == folders.RELEASE else folders.checkpoint_folder(path, named)
        found += [tracked] if tracked not in found else []
    if not found:
        raise CheckpointError(what_was_found(path))
    return found


def folder_of(path):
    """Folder of a path: for a file, the checkpoint or run that it belongs to.

    Raises:
        CheckpointError: the path does not exist, or the file belongs to none.
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        raise CheckpointError(f"{path} does not exist.")
    if os.path.isdir(path):
        return path
    parent = os.path.dirname(os.path.abspath(path))
    for folder in (parent, os.path.dirname(parent)):  # upstream's files are one folder deeper
        if _is_known(folder):
            return folder
    raise CheckpointError(
        f"{path} is a file that belongs to no checkpoint: expected the folder of a run or of a checkpoint, or a file in one."
    )


def _is_known(folder):
    return (
        folders.is_checkpoint_folder(folder)
        or os.path.isfile(os.path.join(folder, folders.TRACKER_FILE))
        or is_foreign_folder(folder)
    )
