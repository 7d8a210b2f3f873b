"""Generation on several ranks: rank 0 takes the requests, the others follow it step by step.

    if comm.get_rank() == 0:
        with lead(engine) as engine:
            ...                      # add, cancel, step, generate, stream, as on one rank
    else:
        follow(engine)               # until rank 0 has left the block

Before each step rank 0 broadcasts what was added and cancelled since the last one. Logits are the same on every rank and
random numbers depend on nothing else, so every rank chooses the same tokens.
"""

import contextlib

from mindspeed_ms.core import comm
from mindspeed_ms.core.logging import logger
from mindspeed_ms.inference.engine import Engine, seeded

_WAIT_SECONDS = 10 * 365 * 86400.0
"""Followers wait as long as nobody asks for anything; a lost peer is noticed all the same."""
_END = "end"


@contextlib.contextmanager
def lead(engine):
    """Context manager on rank 0: an engine (Engine) whose steps the other ranks follow; leaving it ends `follow` there."""
    group = _group()
    if group is None:
        yield engine
        return
    leader = _Leader(engine, group)
    try:
        yield leader
    finally:
        leader.end()


def follow(engine):
    """Do on this rank what rank 0 does with its engine, until it has ended. On a world of one rank: return at once."""
    group = _group()
    if group is None:
        return
    while True:
        message = group.broadcast_object(None, 0)
        if message == _END:
            return
        requests, cancelled = message
        for request in requests:
            engine.add(request)
        for number in cancelled:
            engine.cancel(number)
        try:
            engine.step()
        except ValueError as error:  # rank 0 has the same one, and goes on with other requests
            logger.debug("a step failed: %s", error)


def _group():
    size = comm.get_world_size()
    return None if size == 1 else comm.new_group(range(size), timeout=_WAIT_SECONDS)


class _Leader(Engine):
    """The engine of rank 0: its steps begin with a broadcast of what was added and cancelled."""

    def __init__(self, engine, group):
        super().__init__(engine.runner, engine.tokenizer, engine.eos_ids)
        self._group, self._added, self._withdrawn, self._has_ended = group, [], [], False

    def add(self, request):
        """See Engine."""
        request = seeded(request)
        number = super().add(request)
        self._added.append(request)
        return number

    def cancel(self, request_id):
        """See Engine."""
        super().cancel(request_id)
        self._withdrawn.append(request_id)

    def _step(self):
        message = self._added, self._withdrawn
        self._added, self._withdrawn = [], []
        self._group.broadcast_object(message, 0)
        return super()._step()

    def end(self):
        """End `follow` on the other ranks."""
        if not self._has_ended:
            self._has_ended = True
            self._group.broadcast_object(_END, 0)
