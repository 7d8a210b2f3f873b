"""Fixtures for all tests. This process runs no MindSpore operator: tests that need MindSpore run in forked worlds."""

import signal

import pytest

from mindspeed_ms.testing.worlds import World, close_nursery


class WorldFactory:
    """`world(size)` gives the session's world of that size: `world(2)(function, *arguments)` returns a result per rank."""

    def __init__(self):
        self._worlds = {}

    def __call__(self, size):
        if size not in self._worlds:
            self._worlds[size] = World(size)
        return self._worlds[size]

    def close(self):
        """End all worlds."""
        for made in self._worlds.values():
            made.close()
        self._worlds.clear()


@pytest.fixture(scope="session")
def world():
    """Factory of forked worlds, one per size, shared by all tests."""
    factory = WorldFactory()
    yield factory
    factory.close()
    close_nursery()


@pytest.fixture(autouse=True)
def _logger_as_before():
    """A command that ran in this process leaves level and handlers of the package's logger to the next test as they were."""
    from mindspeed_ms.core.logging import logger

    level, handlers, propagate = logger.level, list(logger.handlers), logger.propagate
    yield
    logger.setLevel(level)
    logger.handlers[:], logger.propagate = handlers, propagate


@pytest.fixture(autouse=True)
def _signals_as_before():
    """No command that ran in this process changes what a signal does to the next test (SIGPIPE: a closed socket)."""
    numbers = (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before
