"""Watchdog of waiting ranks: detects dead peers, early ends, deadlocks and timeouts."""

import time
from contextlib import contextmanager

from mindspeed_ms.core.comm import processes
from mindspeed_ms.core.comm.board import FINISHED, JOINED
from mindspeed_ms.core.comm.errors import CommTimeoutError, DeadlockError, PeerDiedError, PeerLeftError
from mindspeed_ms.core.comm.waiting import LONGER, waits_for
from mindspeed_ms.core.logging import logger

_PUBLISH_SECONDS = 0.2
_CIRCLE_SECONDS = 0.1
_CONFIRMING_BEATS = 2


class Watch:
    """Watches the peers of one rank through the job's status board."""

    def __init__(self, board):
        self._board = board
        self._waits = 0

    @contextmanager
    def over(self, operation):
        """Context manager: watch the peers while `operation` is waited for; the caller calls `check()` regularly."""
        watched = _WatchedOperation(self._board, operation, self._next_number)
        try:
            yield watched
        finally:
            watched.end()

    def _next_number(self):
        self._waits += 1
        return self._waits


class _WatchedOperation:
    """Watch over one wait: `check` fails the operation if it cannot complete any more."""

    def __init__(self, board, operation, next_number):
        self._board = board
        self._operation = operation
        self._next_number = next_number
        self._started = time.monotonic()
        self._published = None
        self._circle_checked = 0.0
        self._suspects = {}

    def check(self):
        """Check every awaited rank."""
        operation = self._operation
        targets = operation.group.awaited(operation)
        error = self._lost_peer(targets)
        waited = time.monotonic() - self._started
        if error is None and waited > _PUBLISH_SECONDS:
            error = self._circle(targets)
        if error is None and waited > operation.group.timeout:
            error = self._timeout(targets)
        if error is not None and not operation.done:
            logger.error("%s", error)
            operation.group.fail(error)

    def end(self):
        """End the watch."""
        if self._published is not None:
            self._board.clear_wait()

    # ---- lost peers ---------------------------------------------------------------------------------------------------

    def _lost_peer(self, targets):
        for rank in targets:
            lost = self._board.state(rank) != JOINED or not self._board.is_alive(rank)
            if lost and self._still_awaited(rank):
                return self._lost_error(rank)
        return None

    def _still_awaited(self, rank):
        """Whether an ended rank is still awaited after one more advance: it may have done its part just before its end."""
        operation = self._operation
        operation.group.engine.advance()
        return not operation.done and rank in operation.group.awaited(operation)

    def _lost_error(self, rank):
        operation, board = self._operation, self._board
        if board.verdict(rank):  # it left because of a circle that it was in with this rank
            return self._circle_error(board.verdict(rank))
        who = f"rank {rank} (pid {board.pid(rank)})"
        where = f"in {operation.name} on group {operation.group.name}"
        call = f"rank {board.rank} waits in {operation.description()}"
        state = board.state(rank)
        if state == JOINED:
            return PeerDiedError(f"{who} died {where}; {call}")
        if state == FINISHED:
            return PeerLeftError(f"{who} finished without taking part {where}; {call}")
        return PeerLeftError(f"{who} failed and left its peers {where}; {call}. Its error: {board.reason(rank)}")

    # ---- circles ------------------------------------------------------------------------------------------------------

    def _circle(self, targets):
        """Publish what this rank waits for; look for ranks that wait for each other.

        A rank needs every rank that it waits for, and a waiting rank advances all its calls: so a circle of waiting
        ranks never resolves. The board may be out of date; only when each rank of the circle has checked again
        (beats) after all of them were seen waiting is it certain that none can go on.
        """
        now = time.monotonic()
        board = self._board
        if self._published != targets:
            board.publish_wait(self._next_number(), self._operation.description(), targets)
            self._published = list(targets)
            self._suspects = {}
            self._circle_checked = now
            return None
        if now - self._circle_checked < _CIRCLE_SECONDS:
            return None
        board.beat()
        self._circle_checked = now
        for rank in targets:
            text = board.verdict(rank)
            if text:
                return self._circle_error(text)
        circle = self._find_circle()
        if circle is None:
            self._suspects = {}
            return None
        if not self._confirmed(circle):
            return None
        text = "ranks wait for each other in different calls: " + "; ".join(
            f"rank {rank} (pid {board.pid(rank)}) is in {board.wait_text(rank)}" for rank in sorted(circle)
        )
        return self._circle_error(text)

    def _circle_error(self, text):
        """Publish the deadlock to the ranks that wait for this one, then fail."""
        self._board.publish_verdict(text)
        return DeadlockError(text)

    def _find_circle(self):
        """{rank: (wait number, beat)} of a circle of waiting ranks that this rank reaches; None if there is none."""
        snapshots, path = {}, []

        def visit(rank):
            if rank in path:
                return path[path.index(rank) :]
            if rank in snapshots:
                return None  # seen on another path, which found nothing
            snapshots[rank] = self._board.snapshot(rank)
            if snapshots[rank] is None:
                return None
            path.append(rank)
            for target in snapshots[rank][2]:
                found = visit(target)
                if found:
                    return found
            path.pop()
            return None

        circle = visit(self._board.rank)
        return None if circle is None else {rank: snapshots[rank][:2] for rank in circle}

    def _confirmed(self, circle):
        """True if the same waits were seen before and every rank has checked often enough since then."""
        same = set(circle) == set(self._suspects) and all(circle[rank][0] == self._suspects[rank][0] for rank in circle)
        if not same:
            self._suspects = circle
            return False
        return all(circle[rank][1] >= self._suspects[rank][1] + _CONFIRMING_BEATS for rank in circle)

    # ---- time ---------------------------------------------------------------------------------------------------------

    def _timeout(self, targets):
        operation, board = self._operation, self._board
        others = []
        for rank in targets:
            text = board.wait_text(rank)
            doing = f"waits in {text}" if text else "is not in a call"
            if processes.is_stopped(board.pid(rank)):
                doing = "is stopped by a signal"
            others.append(f"rank {rank} (pid {board.pid(rank)}) {doing}")
        return CommTimeoutError(
            f"rank {board.rank} waited longer than {operation.group.timeout:g} s in {operation.description()}: "
            f"{'; '.join(others)}.{waits_for()} {LONGER}."
        )
