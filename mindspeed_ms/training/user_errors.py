"""Errors that a user can mend end as one line on one rank; errors of the user's own code keep their tracebacks."""

import contextlib
import linecache
import os
import site
import sys
import sysconfig
import time
import traceback
from pathlib import Path

from mindspeed_ms.core.comm import PeerError, processes, shm_files
from mindspeed_ms.core.launch_environment import LaunchError, launch_environment

_PACKAGE = Path(__file__).resolve().parents[1]
_OF_OTHERS = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), *site.getsitepackages()]
_DELIBERATE = (ValueError, RuntimeError, TypeError)
_WRONG_DEVICE = "Unsupported device target"
_previous_hook = None
_program = None


@contextlib.contextmanager
def in_one_line(program=None):
    """Context manager for the whole of a script: an error that the user can mend ends it with one line and exit code 2.

    Args:
        program (Optional[str]): how the line begins; None: the file's name.
    """
    global _program
    _program = program
    install()
    try:
        yield
    except Exception as error:
        if message_of(error) is None:
            raise
        sys.excepthook(type(error), error, error.__traceback__)  # communication tells the peers
        sys.exit(2)


def install():
    """Let uncaught errors that the user can mend be shown as one line, by one rank of this machine."""
    global _previous_hook
    if _previous_hook is None:
        _previous_hook, sys.excepthook = sys.excepthook, _show


def _show(kind, error, trace):
    message = message_of(error)
    if message is None:
        _previous_hook(kind, error, trace)
    elif _speaks(error, message):
        program = _program or os.path.basename(sys.argv[0]) or "python"
        print(f"{program}: error: {message}", file=sys.stderr, flush=True)


def message_of(error):
    """What to tell the user (str); None for an error that needs its traceback.

    Errors to tell are those of this package's classes, and those that its code raises deliberately or meets in files, unless
    a function of the user is between.
    """
    frames = [item for item in traceback.walk_tb(error.__traceback__) if item[0].f_code.co_filename != __file__]
    if isinstance(error, RuntimeError) and str(error).startswith(_WRONG_DEVICE):
        return _wrong_device(error, frames)
    if type(error).__module__.partition(".")[0] == _PACKAGE.name:
        return str(error)
    files = [frame.f_code.co_filename for frame, _ in frames]
    first = next((index for index, file in enumerate(files) if _is_ours(file)), None)
    if first is None or any(_is_the_users(file) for file in files[first:]):
        return None
    if isinstance(error, OSError):
        return str(error)
    is_raised_here = _is_ours(files[-1]) and linecache.getline(files[-1], frames[-1][1]).strip().startswith("raise")
    return str(error) if isinstance(error, _DELIBERATE) and is_raised_here else None


def _wrong_device(error, frames):
    """Message about a script's own set_context or set_device."""
    own = [(frame.f_code.co_filename, line) for frame, line in frames if _is_the_users(frame.f_code.co_filename)]
    if not own:
        return None
    file, line = own[-1]
    return (
        f"{file}, line {line}: {linecache.getline(file, line).strip()}: {str(error).split('. Please')[0]}. Leave the "
        "device out of that line: it is chosen by --device or MINDSPEED_MS_DEVICE, else by what the machine has."
    )


def _is_ours(file):
    return _PACKAGE in Path(file).parents


def _is_the_users(file):
    return not (_is_ours(file) or file.startswith("<") or any(file.startswith(folder) for folder in _OF_OTHERS))


def _speaks(error, message):
    """Whether this rank shows the message: the first of this machine; later ones show what is not a mere consequence."""
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        return False
    try:
        environment = launch_environment()
    except LaunchError:
        return True  # it is the error
    if environment.world_size == 1:
        return True
    path = _shown_by_this_job()
    try:
        started = time.time() - processes.seconds_since_start(os.getpid())
        if os.path.exists(path) and os.stat(path).st_mtime < started:  # of an earlier job of the same shell
            os.remove(path)
        with open(path, "x", encoding="utf-8") as file:
            file.write(message)
        return True
    except FileExistsError:
        with open(path, encoding="utf-8") as file:
            return not isinstance(error, PeerError) and file.read() not in (message, "")
    except OSError:
        return True


def _shown_by_this_job():
    """Path of the file with the message that a rank of this job has shown; it is removed with the files of ended jobs."""
    launcher = os.getppid()
    owner = f"mindspeed_ms.u{os.getuid()}.p{launcher}.s{processes.start_time(launcher)}.n{processes.namespace()}"
    return shm_files.path_of(f"{owner}.error")
