"""GenerationService: runs the engine in its thread for requests that arrive in the event loop of the HTTP server."""

import asyncio
import contextlib
import queue
import threading
from dataclasses import dataclass, field

from mindspeed_ms.core.logging import logger

_CLOSING = "the server is shutting down"
_IDLE_SECONDS = 0.1  # between looks at `stop` while there is nothing to do


class ServiceClosed(Exception):
    """Error: the server is shutting down, or its engine failed; a request cannot be finished."""


class TooManyRequests(Exception):
    """Error: as many requests as allowed are waiting or running."""


@dataclass(eq=False)
class _Ticket:
    """A request on its way: `loop` and `events` belong to the server's thread, `number` to the engine's."""

    request: object
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue = field(default_factory=asyncio.Queue)
    number: int | None = None
    open_answers: int = 0

    def put(self, item):
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self.events.put_nowait, item)


class GenerationService:
    """Engine of one process, shared by the requests of a server.

    `run` is called in the thread that owns the model and returns after `stop`; all other methods are for other threads.

    Args:
        engine (Engine): or what `inference.ranks.lead` makes of it.
        max_requests (int): waiting and running ones; more are refused.
        grace_seconds (float): how long running requests may go on after `stop`.
    """

    def __init__(self, engine, max_requests=64, grace_seconds=5.0):
        self.engine, self.max_requests, self.grace_seconds = engine, max_requests, grace_seconds
        self._commands = queue.SimpleQueue()
        self._tickets = {}
        self._count, self._lock = 0, threading.RLock()  # a signal may come while it is held
        self._stop, self._hurry = threading.Event(), threading.Event()
        self.failure = None

    # ---- the thread of the engine -------------------------------------------------------------------------------------

    def run(self):
        """Serve until `stop`; an error of the engine ends all requests and is raised."""
        try:
            while not self._stop.is_set():
                self._turn()
            self._finish()
        except BaseException as error:
            self.failure = error
            raise
        finally:
            with self._lock:  # no command follows
                self._stop.set()
            self._end_all()

    def _turn(self):
        """Take the commands that wait, then one step of the engine; without work wait for a command."""
        block = not self.engine.has_work
        while True:
            try:
                command, ticket = self._commands.get(block=block, timeout=_IDLE_SECONDS)
            except queue.Empty:
                break
            block = False
            command(ticket)
        if self.engine.has_work:
            try:
                events = self.engine.step()
            except ValueError:  # it has dropped all requests, and can be used again
                logger.exception("a step of the engine failed; the requests that ran end with an error")
                self._fail_all(ServiceClosed("the engine failed at this request or at one beside it; see the server's log"))
                return
            for event in events:
                self._deliver(event)

    def _finish(self):
        """After `stop`: the requests that run get `grace_seconds`, then they are cancelled."""
        timer = threading.Timer(self.grace_seconds, self._hurry.set)
        timer.start()
        while self.engine.has_work and not self._hurry.is_set():
            self._turn()
        timer.cancel()
        for number in self._tickets:
            self.engine.cancel(number)
        self._fail_all(ServiceClosed(_CLOSING))
        if self.engine.has_work:
            self._turn()

    def _add(self, ticket):
        try:
            ticket.number = self.engine.add(ticket.request)
        except ValueError as error:
            ticket.put(error)
            return
        self._tickets[ticket.number] = ticket
        ticket.open_answers = ticket.request.params.n

    def _cancel(self, ticket):
        if self._tickets.pop(ticket.number, None) is not None:
            self.engine.cancel(ticket.number)

    def _deliver(self, event):
        ticket = self._tickets.get(event.request)
        if ticket is None:
            return  # cancelled
        ticket.put(event)
        if event.finish_reason is not None:
            ticket.open_answers -= 1
            if not ticket.open_answers:
                del self._tickets[event.request]

    def _end_all(self):
        closed = ServiceClosed(_CLOSING if self.failure is None else "the engine failed; see the server's log")
        while not self._commands.empty():
            command, ticket = self._commands.get()
            if command == self._add:
                ticket.put(closed)
        self._fail_all(closed)

    def _fail_all(self, error):
        for ticket in self._tickets.values():
            ticket.put(error)
        self._tickets.clear()

    # ---- other threads ------------------------------------------------------------------------------------------------

    def stop(self, now=False):
        """Let `run` end: no new requests, `grace_seconds` for those that run (`now`: none)."""
        with self._lock:
            self._stop.set()
        if now:
            self._hurry.set()

    @property
    def is_running(self):
        """Whether requests are taken (bool)."""
        return not self._stop.is_set()

    async def events(self, request):
        """Asynchronous iterator over the events of a request; closing it cancels the request.

        Raises:
            RequestError: the engine refuses it.
            TooManyRequests, ServiceClosed: see there.
        """
        with self._lock:
            if self._count >= self.max_requests:
                raise TooManyRequests(f"{self.max_requests} requests are waiting or running; try again later")
            self._count += 1
        ticket = _Ticket(request, asyncio.get_running_loop())
        remaining = request.params.n
        try:
            with self._lock:
                if self._stop.is_set():
                    raise ServiceClosed(_CLOSING)
                self._commands.put((self._add, ticket))
            while remaining:
                item = await ticket.events.get()
                if isinstance(item, Exception):
                    remaining = 0
                    raise item
                remaining -= item.finish_reason is not None
                yield item
        finally:
            with self._lock:
                self._count -= 1
            if remaining:
                logger.debug("a request was given up by its client")
                self._commands.put((self._cancel, ticket))
