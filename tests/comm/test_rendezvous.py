"""Ranks meet at a port: they agree on one job, and what keeps them apart is named on every rank."""

import socket
import threading
import time
from dataclasses import replace

import pytest

from mindspeed_ms.core.comm import rendezvous
from mindspeed_ms.core.comm.errors import CommTimeoutError, PeerDiedError
from mindspeed_ms.core.comm.rendezvous import RendezvousError
from mindspeed_ms.core.launch_environment import LaunchEnvironment


@pytest.fixture
def rank():
    """Makes a rank of a world that meets at a port of the test's own."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]

    def make(rank, world_size=2, local_world_size=1, host="localhost", run=""):
        environment = LaunchEnvironment(rank, world_size, 0, local_world_size, run, "torchrun", (host, port))
        return (rendezvous._Host if rank == 0 else rendezvous._Guest)(environment)

    return make


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(rendezvous, "_GRACE_SECONDS", 0.3)
    monkeypatch.setattr(rendezvous, "_POLL_SECONDS", 0.02)
    monkeypatch.delenv("MASTER_PORT", raising=False)


def _come(members, timeout=5.0):
    """The meeting of each member, or the error."""
    results = [None] * len(members)

    def run(index):
        try:
            members[index].come_together(timeout)
            results[index] = members[index].meeting
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(members))]
    for thread in threads:
        thread.start()
        time.sleep(0.02)  # in this order
    for thread in threads:
        thread.join()
    return results


def _is(error, kind, text):
    assert type(error) is kind and text in str(error), repr(error)


def _wait_for(found):
    end = time.monotonic() + 5
    while not found and time.monotonic() < end:
        time.sleep(0.01)
    return found


def test_ranks_agree_in_any_order_and_learn_of_a_loss(rank):
    members = [rank(2, 4), rank(0, 4), rank(1, 4), rank(3, 4)]
    meetings = _come(members)
    assert all(meeting == meetings[0] for meeting in meetings)
    assert meetings[0].one_host and meetings[0].address == "127.0.0.1"
    lost = [[], [], [], []]
    for index, member in enumerate(members):
        member.watch(lost[index].append)
    members[0].leave(None)
    time.sleep(0.1)
    members[2]._line.connection.shutdown(socket.SHUT_RDWR)
    assert "rank 1 (pid" in _wait_for(lost[1])[0] and lost[1][0].endswith("died")
    assert _wait_for(lost[3]) == lost[1]
    assert lost[0] == []


@pytest.mark.parametrize("fails", [0, 1])
def test_a_rank_that_failed_says_why(rank, fails):
    members = [rank(0), rank(1)]
    _come(members)
    lost = []
    members[1 - fails].watch(lost.append)
    members[fails].leave("failed with ValueError: no")
    assert _wait_for(lost)[0].endswith("failed with ValueError: no")


def test_ranks_of_different_memory_are_several_hosts(rank, monkeypatch):
    names = iter(["a", "b"])
    monkeypatch.setattr(rendezvous, "shared_memory", lambda: next(names))
    assert [meeting.one_host for meeting in _come([rank(0), rank(1)])] == [False, False]


def test_ranks_that_do_not_come_are_named_everywhere(rank):
    for error in _come([rank(0, 4, 2), rank(1, 4, 2)], timeout=0.3):
        _is(error, CommTimeoutError, "rank 2, 3 (node 1) did not come to localhost:")


def test_rank_0_that_does_not_come(rank):
    _is(_come([rank(1)], timeout=0.3)[0], CommTimeoutError, "rank 1 found nobody at localhost:")


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ([{"rank": 1, "world_size": 4}], "disagree: WORLD_SIZE is 3 on rank 0 and 4 on rank 1 (pid"),
        ([{"rank": 1, "world_size": 3}] * 2, "are rank 1: pid"),
        ([{"rank": 1, "world_size": 3, "run": "other"}], "belongs to another run"),
    ],
)
def test_disagreement(rank, others, text):
    results = _come([rank(0, 3), *(rank(**other) for other in others)])
    for error in (results[0], results[-1]):
        _is(error, RendezvousError, text)


@pytest.mark.parametrize(("given", "what"), [(None, "MASTER_PORT"), ("1", "for MASTER_PORT 1, where torchrun listens")])
def test_a_second_job_at_the_port_is_refused_on_every_rank(rank, given, what, monkeypatch):
    """Under torchrun the port is not the one that the user gave."""
    if given:
        monkeypatch.setenv("MASTER_PORT", given)
    first = [rank(0), rank(1)]
    _come(first)
    errors = _come([rank(1), rank(0)])
    assert str(errors[0]) == str(errors[1])
    for error in errors:
        _is(error, RendezvousError, f"({what}) is in use by another job or program")


def test_a_port_is_free_again_after_its_job(rank):
    first = [rank(0), rank(1)]
    _come(first)
    for member in reversed(first):
        member.leave(None)
    first[1]._line.connection.close()
    first[0]._listener.close()
    assert not any(isinstance(result, Exception) for result in _come([rank(0), rank(1)]))


def test_other_programs_and_unknown_machines(rank):
    guest = rank(1)
    with socket.create_server((guest.host, guest.port)) as server:
        thread = threading.Thread(target=lambda: server.accept()[0].sendall(b"HTTP/1.1 400\n\n"))
        thread.start()
        _is(_come([guest], 1.0)[0], PeerDiedError, "or the port is another program's")
        thread.join()
    for number in (0, 1):
        _is(_come([rank(number, host="no.such.host.invalid")], 1.0)[0], RendezvousError, "'no.such.host.invalid', which is no")


def test_a_program_that_does_not_answer(rank):
    guest = rank(1)
    with socket.create_server((guest.host, guest.port)):
        _is(_come([guest], 0.1)[0], CommTimeoutError, f"{guest.place} (MASTER_PORT) did not answer rank 1")


def test_strangers_at_the_port_do_no_harm(rank):
    host = rank(0)
    stranger = threading.Timer(0.05, lambda: socket.create_connection((host.host, host.port)).sendall(b"GET /\n"))
    stranger.start()
    results = []
    late = threading.Timer(0.3, lambda: results.extend(_come([rank(1)])))
    late.start()
    host.come_together(5.0)
    late.join()
    assert results == [host.meeting]


def test_a_rank_that_dies_before_all_came(rank):
    def die():
        guest = rank(1, 3)
        guest._line = rendezvous.Line(guest._connect(time.monotonic() + 1, 1))
        guest._line.send(**guest.introduction())
        guest._line.connection.close()

    timer = threading.Timer(0.05, die)
    timer.start()
    _is(_come([rank(0, 3)])[0], PeerDiedError, "died before all ranks had come together")
    timer.join()


def test_the_environment_of_another_process_meets_anew(rank, monkeypatch):
    member = rank(0, 1)
    environment = replace(member.environment)
    first = rendezvous.meet(environment, 1.0)
    assert rendezvous.meet(environment, 1.0) is first and rendezvous.is_met()
    rendezvous._member._listener.close()
    rendezvous.leave()
    assert not rendezvous.is_met()
