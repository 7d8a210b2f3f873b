"""Checkpoint folders of a run: names, the tracker file, publication of a new checkpoint, choice of the one to load."""

import os
import re
import secrets
import shutil
import tempfile

from mindspeed_ms.core.dist_checkpointing import durable, job_lock
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError, DamagedCheckpointError
from mindspeed_ms.core.dist_checkpointing.foreign import is_foreign_folder, read_manifest, what_was_found
from mindspeed_ms.core.dist_checkpointing.manifest import MANIFEST_FILE, Manifest
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader

TRACKER_FILE = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_FOLDER = re.compile(r"iter_(\d{7,})$")
_INCOMPLETE, _REPLACED = ".incomplete", ".replaced"


def checkpoint_folder(folder, iteration):
    """Folder of the checkpoint of an iteration."""
    return os.path.join(folder, f"iter_{iteration:07d}")


def is_checkpoint_folder(path):
    """Whether a path is the folder of one checkpoint, not that of a run."""
    name = os.path.basename(os.path.normpath(path))
    return bool(_FOLDER.match(name)) or os.path.isfile(os.path.join(path, MANIFEST_FILE))


def spare_folder(folder):
    """Folder of the spare checkpoint, which the next one replaces (non_persistent_save_interval)."""
    return os.path.join(folder, "non_persistent")


def has_checkpoints(folder):
    """Whether the folder of a run holds any checkpoint, complete or not.

    Raises:
        CheckpointError: the tracker holds something else than an iteration.
    """
    return bool(iterations_in(folder) or iterations_in(spare_folder(folder))) or read_tracker(folder) is not None


def iterations_in(folder):
    """Iterations of all checkpoints in a folder (list[int])."""
    if not os.path.isdir(folder):
        return []
    return [int(match[1]) for name in os.listdir(folder) if (match := _FOLDER.match(name))]


def read_tracker(folder):
    """Content of the tracker: an iteration (int), "release", or None without a tracker.

    Raises:
        CheckpointError: it holds something else.
    """
    path = os.path.join(folder, TRACKER_FILE)
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read().strip()
    if text == RELEASE:
        return text
    if not text.isdigit():
        raise CheckpointError(
            f"{path} holds {text!r}: expected the number of an iteration, or release. Delete it to take "
            "the newest complete checkpoint, or name the folder of one."
        )
    return int(text)


def latest_iteration(folder):
    """Iteration that the tracker names (int), or None; see `read_tracker`."""
    named = read_tracker(folder)
    return named if isinstance(named, int) else None


# ---- writing ---------------------------------------------------------------------------------------------------------


def check_writable(folder):
    """Check that the folder of a run can be written, by making it and a file in it.

    Raises:
        OSError: one of them cannot be made.
    """
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x")


def hold(folder):
    """Lock a folder for the saves of this run until `job_lock.release`; checks first that it can be written."""
    check_writable(folder)
    job_lock.hold(folder)


def prepare(folder, iteration):
    """Make an empty folder for the checkpoint of an iteration, and clear leftovers of crashes. Returns its path.

    Raises:
        CheckpointError: another job saves into the folder.
    """
    os.makedirs(folder, exist_ok=True)
    job_lock.hold(folder)
    restore_replaced(folder)
    for name in os.listdir(folder):
        if name.endswith(_INCOMPLETE) and _FOLDER.match(name.partition(".")[0]):
            shutil.rmtree(os.path.join(folder, name))
    # a rank of a job that has died may still be writing: its folder is never this one
    temporary = f"{checkpoint_folder(folder, iteration)}.{secrets.token_hex(4)}{_INCOMPLETE}"
    os.makedirs(temporary)
    return temporary


