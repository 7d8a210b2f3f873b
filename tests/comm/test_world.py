"""Worlds give results and errors of ranks back as if they were local."""
import pytest


def _double(value):
    return 2 * value


def _raise(value):
    raise KeyError(value)


def test_results_come_back(world):
    assert world(1)(_double, 4) == [8]


def test_errors_come_back_with_their_traceback(world):
    with pytest.raises(KeyError, match="lost") as caught:
        world(1)(_raise, "lost")
    assert "in _raise" in str(caught.value.__cause__)
