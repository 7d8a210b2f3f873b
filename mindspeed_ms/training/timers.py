"""Timers: `get_timers()("name", log_level=2).start()` ... `.stop()`. Source of the interface: Megatron."""

import time

from mindspeed_ms.core.logging import logger


class TimerError(RuntimeError):
    """Error: a timer was started twice, stopped before its start, or asked for with another log level."""


class Timer:
    """Stop watch that adds up the time between `start` and `stop`.

    Args:
        name (str): of the timer.
        log_level (int): 0, 1 or 2.
    """

    def __init__(self, name, log_level):
        self.name, self.log_level = name, log_level
        self.reset()

    def start(self, barrier=False):
        """Start. `barrier` is of Megatron's signature; ranks are not awaited."""
        del barrier
        if self._started is not None:
            raise TimerError(f"the timer {self.name} is running: stop it first.")
        self._started = time.perf_counter()

    def stop(self, barrier=False):
        """Stop; see `start`."""
        del barrier
        if self._started is None:
            raise TimerError(f"the timer {self.name} is not running: start it first.")
        self._seconds += time.perf_counter() - self._started
        self._started = None

    def reset(self):
        """Set to zero."""
        self._seconds, self._started = 0.0, None

    def elapsed(self, reset=True, barrier=False):
        """Seconds (float) so far; by default the timer is reset."""
        del barrier
        running = time.perf_counter() - self._started if self._started is not None else 0.0
        seconds = self._seconds + running
        if reset:
            self._seconds = 0.0
            if self._started is not None:
                self._started = time.perf_counter()
        return seconds


class Timers:
    """Timers by name. A call gives the Timer of the name, made at its first call with the log level (default 2)."""

    def __init__(self):
        self._timers = {}

    def __call__(self, name, log_level=None):
        known = self._timers.get(name)
        if known is None:
            if log_level not in (None, 0, 1, 2):
                raise TimerError(f"log_level of the timer {name} is {log_level!r}: expected 0, 1 or 2.")
            known = self._timers[name] = Timer(name, 2 if log_level is None else log_level)
        elif log_level not in (None, known.log_level):
            raise TimerError(f"the timer {name} has log_level {known.log_level}, not {log_level}.")
        return known

    def log(self, names=None, normalizer=1.0, reset=True):
        """Log milliseconds of the named timers (default: all), divided by `normalizer`."""
        names = [name for name in (self._timers if names is None else names) if name in self._timers]
        times = ", ".join(f"{name}: {self._timers[name].elapsed(reset) * 1000.0 / normalizer:.2f}" for name in names)
        logger.info("time (ms): %s", times)


_timers = Timers()


def get_timers():
    """Timers of this process."""
    return _timers