def publish(folder, temporary, manifest, keep_checkpoint_max=None):
    """Publish a finished checkpoint: write the manifest, rename the folder, update the tracker, delete old ones.

    A crash at any moment leaves this checkpoint or the one before it (or both) complete.

    Raises:
        CheckpointError: another job has taken over the folder.
    """
    job_lock.check(folder)
    durable.write_file(os.path.join(temporary, MANIFEST_FILE), manifest.to_bytes())
    durable.sync(temporary)
    target = checkpoint_folder(folder, manifest.iteration)
    if is_foreign_folder(target):
        raise CheckpointError(
            f"{target} is a checkpoint of another program, which is not replaced: choose another output_dir (--save)."
        )
    if os.path.isdir(target):
        os.rename(target, target + _REPLACED)
    os.rename(temporary, target)
    durable.replace_file(os.path.join(folder, TRACKER_FILE), str(manifest.iteration).encode())
    shutil.rmtree(target + _REPLACED, ignore_errors=True)
    if keep_checkpoint_max is not None:
        delete_old(folder, manifest.iteration, keep_checkpoint_max)


def restore_replaced(folder):
    """Bring an old checkpoint back that a crash between the two renames of `publish` left under another name.

    A job that is between the two renames is left alone.
    """
    if not job_lock.is_free(folder):
        return
    if os.path.isdir(spare_folder(folder)):
        restore_replaced(spare_folder(folder))
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        target = os.path.join(folder, name.removesuffix(_REPLACED))
        if name.endswith(_REPLACED) and _FOLDER.match(os.path.basename(target)):
            if os.path.isdir(target):
                shutil.rmtree(os.path.join(folder, name))
            else:
                os.rename(os.path.join(folder, name), target)


def delete_old(folder, iteration, keep):
    """Delete checkpoints before `iteration`, those saved first, until `keep` remain including the new one.

    Later iterations are an earlier run's and stay, and so do checkpoints of other programs.
    """
    older = [checkpoint_folder(folder, number) for number in iterations_in(folder) if number < iteration]
    older = [path for path in older if not is_foreign_folder(path)]
    older.sort(key=os.path.getmtime)
    for path in older[: max(0, len(older) + 1 - keep)]:
        os.rename(path, path + _INCOMPLETE)  # a crash while files are deleted must not leave half a checkpoint
        shutil.rmtree(path + _INCOMPLETE)


def foreign_iterations(folder, after):
    """Iterations above `after` whose folders are checkpoints of another program: list[int]."""
    later = sorted(number for number in iterations_in(folder) if number > after)
    return [number for number in later if is_foreign_folder(checkpoint_folder(folder, number))]


# ---- finding ---------------------------------------------------------------------------------------------------------


def problem_of(path, iteration=None, config=None):
    """Reason (str) why a folder is no complete checkpoint, by manifest and file sizes; None if it is one.

    Args:
        path (str): of one checkpoint.
        iteration, config: see `foreign.read_manifest`.
    """
    try:
        _complete_manifest(path, iteration, config)
    except CheckpointError as error:
        return str(error)
    return None


def _complete_manifest(path, iteration, config):
    """Manifest of a complete checkpoint; CheckpointError if it is none. See `problem_of`."""
    if not os.path.isdir(path):
        raise DamagedCheckpointError(f"{path}, which {TRACKER_FILE} names, does not exist.")
    manifest = read_manifest(path, iteration, config)
    missing = CheckpointReader(path, manifest).incomplete()
    if missing:
        raise DamagedCheckpointError(f"{path} is incomplete: {', '.join(missing)}.")
    return manifest


def candidates(folder):
    """Checkpoints to try in order when a run continues: list of folders.

    First those that were saved after the tracker was written (a crash came between), then the tracker's, then the
    others from the one saved last; those that the tracker has left behind (of an earlier run) come last. A spare
    checkpoint goes before them if it was saved after the first of them.

    Raises:
        CheckpointError: the tracker holds no iteration.
    """
    lasting, spare = _in_order(folder), _in_order(spare_folder(folder))
    if spare and (not lasting or _saved_at(spare[0]) > _saved_at(lasting[0])):
        return spare + lasting
    return lasting + spare


