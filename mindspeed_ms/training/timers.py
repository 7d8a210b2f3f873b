"""Timers of parts of a training (`get_timers`): levels, barriers, logs over all ranks. Source: Megatron core, `timers.py`.

timers = get_timers()
timers("batch-generator", log_level=2).start()
...
timers("batch-generator").stop()
"""

import time

from mindspeed_ms.core import comm
from mindspeed_ms.core.autograd import synchronize
from mindspeed_ms.core.logging import logger

HIGHEST_LEVEL = 2
OPTIONS = ("max", "minmax", "all")


class TimerError(RuntimeError):
    """Error: a timer is started twice, stopped before it was started, or not known."""


class DummyTimer:
    """Timer of a level above `timing_log_level`: it does nothing."""

    name = "a timer that is off"

    def start(self, barrier=False):
        """Do nothing."""

    def stop(self, barrier=False):
        """Do nothing."""

    def reset(self):
        """Do nothing."""

    def elapsed(self, reset=True, barrier=False):
        """Raise an error, as in Megatron.

        Raises:
            TimerError: always.
        """
        raise TimerError("elapsed: this timer is above the timing_log_level (--timing-log-level) and was not running.")

    active_time = elapsed


class Timer:
    """Sum of the seconds between `start` and `stop`.

    Args:
        name (str): shown in logs.
    """

    def __init__(self, name):
        self.name = name
        self._group = None
        self._started = None
        self._elapsed = self._active = 0.0

    def set_barrier_group(self, group):
        """Set the group (ProcessGroup) of `barrier`; all ranks without it."""
        self._group = group

    def start(self, barrier=False):
        """Start; with `barrier` after all ranks have come here.

        Raises:
            TimerError: it is running.
        """
        if self._started is not None:
            raise TimerError(f"timer {self.name!r} is started, but it is running already: stop it first.")
        self._wait(barrier)
        self._started = time.perf_counter()

    def stop(self, barrier=False):
        """Stop, and add the seconds.

        Raises:
            TimerError: it is not running.
        """
        if self._started is None:
            raise TimerError(f"timer {self.name!r} is stopped, but it is not running: start it first.")
        self._wait(barrier)
        seconds = time.perf_counter() - self._started
        self._elapsed, self._active, self._started = self._elapsed + seconds, self._active + seconds, None

    def _wait(self, barrier):
        if barrier and comm.is_initialized():
            (self._group or comm.world_group()).barrier()
        synchronize()  # what was issued on the device is part of it

    def reset(self):
        """Forget the seconds since the last reset."""
        self._elapsed, self._started = 0.0, None

    def elapsed(self, reset=True, barrier=False):
        """Seconds since the last reset (float); a running timer goes on."""
        running = self._started is not None
        if running:
            self.stop(barrier)
        seconds = self._elapsed
        if reset:
            self.reset()
        if running:
            self.start(barrier)
        return seconds

    def active_time(self):
        """Seconds since the timer was made (float)."""
        return self._active


