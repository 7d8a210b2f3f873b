"""Meeting of the ranks of a job at MASTER_ADDR:MASTER_PORT, for launchers that only set torchrun's variables.

Rank 0 listens, the others connect and say who they are; the answer names the job and says whether all ranks share one host's
memory. The connections stay open: a rank that dies closes its own, and the others learn of it within a moment.
"""

import errno
import os
import selectors
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass

from mindspeed_ms.core.comm.errors import CommError, CommTimeoutError, PeerDiedError
from mindspeed_ms.core.comm.sockets import Line, free_port, is_loopback, shared_memory
from mindspeed_ms.core.logging import logger

_GREETING = "mindspeed_ms rank 1"
_GRACE_SECONDS = 3.0  # for a job that ends just now to free the port, and for a name server
_POLL_SECONDS = 0.1
_SAY_SECONDS = 30.0


class RendezvousError(CommError):
    """The ranks cannot meet: the port is in use, the address unknown, or they disagree about the job."""


@dataclass(frozen=True)
class Meeting:
    """What the ranks agreed on.

    Attributes:
        job (str): a name that no other job has.
        one_host (bool): all ranks share one host's memory.
        address (str), scheduler_port (int): a place on rank 0's machine that all can reach, and a free port of it.
    """

    job: str
    one_host: bool
    address: str
    scheduler_port: int


_member = None


def meet(environment, timeout):
    """Wait for all ranks of the job; a second call returns the same `Meeting`.

    Args:
        environment (LaunchEnvironment): with `master`.
        timeout (float): seconds to wait.

    Raises:
        RendezvousError: see the class.
        CommTimeoutError: ranks that did not come, by number.
        PeerDiedError: a rank ended meanwhile.
    """
    global _member
    if _member is None or _member.process != os.getpid():
        member = (_Host if environment.rank == 0 else _Guest)(environment)
        member.come_together(timeout)
        _member = member
    return _member.meeting


def on_loss(callback):
    """Call `callback(text)` in a thread, once, when a rank of the job ended by a failure or died."""
    _member.watch(callback)


def is_met():
    """Whether this process takes part in a meeting, from `meet` to `leave`."""
    return _member is not None


def leave(exception=None):
    """Tell the other ranks that this one ends, with the exception if it failed."""
    global _member
    member, _member = _member, None
    if member is not None and member.process == os.getpid():
        member.leave(None if exception is None else f"failed with {type(exception).__name__}: {exception}")


