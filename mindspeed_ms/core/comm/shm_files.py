"""Files in shared memory: names, reserved space, and removal of files that killed jobs left.

A job's files are named after the process of its rank 0 (pid, start time, pid namespace) and a random word, so no job
ever opens another's, and any later job can detect that their owner is gone. Files are unlinked as soon as all members
have mapped them; they then vanish with the last process, however it ends.
"""

import errno
import mmap
import os
import re
import secrets

from mindspeed_ms.core.comm import processes
from mindspeed_ms.core.comm.errors import SharedMemoryError

DIRECTORY_ENVIRONMENT_VARIABLE = "MINDSPEED_MS_SHM_DIR"
_OWNER = re.compile(r"mindspeed_ms\.u(\d+)\.p(\d+)\.s(\d+)\.n(\d+)\.")


def directory():
    """Directory of the files: MINDSPEED_MS_SHM_DIR, else /dev/shm."""
    return os.environ.get(DIRECTORY_ENVIRONMENT_VARIABLE) or "/dev/shm"


def new_job_name():
    """New prefix for the file names of a job whose rank 0 is this process."""
    pid = os.getpid()
    return f"mindspeed_ms.u{os.getuid()}.p{pid}.s{processes.start_time(pid)}.n{processes.namespace()}.{secrets.token_hex(6)}"


def path_of(name):
    """Path of a file."""
    return os.path.join(directory(), name)


def remove_stale():
    """Remove files of ended jobs: same user, same pid namespace, rank 0 no longer runs."""
    try:
        names = os.listdir(directory())
    except OSError:
        return
    for name in names:
        match = _OWNER.match(name)
        if not match:
            continue
        user, pid, started, namespace = map(int, match.groups())
        if user == os.getuid() and namespace == processes.namespace() and not processes.is_alive(pid, started):
            unlink(path_of(name))


def unlink(path):
    """Remove a file if it exists."""
    try:
        os.unlink(path)
    except OSError:
        pass


class SharedFile:
    """A file mapped into memory. The first process creates it, all zeros; pages take space only when touched.

    Attributes:
        memory (mmap.mmap): its bytes.
        path (str): where it is until unlinked.
    """

    def __init__(self, path, size, create=True, purpose="communication"):
        self.path = path
        self.purpose = purpose
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        try:
            self._descriptor = os.open(path, flags, 0o600)
        except FileNotFoundError:
            if os.path.isdir(os.path.dirname(path)):
                raise
            raise SharedMemoryError(
                f"the shared-memory directory {os.path.dirname(path)} does not exist: mount it or set "
                f"{DIRECTORY_ENVIRONMENT_VARIABLE}."
            ) from None
        except PermissionError as error:
            raise SharedMemoryError(
                f"cannot open {path}: {error.strerror}; set {DIRECTORY_ENVIRONMENT_VARIABLE} to a "
                "directory in memory that you may write to."
            ) from None
        try:
            if create:
                os.ftruncate(self._descriptor, size)
            self.memory = mmap.mmap(self._descriptor, size)
        except (OSError, ValueError) as error:
            os.close(self._descriptor)
            raise SharedMemoryError(f"cannot map {size} bytes of {path} for {purpose}: {error}") from error

    def reserve(self, offset, size):
        """Reserve the space of a part now: a later write to a full file system would kill the process.

        Raises:
            SharedMemoryError: the file system is full.
        """
        try:
            os.posix_fallocate(self._descriptor, offset, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise
            status = os.statvfs(os.path.dirname(self.path))
            total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
            raise SharedMemoryError(
                f"{os.path.dirname(self.path)} is too small: {self.purpose} needs {size} more bytes, {free} of {total} bytes "
                "are free. Enlarge it (docker run --shm-size=2g, or mount -o remount,size=2g), lower "
                f"MINDSPEED_MS_SHM_SLOT_BYTES, or set {DIRECTORY_ENVIRONMENT_VARIABLE} to a larger directory in memory."
            ) from error

    @property
    def inode(self):
        """Inode of the file itself, whatever its name now points to."""
        return os.fstat(self._descriptor).st_ino

    def unlink(self):
        """Remove the name if it still belongs to this file."""
        try:
            if os.stat(self.path).st_ino == self.inode:
                os.unlink(self.path)
        except OSError:
            pass

    def close(self):
        """Remove the name and close the descriptor; the memory is freed with its last array."""
        if self._descriptor >= 0:
            self.unlink()
            self.release()

    def release(self):
        """Close the descriptor and keep the name: the file belongs to another process."""
        os.close(self._descriptor)
        self._descriptor = -1
