"""A run that ends before its last step says what ended it, on every rank."""

import os
import signal
import time

import pytest

from mindspeed_ms.testing import checkpoint_runs as runs


class Signalling(runs.Rows):
    """Rows; while the first one is read this process gets a signal."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def __getitem__(self, index):
        if not self.read:
            os.kill(os.getpid(), self.number)
        return super().__getitem__(index)


def ended(folder, number=None, **training):
    """The last line of the log."""
    from mindspeed_ms.core import comm

    monotonic = time.monotonic
    if training.get("exit_duration_in_mins"):
        time.monotonic = lambda: 1000 * monotonic()
    rows = Signalling(number) if number and comm.get_rank() == comm.get_world_size() - 1 else None
    try:
        return runs.train(folder, rows, training=training)["log"][-1]
    finally:
        time.monotonic = monotonic


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ({"number": signal.SIGTERM}, "at iteration 1 of 4 by SIGTERM, exit code 0; resume_training continues from here"),
        ({"number": signal.SIGINT, "exit_interval": 1}, "by SIGINT, exit code 0"),
        ({"exit_duration_in_mins": 1}, "by exit_duration_in_mins 1 (--exit-duration-in-mins), exit code 0"),
        (
            {"exit_interval": 2, "save_enabled": False},
            "at iteration 2 of 4 by exit_interval 2 (--exit-interval), exit code 0; nothing was saved",
        ),
    ],
    ids=["SIGTERM", "SIGINT", "duration", "interval"],
)
def test_the_last_line_names_the_cause(world, tmp_path, cause, words):
    for line in world(2)(ended, tmp_path, **cause):
        assert line.startswith("ended at iteration") and words in line, line
