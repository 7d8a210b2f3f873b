"""Garbage collection at fixed steps; what a second signal does."""

import signal
from unittest import mock

import pytest

from mindspeed_ms.training import housekeeping


@pytest.mark.parametrize("manual, collected", [(True, [1, 2, 2, 3, 4]), (False, [0, 0, 0, 0, 0])])
def test_garbage_is_collected_at_the_interval_and_at_evaluations(manual, collected):
    counts = []
    with mock.patch.object(housekeeping, "gc") as collector:
        with housekeeping.GarbageCollection(manual, 2) as garbage:
            for iteration, evaluates in ((1, True), (3, False), (4, False), (5, True)):
                counts.append(collector.collect.call_count)
                garbage.after_step(iteration, evaluates)
        counts.append(collector.collect.call_count)
    assert counts == collected and collector.enable.called == collector.disable.called == manual


def test_a_second_signal_interrupts():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may start with it ignored
    try:
        with housekeeping.SignalHandler() as signals:
            signal.raise_signal(signal.SIGINT)
            assert signals.received == "SIGINT"
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
