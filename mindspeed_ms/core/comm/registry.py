"""Start and end of communication, the choice of the backend, and the process groups of this rank.

The backend is, in this order: the argument of `init`, the environment variable MINDSPEED_MS_COMM_BACKEND, "hccl" on
Ascend, "shm" on CPU; "mccl" for ranks that met at MASTER_ADDR:MASTER_PORT on several CPU machines, which shm cannot join. A
world of one rank needs none.
"""

import atexit
import importlib
import os
import sys
import time
from dataclasses import dataclass, field, replace

from mindspeed_ms.core.comm import msrun_variables, rendezvous
from mindspeed_ms.core.comm.errors import CommError
from mindspeed_ms.core.comm.single import SingleJob, SingleProcessGroup
from mindspeed_ms.core.launch_environment import launch_environment
from mindspeed_ms.core.logging import logger

BACKEND_ENVIRONMENT_VARIABLE = "MINDSPEED_MS_COMM_BACKEND"
TIMEOUT_ENVIRONMENT_VARIABLE = "MINDSPEED_MS_COMM_TIMEOUT"
DEFAULT_TIMEOUT_SECONDS = 600.0
_GRACE_SECONDS = 1.0
# name -> (module, class of the job, the device it works on)
_BACKENDS = {
    "hccl": ("mindspeed_ms.core.comm.hccl", "HcclJob", "Ascend"),
    "shm": ("mindspeed_ms.core.comm.shm", "SharedMemoryJob", "CPU"),
    "mccl": ("mindspeed_ms.core.comm.mccl", "MindsporeJob", "CPU"),
}
BACKENDS = tuple(_BACKENDS)


@dataclass
class _State:
    job: object
    backend: str
    rank: int
    world_size: int
    process: int
    timeout: float
    groups: list = field(default_factory=list)
    world: object = None


_state = None
_callbacks = []
_hooks_installed = False
_uncaught = None


def init(backend=None, timeout=None):
    """Start communication between the ranks of this launch. A second call with the same backend changes nothing.

    Under msrun the extra scheduler process ends in here. The device is started too (`initialize_device`).

    Args:
        backend (str): "shm", "mccl" or "hccl"; None: see the module.
        timeout (float): seconds that a call may wait for its peers; None: MINDSPEED_MS_COMM_TIMEOUT, else 600.

    Raises:
        CommError: unknown backend, one that does not fit the device, or another one is already in use.
        SharedMemoryError: shm across hosts, or not enough shared memory.
        CommTimeoutError: some rank did not come.
    """
    global _state
    from mindspeed_ms.core.device import initialize_device  # here: it imports MindSpore, which takes seconds

    name = backend_name(backend)
    leave_if_scheduler(name)
    if _state is not None:
        _check_own_process()
        if backend is not None and backend != _state.backend:
            raise CommError(
                f"init: backend {backend!r} is asked for, but {_state.backend!r} is in use. "
                "Call mindspeed_ms.core.comm.destroy() first."
            )
        return
    environment = launch_environment()
    seconds = _timeout_seconds(timeout)
    initialize_device()
    _install_hooks()
    if environment.master is not None:
        environment, name = _met(environment, name, backend, seconds)
    job_class = SingleJob if environment.world_size == 1 else _job_class(name)
    job = job_class(environment, seconds)
    _state = _State(job, name, environment.rank, environment.world_size, os.getpid(), seconds)
    try:
        _state.world = new_group(range(environment.world_size), "world")
    except BaseException:
        destroy()
        raise


def _met(environment, name, backend, seconds):
    """Meet the other ranks: (environment of the job that they make, backend to use)."""
    meeting = rendezvous.meet(environment, seconds)
    if name == "shm" and not meeting.one_host and not (backend or os.environ.get(BACKEND_ENVIRONMENT_VARIABLE)):
        name = "mccl"
    local = environment.world_size if meeting.one_host else environment.local_world_size
    met = replace(environment, unique_id=meeting.job, local_world_size=local)
    if name == "shm":
        if not meeting.one_host:
            met = replace(met, local_world_size=min(local, met.world_size - 1))
        return met, name  # it watches its peers itself
    rendezvous.on_loss(_end_with_peer)
    msrun_variables.set_variables(environment, meeting, seconds)
    return met, name


def _end_with_peer(text):
    """End this rank: what it waits for inside MindSpore will not come."""
    time.sleep(_GRACE_SECONDS)  # for an error of its own
    if not rendezvous.is_met():
        return  # it has ended by itself
    logger.error("%s: this rank ends too", text)
    os._exit(1)


