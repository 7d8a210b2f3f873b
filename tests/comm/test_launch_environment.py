"""Launcher's variables: each kind is read, and what is missing or contradictory is named."""

import pytest

from mindspeed_ms.core.launch_environment import RANK_OF_LAUNCH_VARIABLE, LaunchError, read

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}
MSRUN = {"MS_WORKER_NUM": "4", "RANK_ID": "3", "MS_ROLE": "MS_WORKER"}


def _without(name):
    return {key: value for key, value in TORCHRUN.items() if key != name}


@pytest.mark.parametrize(
    ("variables", "rank", "world_size", "local_rank", "local_world_size", "launcher", "master"),
    [
        ({}, 0, 1, 0, 1, "single", None),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, 0, 1, 0, 1, "single", None),
        ({"MS_ROLE": "MS_SCHED", **TORCHRUN}, 0, 1, 0, 1, "single", None),
        ({"MS_ROLE": "MS_SCHED", "MS_WORKER_NUM": "4"}, 0, 4, 0, 1, "single", None),
        ({RANK_OF_LAUNCH_VARIABLE: "1", **TORCHRUN}, 0, 1, 0, 1, "single", None),
        (TORCHRUN, 1, 4, 1, 2, "torchrun", ("a", 29500)),
        (_without("LOCAL_WORLD_SIZE"), 1, 4, 1, 4, "torchrun", ("a", 29500)),
        ({**_without("LOCAL_RANK"), "RANK": "3"}, 3, 4, 1, 2, "torchrun", ("a", 29500)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, 0, 1, 0, 1, "torchrun", None),
        ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, 1, 4, 1, 2, "torchrun", ("a", 28263)),
        (*({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": "2260"}, 1, 4, 1, 2, "torchrun"), ("a", 3497)),
        (MSRUN, 3, 4, 3, 4, "msrun", None),
        ({"MS_WORKER_NUM": "4", "MS_NODE_ID": "2", "MS_ROLE": "MS_WORKER"}, 2, 4, 2, 4, "msrun", None),
        ({**MSRUN, "RANK": "3", "WORLD_SIZE": "4"}, 3, 4, 3, 4, "msrun", None),
    ],
)
def test_variables(variables, rank, world_size, local_rank, local_world_size, launcher, master):
    found = read(variables)
    assert (found.rank, found.world_size) == (rank, world_size)
    assert (found.local_rank, found.local_world_size) == (local_rank, local_world_size)
    assert (found.launcher, found.master) == (launcher, master)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (_without("RANK"), "WORLD_SIZE is '4', but RANK is not set"),
        (_without("WORLD_SIZE"), "RANK is '1', but WORLD_SIZE is not set"),
        (_without("MASTER_ADDR"), "MASTER_ADDR is not set, but RANK is 1 and WORLD_SIZE 4"),
        (_without("MASTER_PORT"), "MASTER_PORT is not set, but RANK is 1"),
        ({**TORCHRUN, "RANK": "4"}, "RANK is 4 and WORLD_SIZE 4; expected 0 <= RANK < WORLD_SIZE"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK is 2, LOCAL_WORLD_SIZE 2, WORLD_SIZE 4; expected"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE 8, WORLD_SIZE 4; expected"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT is 70000; expected a port"),
        ({**TORCHRUN, "RANK": "one"}, "RANK is 'one': expected an integer"),
        ({**MSRUN, **TORCHRUN}, "RANK is 1 of WORLD_SIZE 4, but msrun's variables say rank 3 of MS_WORKER_NUM 4"),
        ({"MS_WORKER_NUM": "4", "MS_ROLE": "MS_WORKER"}, "neither RANK_ID nor MS_NODE_ID is set"),
        ({**MSRUN, "RANK_ID": "4"}, "RANK_ID is 4 but MS_WORKER_NUM is 4"),
    ],
)
def test_errors(variables, message):
    with pytest.raises(LaunchError) as caught:
        read(variables)
    assert message in str(caught.value)