class _Member:
    """One rank at the meeting."""

    def __init__(self, environment):
        self.environment, self.process = environment, os.getpid()
        self.host, self.port = environment.master
        self.meeting = None
        self._callback = None

    @property
    def place(self):
        """Address of the meeting, for errors."""
        return f"{self.host}:{self.port}"

    @property
    def variable(self):
        """What the port is, for errors: MASTER_PORT itself, or under torchrun, which listens there, one derived from it."""
        given = os.environ.get("MASTER_PORT")
        return "MASTER_PORT" if given in (None, "", str(self.port)) else f"for MASTER_PORT {given}, where torchrun listens"

    def introduction(self):
        """Who this rank is (dict)."""
        environment = self.environment
        return {
            "greeting": _GREETING,
            "rank": environment.rank,
            "world_size": environment.world_size,
            "local_world_size": environment.local_world_size,
            "run": environment.unique_id,
            "memory": shared_memory(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }

    def in_use(self):
        """Error: another job meets there."""
        return RendezvousError(
            f"port {self.port} of {self.host} ({self.variable}) is in use by another job or program: "
            "give each job a port of its own."
        )

    def unknown_address(self, error):
        """Error: the name of the machine cannot be resolved."""
        return RendezvousError(f"MASTER_ADDR is {self.host!r}, which is no address that this machine knows ({error}).")

    def watch(self, callback):
        """Call back when a rank is lost."""
        self._callback = callback

    def lost(self, text):
        """Report a lost rank, once."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback(text)

    def start_thread(self, work):
        threading.Thread(target=work, name="mindspeed_ms rendezvous", daemon=True).start()


class _Host(_Member):
    """Rank 0: it listens until its process ends."""

    def come_together(self, timeout):
        """See `meet`."""
        self._lines = {}  # rank -> Line
        self._known = {0: self.introduction()}
        self._selector = selectors.DefaultSelector()
        self._listener = self._listen()
        self._selector.register(self._listener, selectors.EVENT_READ)
        start, said = time.monotonic(), 0.0
        try:
            while len(self._known) < self.environment.world_size:
                waited = time.monotonic() - start
                if waited > timeout:
                    raise self._too_late(timeout)
                if waited > said + _SAY_SECONDS:
                    said = waited
                    logger.info("waiting at %s since %.0f s for %s", self.place, waited, self._missing())
                self._serve(_POLL_SECONDS)
        except CommError as error:
            self._tell(error=str(error), kind=type(error).__name__)
            self._listener.close()
            raise
        address = self._address()
        self.meeting = Meeting(uuid.uuid4().hex, self._share_memory(), address, free_port(address))
        self._tell(**asdict(self.meeting))
        self.start_thread(self._keep_serving)

    def _listen(self):
        try:
            family, *_, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise self.unknown_address(error) from error
        own = address[0] if is_loopback(address[0]) else ""
        deadline = time.monotonic() + _GRACE_SECONDS
        while True:
            try:
                return socket.create_server((own, self.port), family=family, backlog=1024)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise RendezvousError(f"rank 0 cannot listen on port {self.port} ({self.variable}): {error}.") from error
                if time.monotonic() > deadline:
                    raise self.in_use() from error
            time.sleep(_POLL_SECONDS)

    def _missing(self):
        missing = [rank for rank in range(self.environment.world_size) if rank not in self._known]
        shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        size = self.environment.local_world_size
        nodes = sorted({rank // size for rank in missing})
        of = f" (node {', '.join(map(str, nodes[:8]))})" if size < self.environment.world_size else ""
        return f"rank {shown}{of}"

    def _too_late(self, timeout):
        return CommTimeoutError(
            f"{self._missing()} did not come to {self.place} within {timeout:g} s. Start every rank with the same MASTER_ADDR, "
            "MASTER_PORT and WORLD_SIZE; the log of those that did not come may say why."
        )

    def _serve(self, seconds):
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    continue
                connection.settimeout(_GRACE_SECONDS)
                self._selector.register(connection, selectors.EVENT_READ, (None, Line(connection)))
            else:
                rank, line = key.data
                self._read(rank, line)
                while line.has_more and line.connection.fileno() >= 0:
                    rank = self._selector.get_key(line.connection).data[0]
                    self._read(rank, line)

    def _read(self, rank, line):
        """Take a message of a rank, or of one that has not said who it is."""
        try:
            message = line.receive()
        except TimeoutError:
            message = None
        if rank is None:
            self._welcome(message, line)
        elif message is None or "failed" in message:
            self._drop(line)
            del self._lines[rank]
            self._on_loss(rank, None if message is None else message["failed"])
        else:  # it has left
            self._drop(line)
            del self._lines[rank]

    def _welcome(self, message, line):
        if message is None or message.get("greeting") != _GREETING:
            self._drop(line)  # another program
            return
        if self.meeting is not None:
            line.send(error=str(self.in_use()), kind="RendezvousError", busy=True)
            self._drop(line)
            return
        wrong = self._disagreement(message)
        if wrong:
            line.send(error=wrong, kind="RendezvousError")
            self._drop(line)
            raise RendezvousError(wrong)
        self._lines[message["rank"]], self._known[message["rank"]] = line, message
        self._selector.modify(line.connection, selectors.EVENT_READ, (message["rank"], line))

    def _disagreement(self, message):
        """What is wrong with a rank's introduction; None if nothing is."""
        own, rank = self._known[0], message["rank"]
        who = f"rank {rank} (pid {message['pid']} on {message['host']})"
        if message["world_size"] != own["world_size"]:
            return (
                f"the ranks at {self.place} disagree: WORLD_SIZE is {own['world_size']} on rank 0 and {message['world_size']} "
                f"on {who}. Give every node the same number of nodes and of ranks per node (--nnodes, --nproc_per_node)."
            )
        if message["run"] != own["run"]:
            return f"{who} belongs to another run ({message['run']!r}) than rank 0 ({own['run']!r}), but uses its {self.place}."
        if rank in self._known:
            other = self._known[rank]
            return (
                f"two processes at {self.place} are rank {rank}: pid {other['pid']} on {other['host']} and pid "
                f"{message['pid']} on {message['host']}. Give every node its own --node_rank (every process its own RANK), and "
                "every job its own MASTER_PORT."
            )
        return None

    def _on_loss(self, rank, reason):
        about = self._known[rank]
        text = f"rank {rank} (pid {about['pid']} on {about['host']}) {reason or 'died'}"
        if self.meeting is None:
            raise PeerDiedError(f"{text} before all ranks had come together at {self.place}; its log says why.")
        self._tell(lost=text)
        self.lost(text)

    def _drop(self, line):
        self._selector.unregister(line.connection)
        line.connection.close()

    def _tell(self, **message):
        for line in list(self._lines.values()):
            line.send(**message)

    def _share_memory(self):
        return len({about["memory"] for about in self._known.values()}) == 1

    def _address(self):
        """Address by which the other hosts have reached this one."""
        own = self._known[0]["memory"]
        elsewhere = [line for rank, line in self._lines.items() if self._known[rank]["memory"] != own]
        lines = elsewhere or list(self._lines.values())
        return lines[0].connection.getsockname()[0] if lines else "127.0.0.1"

    def _keep_serving(self):
        while True:
            try:
                self._serve(None)
            except (OSError, ValueError):
                return  # closed

    def leave(self, failure):
        """Tell the others."""
        self.watch(None)
        self._tell(**({"left": True} if failure is None else {"lost": f"rank 0 {failure}"}))


class _Guest(_Member):
    """A rank other than 0."""

    def come_together(self, timeout):
        """See `meet`."""
        deadline = time.monotonic() + timeout
        busy_until = time.monotonic() + 2 * _GRACE_SECONDS
        while True:
            self._line = Line(self._connect(deadline, timeout))
            self._line.send(**self.introduction())
            answer = self._answer(deadline, timeout)
            if not (answer.get("busy") and time.monotonic() < busy_until):
                break
            self._line.connection.close()  # a job that ends just now?
            time.sleep(_POLL_SECONDS)
        if "error" in answer:
            kinds = {kind.__name__: kind for kind in (CommTimeoutError, PeerDiedError)}
            raise kinds.get(answer.get("kind"), RendezvousError)(answer["error"])
        self._line.connection.settimeout(None)
        self.meeting = Meeting(**answer)
        self.start_thread(self._listen)

    def _connect(self, deadline, timeout):
        unknown_until = time.monotonic() + _GRACE_SECONDS
        while True:
            try:
                return socket.create_connection(
                    (self.host, self.port), timeout=max(0.1, min(10.0, deadline - time.monotonic()))
                )
            except OSError as error:
                if isinstance(error, socket.gaierror) and time.monotonic() > unknown_until:
                    raise self.unknown_address(error) from error
                if time.monotonic() > deadline:
                    raise CommTimeoutError(
                        f"rank {self.environment.rank} found nobody at {self.place} within {timeout:g} s ({error}): rank 0 "
                        "(node 0) did not start, or MASTER_ADDR and MASTER_PORT are not those of its machine. Its log says why."
                    ) from error
            time.sleep(_POLL_SECONDS)

    def _answer(self, deadline, timeout):
        """Rank 0's answer; it has the last word on who did not come."""
        self._line.connection.settimeout(max(1.0, deadline - time.monotonic()) + 2 * _GRACE_SECONDS)
        try:
            answer = self._line.receive()
        except TimeoutError:
            raise CommTimeoutError(
                f"{self.place} ({self.variable}) did not answer rank {self.environment.rank} within {timeout:g} s: "
                "is it another program's port?"
            ) from None
        if answer is None:
            raise PeerDiedError(
                f"rank 0 ended before all ranks had come together at {self.place} (its log says why), or the port is another "
                "program's."
            )
        return answer

    def _listen(self):
        while True:
            message = self._line.receive()
            if message is None:
                self.lost("rank 0 died")
            elif "lost" in message:
                self.lost(message["lost"])
            if message is None or "left" in message:
                return

    def leave(self, failure):
        """Tell rank 0, which tells the others."""
        self.watch(None)
        self._line.send(**({"left": True} if failure is None else {"failed": failure}))
