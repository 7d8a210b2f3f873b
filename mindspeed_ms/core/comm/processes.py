"""Processes by pid and start time: whether one is alive, its parent, its command. A pid alone may belong to a later process."""

import os
import time


def start_time(pid):
    """When a process started, in clock ticks since the machine's start; None if it is gone or only waits to be reaped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the name before may hold spaces and parentheses
    return None if fields[0] in (b"Z", b"X", b"x") else int(fields[19])


def seconds_since_start(pid):
    """Age of a process in seconds; infinite if it cannot be seen."""
    started = start_time(pid)
    if started is None:
        return float("inf")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def is_alive(pid, started):
    """True if the process that had `pid` and started at `started` still runs."""
    return start_time(pid) == started


def is_stopped(pid):
    """True if the process is stopped by a signal or a debugger."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return False
    return text[text.rindex(b")") + 2 :][:1] in (b"T", b"t")


def namespace():
    """Identifies the set of processes that can see each other's pids (containers have their own)."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def command_line(pid):
    """Words of a process's command, empty if they cannot be read."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def parent(pid):
    """Pid of a process's parent, 0 if there is none or it cannot be seen."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return 0
    return int(text[text.rindex(b")") + 2 :].split()[1])