def _in_order(folder):
    named = read_tracker(folder)
    if named == RELEASE:
        return [os.path.join(folder, RELEASE)]
    tracker_time = os.path.getmtime(os.path.join(folder, TRACKER_FILE)) if named is not None else 0.0
    saved = {number: _saved_at(checkpoint_folder(folder, number)) for number in iterations_in(folder)}
    order = sorted(saved, key=lambda number: (saved[number], number), reverse=True)
    newer = [number for number in order if saved[number] > tracker_time]
    rest = [number for number in order if number not in newer]
    if named is not None and named not in newer:
        rest = [named] + [number for number in rest if number < named] + [number for number in rest if number > named]
    return [checkpoint_folder(folder, number) for number in [*newer, *rest]]


def _saved_at(path):
    try:
        return Manifest.read(path).saved_at
    except CheckpointError:
        return 0.0


def checkpoint_to_start_from(load, own, pretrained=None, resumes=False):
    """Checkpoint that a run starts from: `load`; for resuming, the run's own folder; else `pretrained` for its weights.

    `load` may be the run's own folder, so that every launch of a job has the same arguments: the first one finds nothing
    there and starts from the beginning.

    Args:
        load (Optional[str]): load_checkpoint.
        own (str): output_dir.
        pretrained (Optional[str]): pretrained_checkpoint.
        resumes (bool): resume_training without finetune.

    Returns:
        tuple[Optional[str], bool]: folder, of a run or of one checkpoint (`load` and `pretrained` need not exist; None: the
        run starts from the beginning); whether the training goes on where that was saved.

    Raises:
        CheckpointError: the tracker of `own` holds no iteration.
    """
    if load and not (resumes and os.path.abspath(load) == os.path.abspath(own)):
        return load, resumes
    if resumes and has_checkpoints(own):
        return own, True
    return pretrained, False


def newest_manifest(folder, iteration=None, config=None, passed_over=None):
    """(folder, Manifest) of the checkpoint that a run would start from. Reads no tensor.

    Args:
        folder (str): of one checkpoint, or of a run.
        iteration (Optional[int]): which; None: the newest complete one.
        config (Optional[AllConfig]): see `foreign.read_manifest`.
        passed_over (Optional[Callable]): called with the reason for each damaged checkpoint before the one that is found.

    Raises:
        CheckpointError: there is none, or it cannot be read.
        DamagedCheckpointError: the named one, or all of a run, are damaged.
    """
    named = named_checkpoint(folder, iteration)
    if named is not None:
        return named, _complete_manifest(named, iteration, config)
    problems, found = [], candidates(folder)
    for path in found:
        try:
            manifest = _complete_manifest(path, iteration, config)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for text in problems if passed_over is not None else ():
            passed_over(text)
        return path, manifest
    if candidates(folder) != found:  # a training has saved, and deleted old ones, meanwhile
        return newest_manifest(folder, iteration, config, passed_over)
    raise none_left(folder, problems)


def none_left(folder, problems):
    """The error (CheckpointError) of a folder without a complete checkpoint; `problems`: of those that it has (list[str])."""
    if not problems:
        return CheckpointError(what_was_found(folder))
    return DamagedCheckpointError(f"{folder} holds no checkpoint that can be read: {' '.join(problems)}")


def named_checkpoint(folder, iteration=None):
    """Folder of the checkpoint that the user named: `folder` itself, or an iteration in it; None if it must be searched.

    Raises:
        CheckpointError: it does not exist.
    """
    if not os.path.isdir(folder):
        raise CheckpointError(what_was_found(folder))
    if is_checkpoint_folder(folder) or is_foreign_folder(folder):
        return os.fspath(folder)
    if iteration is None:
        return None
    path = checkpoint_folder(folder, iteration)
    if not os.path.isdir(path):
        raise CheckpointError(
            f"{folder} holds no checkpoint of iteration {iteration}: there are {sorted(iterations_in(folder)) or 'none'}."
        )
    return path