def backend_name(backend=None):
    """Name of the backend that `init(backend)` would choose.

    Raises:
        CommError: unknown, or it does not work on this device.
    """
    from mindspeed_ms.core.device import device_target

    target = device_target()
    name = backend or os.environ.get(BACKEND_ENVIRONMENT_VARIABLE) or ("hccl" if target == "Ascend" else "shm")
    if name not in _BACKENDS:
        raise CommError(
            f"communication backend {name!r} is unknown: expected one of {', '.join(BACKENDS)} (argument backend, "
            f"--comm-backend or environment variable {BACKEND_ENVIRONMENT_VARIABLE})."
        )
    if _BACKENDS[name][2] != target:
        fitting = [other for other in BACKENDS if _BACKENDS[other][2] == target]
        raise CommError(
            f"communication backend {name!r} works on {_BACKENDS[name][2]}, but this process uses "
            f"{target}: expected one of {', '.join(fitting)}."
        )
    return name


def leave_if_scheduler(backend=None):
    """End the extra process that msrun starts to coordinate workers; elsewhere do nothing. Call it first in a script.

    shm needs no scheduler: the process exits at once. mccl and hccl use it: it serves until the workers have ended.
    """
    if os.environ.get("MS_ROLE") != "MS_SCHED":
        return
    if backend_name(backend) != "shm":
        from mindspore.communication import init as serve_workers

        serve_workers("mccl")
    sys.exit(0)


def is_initialized():
    """True between `init` and `destroy`."""
    return _state is not None


def destroy(exception=None):
    """End communication and close all groups; does nothing if communication was not started.

    Args:
        exception (BaseException): why, if this rank failed. Peers that wait for it get it in their error.
    """
    global _state
    if _state is None:
        return
    state, _state = _state, None
    if state.process != os.getpid():
        return  # a fork of a rank is no rank
    for callback in _callbacks:
        callback()
    try:
        state.job.close(exception)
    finally:
        for group in state.groups:
            group.close()


def at_destroy(callback):
    """Register `callback()` for the end of communication, for modules that keep groups."""
    if callback not in _callbacks:
        _callbacks.append(callback)
    return callback


def get_rank():
    """Rank of this process in the world."""
    return _initialized("get_rank").rank


def get_world_size():
    """Number of ranks of the world."""
    return _initialized("get_world_size").world_size


def get_backend():
    """Name of the backend in use."""
    return _initialized("get_backend").backend


def world_group():
    """Process group of all ranks."""
    return _initialized("world_group").world


def new_group(ranks, name=None, timeout=None):
    """Make a group. Only its members call this, each with the same ranks in the same order and the same name.

    It does not wait for the other members. Two groups of the same name and ranks are different groups, numbered in
    the order in which a rank makes them.

    Args:
        ranks (iterable[int]): global ranks; results are in their order.
        name (str): shown in errors; None: made from the ranks.
        timeout (float): seconds that a call may wait; None: that of `init`.

    Raises:
        CommError: ranks repeat, are outside the world, or leave this rank out.
    """
    state = _initialized("new_group")
    ranks = [int(rank) for rank in ranks]
    name = name or "group-" + "-".join(map(str, ranks))
    if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0 or max(ranks) >= state.world_size:
        raise CommError(f"new_group {name}: ranks are {ranks}, expected different ranks of 0..{state.world_size - 1}.")
    if state.rank not in ranks:
        raise CommError(f"new_group {name}: rank {state.rank} is not one of its ranks {ranks}; only members make a group.")
    if len(ranks) == 1:
        group = SingleProcessGroup(name, ranks, state.rank)
    else:
        group = state.job.new_group(name, ranks, state.timeout if timeout is None else _timeout_seconds(timeout))
    state.groups.append(group)
    return group


def _initialized(what):
    if _state is None:
        raise CommError(f"{what}: communication is not started; call mindspeed_ms.core.comm.init() first.")
    _check_own_process()
    return _state


def _check_own_process():
    if _state.process != os.getpid():
        raise CommError(
            f"process {os.getpid()} was forked from rank {_state.rank} (pid {_state.process}) and is no rank "
            "itself: communicate in the rank's own process."
        )


def _job_class(name):
    module, job_class, _ = _BACKENDS[name]
    return getattr(importlib.import_module(module), job_class)


def _timeout_seconds(timeout):
    text = os.environ.get(TIMEOUT_ENVIRONMENT_VARIABLE)
    if timeout is None and not text:
        return DEFAULT_TIMEOUT_SECONDS
    source = "timeout" if timeout is not None else f"environment variable {TIMEOUT_ENVIRONMENT_VARIABLE}"
    value = text if timeout is None else timeout
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not seconds > 0:
        raise CommError(f"{source} is {value!r}: expected a positive number of seconds.")
    return seconds


def _install_hooks():
    """Install exit hooks that publish to peers that this process ended, with an uncaught exception as the reason."""
    global _hooks_installed
    if _hooks_installed:
        return
    _hooks_installed = True
    atexit.register(_leave_at_exit)
    previous = sys.excepthook

    def remember(kind, exception, trace):
        global _uncaught
        _uncaught = exception
        previous(kind, exception, trace)

    sys.excepthook = remember


def _leave_at_exit():
    try:
        destroy(_uncaught)
    except CommError as error:
        logger.warning("communication ended uncleanly: %s", error)
    rendezvous.leave(_uncaught)
