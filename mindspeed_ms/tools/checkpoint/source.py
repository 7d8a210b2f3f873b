"""Source of the checkpoint tool: finds and opens the checkpoint of a path on the command line."""

import os

from mindspeed_ms.config import init_configs_from_yaml
from mindspeed_ms.core.dist_checkpointing import folders, plain_weights
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError, DamagedCheckpointError
from mindspeed_ms.core.dist_checkpointing.foreign import foreign_format, read_foreign_manifest
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.core.dist_checkpointing.upstream_format import is_upstream_folder, read_upstream_manifest
from mindspeed_ms.core.logging import logger


def open_checkpoint(path, iteration=None, config=None):
    """Open a checkpoint's folder, or the newest complete one in the folder of a run: CheckpointReader.

    Args:
        path (str): `output`, `output/iter_0000100` or a file in it, or a folder of plain weights (`plain_weights`).
        iteration (Optional[int]): which of a run.
        config (Optional[str]): yaml of the model; needed for files that upstream wrote.

    Raises:
        CheckpointError: none there.
        DamagedCheckpointError: the one that is named, or all of a run, are not complete.
    """
    path = folder_of(path)
    foreign = foreign_format(path)
    if foreign is not None:
        return CheckpointReader(path, foreign.read_manifest(path))
    if plain_weights.is_plain(path):
        return CheckpointReader(path, plain_weights.read_manifest(path))
    named = folders.named_checkpoint(path, iteration)
    if named is not None and is_upstream_folder(named):
        if config is None:
            raise CheckpointError(f"{path} was written by upstream: give the configuration of its model with --config.")
        return CheckpointReader(named, read_upstream_manifest(named, init_configs_from_yaml(config), iteration))
    problems = []
    for candidate in folders.candidates(path) if named is None else [named]:
        problem = folders.problem_of(candidate)
        if problem is None:
            return CheckpointReader(candidate, read_foreign_manifest(candidate))
        if named is None:
            logger.warning("passed over a checkpoint: %s", problem)
        problems.append(problem)
    if named is not None:
        raise DamagedCheckpointError(problems[0])
    if problems:
        raise DamagedCheckpointError(f"{path} holds no checkpoint that can be read: {' '.join(problems)}")
    raise CheckpointError(f"{path} holds no checkpoint: no {folders.TRACKER_FILE} and no iter_* folder.")


def all_checkpoints(path, iteration=None):
    """Folders of all checkpoints of a path: one checkpoint, or all of a run, oldest iteration first.

    Raises:
        CheckpointError: none there.
    """
    path = folder_of(path)
    named = path if _is_single(path) else folders.named_checkpoint(path, iteration)
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
        raise CheckpointError(f"{path} holds no checkpoint: no {folders.TRACKER_FILE} and no iter_* folder.")
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


def _is_single(folder):
    """Whether a folder is one checkpoint of whole weights or of another program."""
    return foreign_format(folder) is not None or plain_weights.is_plain(folder)


def _is_known(folder):
    return (
        folders.is_checkpoint_folder(folder)
        or os.path.isfile(os.path.join(folder, folders.TRACKER_FILE))
        or is_upstream_folder(folder)
        or _is_single(folder)
    )
