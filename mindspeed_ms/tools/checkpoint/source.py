"""Finding the checkpoint that a path on the command line means."""
import logging
import os

from mindspeed_ms.config import init_configs_from_yaml
from mindspeed_ms.core.dist_checkpointing import folders
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.core.dist_checkpointing.upstream_format import is_upstream_folder, read_upstream_manifest

logger = logging.getLogger("mindspeed_ms")


def open_checkpoint(path, iteration=None, config=None):
    """CheckpointReader of a checkpoint's folder, or of the newest complete one in the folder of a run.

    Args:
        path (str): `output`, `output/iter_0000100` or a folder with a manifest.
        iteration (Optional[int]): which of a run.
        config (Optional[str]): yaml of the model; needed for files that upstream wrote.

    Raises:
        CheckpointError: none there, or none that is complete.
    """
    named = folders.named_checkpoint(path, iteration)
    if named is not None and is_upstream_folder(named):
        if config is None:
            raise CheckpointError(f"{path} was written by upstream: give the configuration of its model with --config.")
        return CheckpointReader(named, read_upstream_manifest(named, init_configs_from_yaml(config), iteration))
    if named is not None:
        return CheckpointReader(named)
    problems = []
    for candidate in folders.candidates(path):
        problem = folders.problem_of(candidate)
        if problem is None:
            return CheckpointReader(candidate)
        logger.warning("passed over a checkpoint: %s", problem)
        problems.append(problem)
    found = " ".join(problems) or f"no {folders.TRACKER_FILE} and no iter_* folder."
    raise CheckpointError(f"{path} holds no checkpoint that can be read: {found}")


def all_checkpoints(path, iteration=None):
    """Folders of every checkpoint that a path means: itself, or all of a run, oldest iteration first.

    Raises:
        CheckpointError: none there.
    """
    named = folders.named_checkpoint(path, iteration)
    if named is not None:
        return [named]
    found = [folders.checkpoint_folder(place, number) for place in (path, folders.spare_folder(path))
             for number in sorted(folders.iterations_in(place))]
    named = folders.read_tracker(path)
    if named is not None:
        tracked = os.path.join(path, named) if named == folders.RELEASE else folders.checkpoint_folder(path, named)
        found += [tracked] if tracked not in found else []
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint: no {folders.TRACKER_FILE} and no iter_* folder.")
    return found
