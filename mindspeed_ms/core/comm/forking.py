"""Fork preparation: imports without operators, and the end of forked ranks together with their parent."""

import ctypes
import importlib
import signal

PRELOADED_MODULES = (
    "mindspore",
    "numba",
    "mindspeed_ms.core.device",
    "mindspeed_ms.core.autograd",
    "mindspeed_ms.core.storage",
    "mindspeed_ms.core.comm.shm",
)
_PR_SET_PDEATHSIG = 1


def preload():
    """Import what every rank needs, so that forks share it in memory; no operator runs."""
    for name in PRELOADED_MODULES:
        importlib.import_module(name)
    importlib.import_module("mindspeed_ms.core.comm.shm_kernels").warm_up()


def die_with_parent():
    """Ask the kernel to end this process when its parent ends (Linux only; elsewhere a closed socket ends it)."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        pass
