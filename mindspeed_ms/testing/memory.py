"""Memory of this process as counted by Linux, the C library and Python."""

import ctypes
import gc
import sys


def resident_bytes(name="VmRSS"):
    """Resident memory now (VmRSS), or its peak (VmHWM)."""
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def peak_of(function):
    """Bytes by which a call raises this process's peak memory."""
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
        file.write("5")  # the peak starts at the present use
    before = resident_bytes()
    function()
    return resident_bytes("VmHWM") - before


class _HeapCounts(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    )


def held_memory():
    """(bytes that the C library has given out and not got back, blocks that Python objects hold): exact, unlike resident
    memory. 0 bytes if the C library is not glibc, which counts them."""
    gc.collect()  # clears Python's lists of free objects too, which fill up in the first hundreds of steps
    count = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if count is None:
        return 0, sys.getallocatedblocks()
    count.restype = _HeapCounts
    counts = count()
    return counts.uordblks + counts.hblkhd, sys.getallocatedblocks()
