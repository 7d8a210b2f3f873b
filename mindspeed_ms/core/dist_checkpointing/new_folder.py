"""New folder that appears complete or not at all, also if two jobs write one of the same name at once."""

import os
import secrets
import shutil
from contextlib import contextmanager

from mindspeed_ms.core.dist_checkpointing import durable, job_lock
from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError

_ENDING = ".incomplete"


@contextmanager
def new_folder(path):
    """Context manager: an empty folder under another name, which is named `path` at the end and deleted on an error.

    What a killed job left under such a name is deleted.

    Raises:
        CheckpointError: another job writes `path`, or has written it meanwhile; its result stays.
    """
    parent, name = os.path.split(os.path.abspath(path))
    os.makedirs(parent, exist_ok=True)
    for other in os.listdir(parent):
        if other.startswith(f"{name}.") and other.endswith(_ENDING) and os.path.isdir(os.path.join(parent, other)):
            _look_at(path, os.path.join(parent, other))
    temporary = os.path.join(parent, f"{name}.{secrets.token_hex(4)}{_ENDING}")
    os.makedirs(temporary)
    try:
        job_lock.hold(temporary)
        yield temporary
        job_lock.release(temporary)
        durable.sync(temporary)
        try:
            os.rename(temporary, path)
        except OSError as error:
            if not os.path.lexists(path):
                raise
            raise CheckpointError(f"{path} was written by another job meanwhile: this result was deleted.") from error
    except BaseException:
        job_lock.release(temporary)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    durable.sync(parent)


def _look_at(path, temporary):
    """Delete another job's temporary folder if that job is dead. Raises CheckpointError if it lives."""
    job, is_alive = job_lock.holder(temporary)
    if is_alive:
        raise CheckpointError(f"another job writes {path}: {job}. Choose another folder, or wait for it.")
    if is_alive is False:
        shutil.rmtree(temporary, ignore_errors=True)
