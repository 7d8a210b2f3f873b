"""What this machine has: Ascend cards, memory of the host. Imports no MindSpore."""

import os

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def cards():
    """Number of Ascend cards that this process may use: ASCEND_RT_VISIBLE_DEVICES of those in /dev."""
    present = [name[7:] for name in os.listdir("/dev") if name.startswith("davinci") and name[7:].isdigit()]
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "").replace(" ", "")
    return len(set(present) & set(visible.split(","))) if visible else len(present)


def host_memory():
    """Bytes of memory of this host, or of the container that it lets this process have (int)."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _LIMITS:
        try:
            with open(path, encoding="ascii") as file:
                found = min(found, int(file.read()))
        except (OSError, ValueError):  # there is none
            continue
    return found
