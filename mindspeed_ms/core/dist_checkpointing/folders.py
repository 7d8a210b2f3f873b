"""Checkpoint folders of a run: names, the tracker file, publication of a new checkpoint, choice of the one to load."""

import os
import re
import secrets
import shutil
import tempfile

from mindspeed_ms.core.dist_checkpointing import durable, job_lock, plain_weights
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.foreign import is_foreign_folder, read_foreign_manifest
from mindspeed_ms.core.dist_checkpointing.manifest import MANIFEST_FILE, Manifest
from mindspeed_ms.core.dist_checkpointing.reader import CheckpointReader
from mindspeed_ms.core.dist_checkpointing.upstream_format import is_upstream_folder

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
            "the newest complete checkpoint, or name one (--ckpt-step)."
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


def problem_of(path):
    """Reason (str) why a folder is no complete checkpoint, by manifest and file sizes; None if it is one."""
    if not os.path.isdir(path):
        return f"{path}, which {TRACKER_FILE} names, does not exist."
    if is_upstream_folder(path):
        return None  # it has no manifest to compare with
    try:
        if plain_weights.is_own(path):
            plain_weights.read_manifest(path)
            return None
        missing = CheckpointReader(path, read_foreign_manifest(path)).incomplete()
    except CheckpointError as error:
        return str(error)
    return f"{path} is incomplete: {', '.join(missing)}." if missing else None


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


def newest_manifest(folder, iteration=None):
    """(folder, Manifest) of the checkpoint that a run would start from; (None, None) without one. Reads no tensor.

    Args:
        folder (str): of one checkpoint, or of a run; need not exist.
        iteration (Optional[int]): which; None: the newest complete one.

    Raises:
        CheckpointError: the named one does not exist or is damaged, or no complete one is left.
    """
    if not os.path.isdir(folder):
        return None, None
    named = named_checkpoint(folder, iteration)
    problems = []
    for path in [named] if named is not None else candidates(folder):
        problem = f"{path} was written by upstream." if is_upstream_folder(path) else problem_of(path)
        if problem is None and plain_weights.is_own(path):
            problem = f"{path} holds weights alone."
        if problem is None:
            return path, read_foreign_manifest(path) or Manifest.read(path)
        problems.append(problem)
    if problems:
        raise CheckpointError(" ".join(problems))
    return None, None


def named_checkpoint(folder, iteration=None):
    """Folder of the checkpoint that the user named: `folder` itself, or an iteration in it; None if it must be searched.

    Raises:
        CheckpointError: it does not exist.
    """
    if not os.path.isdir(folder):
        what = "it is a file, not a folder" if os.path.exists(folder) else "it does not exist"
        raise CheckpointError(f"{folder} holds no checkpoint: {what}.")
    if any(known(folder) for known in (is_checkpoint_folder, is_upstream_folder, plain_weights.is_own, is_foreign_folder)):
        return os.fspath(folder)
    if iteration is None:
        return None
    path = checkpoint_folder(folder, iteration)
    if not os.path.isdir(path):
        raise CheckpointError(
            f"{folder} holds no checkpoint of iteration {iteration}: there are {sorted(iterations_in(folder)) or 'none'}."
        )
    return path
