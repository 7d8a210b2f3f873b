"""Worlds: ranks forked on this machine that run a function together and return its results.

    with World(4) as world:
        results = world(function, argument)      # function(argument) on 4 ranks; one result per rank

The function must be importable (module level). In it communication is up (`comm.get_rank()`, `comm.world_group()`); it
is torn down after each call, so calls do not see each other's groups. An error on a rank is raised here with that
rank's traceback. A world whose rank died or hangs is replaced at the next call.
"""

import inspect
import os
import pickle
import signal
import sys
import time
import uuid
from multiprocessing.connection import Connection, wait

from mindspeed_ms.core.comm import shm_files
from mindspeed_ms.core.comm.errors import PeerError
from mindspeed_ms.testing.nursery import Nursery, NurseryError
from mindspeed_ms.testing.worker import Outcome, Task

CALL_TIMEOUT_SECONDS = 300.0
GRACE_SECONDS = 10.0

_nursery = None


def get_nursery():
    """Nursery of this process, started at the first call."""
    global _nursery
    if _nursery is None or not _nursery.alive:
        _nursery = Nursery()
    return _nursery


def close_nursery():
    """End the nursery and with it every world."""
    global _nursery
    if _nursery is not None:
        _nursery.close()
        _nursery = None


class WorkerDied(RuntimeError):
    """Error: a rank's process ended while it ran a function."""


class WorldTimeout(RuntimeError):
    """Error: a function did not end in time on all ranks."""


class RankTraceback(Exception):
    """Traceback text of a rank, as the cause of an error raised here."""

    def __init__(self, text):
        super().__init__(text)
        self.text = text

    def __str__(self):
        return "\n" + self.text


class World:
    """World of `size` forked ranks. Calling it runs a function on all of them.

    Args:
        size (int): number of ranks.
        timeout (float): seconds that a call may take before its ranks are killed and `WorldTimeout` is raised.
        grace (float): seconds that the other ranks have to end after one has failed.
    """

    def __init__(self, size, timeout=CALL_TIMEOUT_SECONDS, grace=GRACE_SECONDS):
        if size < 1:
            raise ValueError(f"the size of a world is {size}: expected at least 1.")
        self.size = size
        self.timeout = timeout
        self.grace = grace
        self.pids = []
        self._connections = []
        self._calls = 0
        self._name = ""

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __call__(self, function, *arguments, **keywords):
        """Run `function(*arguments, **keywords)` on every rank; returns the list of their results.

        Raises:
            Exception: what a rank raised, with the tracebacks of all failed ranks as its cause; an error of a rank's
                own goes before one that it only had because a peer failed.
            WorkerDied: a rank's process ended.
            WorldTimeout: some rank did not end in time.
        """
        outcomes = self.outcomes(function, *arguments, **keywords)
        failed = [outcome for outcome in outcomes if not outcome.succeeded]
        if failed:
            raise_failure(failed)
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function, *arguments, **keywords):
        """Run a function like a call of the world; returns an `Outcome` per rank, raises no error of a rank."""
        self._start()
        self._calls += 1
        task = describe_task(function, arguments, keywords, f"{self._name}-{self._calls}")
        for connection in self._connections:
            try:
                connection.send(task)
            except OSError:
                pass  # the rank has died: collecting finds its status
        outcomes = self._collect(task.function)
        if any(outcome.exit_status is not None or isinstance(outcome.exception, WorldTimeout) for outcome in outcomes):
            self.close()
        return outcomes

    def close(self):
        """End the ranks."""
        for connection in self._connections:
            connection.close()
        nursery = _nursery
        for pid in self.pids:
            if nursery is None or not nursery.alive:
                break
            if nursery.exit_status(pid, timeout=2.0) is None:
                _kill(pid)
                nursery.exit_status(pid)
        self._connections, self.pids = [], []
        shm_files.remove_stale()

    def _start(self):
        if self._connections:
            return
        try:
            self.pids, sockets = get_nursery().fork(self.size)
        except NurseryError:
            close_nursery()  # it may just have been killed with the job before: once more from the start
            self.pids, sockets = get_nursery().fork(self.size)
        self._connections = [Connection(socket.detach()) for socket in sockets]
        self._name = uuid.uuid4().hex[:12]
        self._calls = 0

    def _collect(self, name):
        outcomes = {}
        deadline = time.monotonic() + self.timeout
        shortened = False
        while len(outcomes) < self.size:
            open_connections = {connection: rank for rank, connection in enumerate(self._connections) if rank not in outcomes}
            ready = wait(list(open_connections), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._give_up(name, outcomes)
                break
            for connection in ready:
                rank = open_connections[connection]
                outcomes[rank] = self._receive(connection, rank)
                if not outcomes[rank].succeeded and not shortened:
                    shortened = True
                    deadline = min(deadline, time.monotonic() + self.grace)
        return [outcomes[rank] for rank in range(self.size)]

    def _receive(self, connection, rank):
        try:
            return pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            status = get_nursery().exit_status(self.pids[rank])
            text = f"rank {rank} (pid {self.pids[rank]}) {_describe_status(status)}"
            return Outcome(rank, exception=WorkerDied(text), exit_status=-1 if status is None else status)

    def _give_up(self, name, outcomes):
        """Show the stacks of late ranks, then kill them."""
        late = [rank for rank in range(self.size) if rank not in outcomes]
        for rank in late:
            _kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(0.5)
        for rank in late:
            _kill(self.pids[rank])
            outcomes[rank] = Outcome(
                rank, exception=WorldTimeout(f"{name} did not end in time on rank {rank}; its stack is on the error output.")
            )


def describe_task(function, arguments, keywords, unique_id):
    """`Task` for a call of `function`.

    Raises:
        ValueError: the function is not importable.
    """
    name = getattr(function, "__qualname__", "")
    if not inspect.isroutine(function) or "<" in name:
        raise ValueError(f"{function!r} cannot be run in a world: expected a function defined at module level.")
    module = sys.modules.get(function.__module__)
    file = os.path.abspath(inspect.getfile(function)) if module is not None else ""
    return Task(
        module=function.__module__,
        file=file,
        function=name,
        arguments=pickle.dumps((arguments, keywords)),
        unique_id=unique_id,
        search_path=list(sys.path),
        directory=os.getcwd(),
    )


def raise_failure(failed):
    """Raise the error of the first rank that failed by itself; its cause holds the tracebacks of all failed ranks."""
    first = min(failed, key=lambda outcome: (_is_consequence(outcome.exception), outcome.rank))
    texts = [f"---- rank {outcome.rank} ----\n{outcome.traceback or outcome.exception}" for outcome in failed]
    raise first.exception from RankTraceback("\n".join(texts))


def _is_consequence(exception):
    """Class of a rank's exception: 0 its own error or death, 1 caused by a failed peer, 2 a timeout after a failure."""
    return 2 if isinstance(exception, WorldTimeout) else int(isinstance(exception, PeerError))


def _describe_status(status):
    if status is None:
        return "ended"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"


def _kill(pid, signal_number=signal.SIGKILL):
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        pass
