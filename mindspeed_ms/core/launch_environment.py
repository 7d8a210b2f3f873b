"""Rank of this process and size of its job, as its launcher gives them: msrun's variables, torchrun's, or a launcher of ours.

torchrun's: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, with LOCAL_RANK and LOCAL_WORLD_SIZE where a machine has several ranks.
msrun's: MS_WORKER_NUM with RANK_ID, or with MS_ROLE=MS_WORKER and MS_NODE_ID for ranks that are started one by one.
"""

import os
from dataclasses import dataclass

RANK_OF_LAUNCH_VARIABLE = "MINDSPEED_MS_RANK_OF_LAUNCH"  # in ranks of mindspeed_ms.launch, for the programs that they start
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_BESIDE = 1237  # from torchrun's port to the ranks': the next ports are what people give to their next jobs
_LOWEST_PORT = 1024


class LaunchError(RuntimeError):
    """Error: the launcher's variables are incomplete or contradict each other."""


@dataclass(frozen=True)
class LaunchEnvironment:
    """Rank of this process and size of its job, as the launcher gives them.

    `unique_id` is equal on all ranks of one launch and differs between launches on the same machine, unless the ranks meet at
    `master` (host, port). `launcher` is "single", "msrun", "launch", "world" or "torchrun".
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    unique_id: str = ""
    launcher: str = "single"
    master: tuple | None = None


_launch_environment = None


def set_launch_environment(environment):
    """Set the rank of this process, for launchers that fork instead of setting environment variables."""
    global _launch_environment
    _launch_environment = environment


def launch_environment():
    """Return this process's `LaunchEnvironment`: set by a launcher, else read from its variables, else rank 0 of 1.

    Raises:
        LaunchError: variables are missing or contradict each other.
    """
    global _launch_environment
    if _launch_environment is None:
        _launch_environment = read(os.environ)
    return _launch_environment


def read(variables):
    """The `LaunchEnvironment` of environment variables (mapping).

    Raises:
        LaunchError: see `launch_environment`.
    """
    role = variables.get("MS_ROLE")
    if role == "MS_SCHED":  # checks the configuration as its workers do
        return LaunchEnvironment(world_size=_integer(variables, "MS_WORKER_NUM", 1))
    if variables.get(RANK_OF_LAUNCH_VARIABLE):
        return LaunchEnvironment()
    has_rank = [name for name in ("RANK", "WORLD_SIZE") if variables.get(name)]
    if variables.get("MS_WORKER_NUM") and (variables.get("RANK_ID") or role == "MS_WORKER"):
        environment = _of_msrun(variables)
        if len(has_rank) == 2:
            _refuse_two_launchers(environment, variables)
        return environment
    return _of_torchrun(variables) if has_rank else LaunchEnvironment()


def _of_msrun(variables):
    name = "RANK_ID" if variables.get("RANK_ID") else "MS_NODE_ID"
    if not variables.get(name):
        raise LaunchError(
            "MS_ROLE is MS_WORKER, but neither RANK_ID nor MS_NODE_ID is set: start the script with msrun, or set MS_NODE_ID "
            f"to the rank of this process, 0 to {_integer(variables, 'MS_WORKER_NUM') - 1}."
        )
    rank, world_size = _integer(variables, name), _integer(variables, "MS_WORKER_NUM")
    local_world_size = _integer(variables, "MS_LOCAL_WORKER_NUM", _integer(variables, "LOCAL_WORLD_SIZE", world_size))
    local_rank = _integer(variables, "LOCAL_RANK", _integer(variables, "DEVICE_ID", rank % max(local_world_size, 1)))
    if not 0 <= rank < world_size:
        raise LaunchError(
            f"{name} is {rank} but MS_WORKER_NUM is {world_size}: expected 0 <= rank < workers. "
            "Start the script with msrun, or unset both variables for a single process."
        )
    # msrun is the parent of all its workers: its pid distinguishes two jobs on one port
    unique_id = f"{variables.get('MS_SCHED_HOST', 'local')}-{variables.get('MS_SCHED_PORT', '0')}-{os.getppid()}"
    return LaunchEnvironment(rank, world_size, local_rank, local_world_size, unique_id, "msrun")


def _refuse_two_launchers(environment, variables):
    other = _integer(variables, "RANK"), _integer(variables, "WORLD_SIZE")
    if other != (environment.rank, environment.world_size):
        raise LaunchError(
            f"two launchers contradict each other: RANK is {other[0]} of WORLD_SIZE {other[1]}, but msrun's variables say rank "
            f"{environment.rank} of MS_WORKER_NUM {environment.world_size}. Unset RANK and WORLD_SIZE, or start without msrun."
        )


def _of_torchrun(variables):
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if not variables.get(name):
            raise LaunchError(
                f"{other} is {variables[other]!r}, but {name} is not set: a launcher sets both for each rank. "
                f"Unset {other} for a single process."
            )
    rank, world_size = _integer(variables, "RANK"), _integer(variables, "WORLD_SIZE")
    _require(0 <= rank < world_size, f"RANK is {rank} and WORLD_SIZE {world_size}", "0 <= RANK < WORLD_SIZE")
    local_world_size = _integer(variables, "LOCAL_WORLD_SIZE", world_size)
    local_rank = _integer(variables, "LOCAL_RANK", rank % max(local_world_size, 1))
    _require(
        0 <= local_rank < local_world_size <= world_size,
        f"LOCAL_RANK is {local_rank}, LOCAL_WORLD_SIZE {variables.get('LOCAL_WORLD_SIZE', 'not set')}, WORLD_SIZE {world_size}",
        "LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE",
    )
    if world_size == 1:
        return LaunchEnvironment(launcher="torchrun")
    for name, example in (("MASTER_ADDR", "localhost on one machine"), ("MASTER_PORT", "a free port such as 29500")):
        if not variables.get(name):
            raise LaunchError(
                f"{name} is not set, but RANK is {rank} and WORLD_SIZE {world_size}: the ranks meet at MASTER_ADDR:MASTER_PORT "
                f"of rank 0's machine. Set it to the same value for every rank ({example})."
            )
    port = _integer(variables, "MASTER_PORT")
    _require(0 < port < 65536, f"MASTER_PORT is {port}", "a port between 1 and 65535")
    if variables.get(_AGENT_STORE) == "True":  # torchrun itself listens on MASTER_PORT
        port = port - _BESIDE if port - _BESIDE >= _LOWEST_PORT else port + _BESIDE
    run = f"{variables.get('TORCHELASTIC_RUN_ID', '')} {variables.get('TORCHELASTIC_RESTART_COUNT', '')}"
    master = (variables["MASTER_ADDR"], port)
    return LaunchEnvironment(rank, world_size, local_rank, local_world_size, run, "torchrun", master)


def _require(holds, found, expected):
    if not holds:
        raise LaunchError(f"the launcher's variables contradict each other: {found}; expected {expected}.")


def _integer(variables, name, default=None):
    text = variables.get(name)
    if not text and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise LaunchError(f"environment variable {name} is {text!r}: expected an integer.") from None
