"""Progress engine of the shared-memory backend: a rank that waits for one call advances the calls of all its groups.

A call is a generator that yields whenever it must wait for a peer. Nothing runs in the background: calls advance when
they are made, when any call is waited for and when a handle is asked for its state. As a rank that waits advances
everything, ranks that wait for different calls never block each other.
"""

import os
import time

from mindspeed_ms.core.comm.errors import CommError
from mindspeed_ms.core.comm.interface import Handle

SPINS = 40  # times that the processor is yielded before sleeping
_FIRST_SLEEP_SECONDS = 50e-6
_LONGEST_SLEEP_SECONDS = 500e-6
_CHECK_SECONDS = 0.02


class Operation(Handle):
    """One call on one group; also its handle.

    Attributes:
        call (Call): the call itself.
        posted (bool): everything that this rank gives is published; the next call of the group may begin.
        waits (tuple): what the generator last waited for, for `group.awaited`.
    """

    __slots__ = ("_generator", "_result", "call", "done", "error", "group", "posted", "waits")

    def __init__(self, group, call):
        self.group = group
        self.call = call
        self.posted = False
        self.waits = None
        self.done = False
        self.error = None
        self._generator = None
        self._result = None

    @property
    def name(self):
        """Name of the operation, for errors."""
        return self.call.operation

    def description(self):
        """Text of the call and its group."""
        return f"{self.call} on group {self.group.name}"

    def start(self, generator):
        """Set the generator that executes the call; returns the operation itself."""
        self._generator = generator
        return self

    def step(self):
        """Advance the call until it must wait or is done."""
        try:
            next(self._generator)
        except StopIteration as stop:
            self._result = stop.value
            self._end()
        except CommError as error:
            self.group.fail(error)
            self.error = error
            self._end()

    def _end(self):
        self.done = self.posted = True
        self._generator = None
        self.group.engine.moves += 1

    def fail(self, error):
        """End the call with an error, which `wait` raises."""
        self.error = error
        if self._generator is not None:
            self._generator.close()
        self._end()

    def wait(self):
        """Block until the call is complete; return its result.

        Raises:
            CommError: what went wrong.
        """
        if not self.done:
            self.group.engine.wait(self)
        if self.error is not None:
            raise self.error
        return self._result

    def is_completed(self):
        """True if `wait` would not block."""
        if not self.done:
            self.group.engine.advance()
        return self.done


class Engine:
    """Progress engine: advances the calls of all groups of a rank.

    Attributes:
        moves (int): counts every step forward.
        spins (int): times that a compiled wait may yield the processor before it gives control back.
    """

    def __init__(self, watch):
        self.moves = 0
        self.spins = 0
        self._watch = watch
        self._active = {}

    def start(self, operation):
        """Start a call and advance it; a blocking call may spin for a moment."""
        group = operation.group
        self._active[group] = None
        if operation.call.blocking and self._is_alone(operation):
            self.spins = SPINS
            try:
                group.advance()
            finally:
                self.spins = 0
        else:
            group.advance()
        if group.idle():
            self._active.pop(group, None)

    def _is_alone(self, operation):
        return len(self._active) == 1 and operation.group.is_only(operation)

    def pending(self):
        """Calls that are not done."""
        return [operation for group in self._active for operation in group.pending()]

    def advance(self):
        """Advance every call as far as possible without waiting."""
        for group in list(self._active):
            group.advance()
            if group.idle():
                self._active.pop(group, None)

    def wait(self, operation):
        """Advance all calls until `operation` is done."""
        self.spins = SPINS if self._is_alone(operation) else 0
        try:
            if not self._spin(operation):
                self._sleep(operation)
        finally:
            self.spins = 0

    def _spin(self, operation):
        """Advance while calls progress and a little longer; True if `operation` is done."""
        idle = 0
        while idle < (2 if self.spins else SPINS):
            before = self.moves
            self.advance()
            if operation.done:
                return True
            if self.moves != before:
                idle = 0
                continue
            idle += 1
            os.sched_yield()
        return False

    def _sleep(self, operation):
        """Sleep between advances until `operation` is done, and watch the peers meanwhile."""
        pause = _FIRST_SLEEP_SECONDS
        self.spins = 0
        with self._watch.over(operation) as watched:
            checked = time.monotonic()
            while True:
                time.sleep(pause)
                before = self.moves
                self.advance()
                if operation.done:
                    return
                if self.moves != before:
                    pause = _FIRST_SLEEP_SECONDS
                elif pause < _LONGEST_SLEEP_SECONDS:
                    pause *= 1.1
                if time.monotonic() - checked > _CHECK_SECONDS:
                    watched.check()
                    checked = time.monotonic()
                    if operation.done:
                        return