class Timers:
    """Timers by name. A timer whose level is above `log_level` is a `DummyTimer`.

    Args:
        log_level (int): 0, 1 or 2.
        log_option (str): what `log` says of the ranks: "max", "minmax" or "all" of them.
    """

    def __init__(self, log_level=0, log_option="minmax"):
        self._timers, self._levels = {}, {}
        self._dummy = DummyTimer()
        self.configure(log_level, log_option)

    def configure(self, log_level, log_option):
        """Set level and option, and forget all timers.

        Raises:
            ValueError: an unknown level or option.
        """
        self._log_level = _level("timing_log_level", log_level)
        if log_option not in OPTIONS:
            raise ValueError(f"timing_log_option is {log_option!r}: expected one of {', '.join(OPTIONS)}.")
        self._log_option = log_option
        self._timers.clear()
        self._levels.clear()

    def __call__(self, name, log_level=None):
        """The timer of this name; made at the first call, with the level given then (without one the highest).

        Raises:
            ValueError: an unknown level, or another one than before.
        """
        level = self._levels.get(name)
        if level is None:
            level = self._levels[name] = (
                HIGHEST_LEVEL if log_level is None else _level(f"log_level of timer {name!r}", log_level)
            )
        elif log_level is not None and log_level != level:
            raise ValueError(f"log_level of timer {name!r} is {log_level!r}, but it was made with {level}.")
        if level > self._log_level:
            return self._dummy
        timer = self._timers.get(name)
        if timer is None:
            timer = self._timers[name] = Timer(name)
        return timer

    def get_all_timers_string(self, names=None, normalizer=1.0, reset=True, barrier=False):
        """Text of the times of all ranks in milliseconds (str); None if no rank has measured. All ranks call it."""
        times = self._times(names, normalizer, reset, barrier)
        if not times:
            return None
        lines = []
        for name, values in times.items():
            milliseconds = [value * 1000.0 for value in values.values()]
            label = f"    {(name + ' ').ljust(48, '.')}:"
            if self._log_option == "all":
                lines.append(f"  {name}:")
                lines.extend(f"     rank {rank:2d}: {value * 1000.0:.2f}" for rank, value in values.items())
            elif self._log_option == "max":
                lines.append(f"{label} {max(milliseconds):.2f}")
            else:
                lines.append(f"{label} ({min(milliseconds):.2f}, {max(milliseconds):.2f})")
        head = {"all": "times", "max": "max time", "minmax": "(min, max) time"}[self._log_option]
        return "\n".join([f"{head} across ranks (ms):", *lines])

    def log(self, names=None, rank=None, normalizer=1.0, reset=True, barrier=False):
        """Log the times of all ranks. All ranks call it.

        Args:
            names (Optional[list[str]]): timers; None: all of them. Those that did not run on any rank are left out.
            rank (Optional[int]): it logs; None: rank 0 (Megatron: the last one).
            normalizer (float): the times are divided by it: the number of steps.
            reset (bool): begin anew.
            barrier (bool): wait for all ranks first.
        """
        text = self.get_all_timers_string(names, normalizer, reset, barrier)
        if text is not None and _rank() == (rank or 0):
            logger.info("%s", text)

    def write(self, names=None, writer=None, iteration=0, normalizer=1.0, reset=True, barrier=False):
        """Write the longest time of all ranks, in seconds, as `NAME-time` to TensorBoard. All ranks call it."""
        for name, values in self._times(names, normalizer, reset, barrier).items():
            if writer is not None:
                writer.add_scalar(f"{name}-time", max(values.values()), iteration)

    def report(self, steps, iteration, writer=None):
        """Log all timers as the mean of `steps` steps, and write them; does nothing at level 0. All ranks call it."""
        if self._log_level:
            self.write(None, writer, iteration, steps, reset=False)
            self.log(normalizer=steps)

    def _times(self, names, normalizer, reset, barrier):
        """{name: {rank: seconds}} of the timers that ran."""
        if not normalizer > 0:
            raise ValueError(f"normalizer is {normalizer!r}: expected a positive number.")
        unknown = [name for name in names or () if name not in self._levels]
        if unknown and not comm.is_initialized():
            raise TimerError(f"no timer is called {', '.join(unknown)}; there are {', '.join(self._levels) or 'none'}.")
        own = {
            name: timer.elapsed(reset=reset) / normalizer
            for name, timer in self._timers.items()
            if names is None or name in names
        }
        if not comm.is_initialized() or comm.get_world_size() == 1:
            ranks = [own]
        else:
            if barrier:
                comm.world_group().barrier()
            ranks = comm.world_group().all_gather_object(own)
        found = dict.fromkeys(name for times in ranks for name in times)
        measured = {name: {rank: times.get(name, 0.0) for rank, times in enumerate(ranks)} for name in names or found}
        ran = {name: {rank: seconds for rank, seconds in values.items() if seconds > 0} for name, values in measured.items()}
        return {name: values for name, values in ran.items() if values}


def _level(what, level):
    if not isinstance(level, int) or isinstance(level, bool) or not 0 <= level <= HIGHEST_LEVEL:
        raise ValueError(f"{what} is {level!r}: expected 0, 1 or {HIGHEST_LEVEL}.")
    return level


def _rank():
    return comm.get_rank() if comm.is_initialized() else 0


_timers = Timers()


def get_timers():
    """Timers of this process: the same object always; `pretrain` gives it level and option of the configuration."""
    return _timers
