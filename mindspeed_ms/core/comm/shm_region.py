"""Memory layout of one group's shared region: headers, counters, slots and rings.

Collectives go through rounds, numbered from 1 per group. In a round each rank publishes a header (first round of a
call) and up to a slot of data, raises its `arrived` counter to the round's number, reads the data of the others,
and raises its `finished` counter. A rank has `ROUNDS` slots, used in turn: it may publish round t once all have
finished t - ROUNDS. Small data has slots of its own, so that a group which only moves small tensors takes little
memory.

Messages go through one ring of slots for each ordered pair of ranks, with a counter of slots written and one of slots
read.

Space is reserved when it is first used (`reserve_*`), as writing to a full file system would kill the process.
"""

import os

import numpy as np

from mindspeed_ms.core.comm.errors import CommError, SharedMemoryError
from mindspeed_ms.core.comm.shm_files import SharedFile
from mindspeed_ms.core.comm.shm_kernels import LINE, full_fence

SLOT_ENVIRONMENT_VARIABLE = "MINDSPEED_MS_SHM_SLOT_BYTES"
ROUNDS = 4
SMALL_BYTES = 16 << 10
DEFAULT_SLOT_BYTES = 256 << 10
HEADER_WORDS = 24
_HEADER_BYTES = HEADER_WORDS * 8
STACK_BYTES = 2048
REFUSAL_BYTES = 1024
RING_SLOTS = 8
_PAGE = 4096


def slot_bytes():
    """Bytes of a slot for large data: MINDSPEED_MS_SHM_SLOT_BYTES, a multiple of 4096."""
    text = os.environ.get(SLOT_ENVIRONMENT_VARIABLE)
    if not text:
        return DEFAULT_SLOT_BYTES
    if not text.isdigit() or int(text) < SMALL_BYTES or int(text) % _PAGE:
        raise CommError(
            f"environment variable {SLOT_ENVIRONMENT_VARIABLE} is {text!r}: expected a multiple of {_PAGE}, at "
            f"least {SMALL_BYTES}."
        )
    return int(text)


class Region:
    """The mapped memory of a group of `size` ranks, seen from its rank `rank`.

    Attributes (addresses are integers):
        arrived, finished: first of `size` counters, `LINE` bytes apart.
        slot_bytes: bytes of a large slot.
    """

    def __init__(self, path, rank, size, purpose, debug):
        self.rank, self.size = rank, size
        self.slot_bytes = slot_bytes()
        self.ring_slot_bytes = max(_PAGE, self.slot_bytes // 2) if size <= 16 else 64 << 10
        self._lay_out(debug)
        self._file = SharedFile(path, self._bytes, purpose=purpose)
        try:
            self._file.reserve(0, self._reserved)
        except SharedMemoryError:
            self._file.close()
            raise
        bytes_ = np.frombuffer(self._file.memory, np.uint8)
        self._bytes_view = bytes_
        self._base = bytes_.ctypes.data
        self.arrived = self._base + self._arrived
        self.finished = self._base + self._finished
        self.own_arrived = self.arrived + rank * LINE
        self.own_finished = self.finished + rank * LINE
        self._large_reserved = False
        self._rings_reserved = set()
        self._make_arrays(debug)
        self._announce_mapping()

    # ---- layout -------------------------------------------------------------------------------------------------------

    def _lay_out(self, debug):
        """Compute the offsets of all parts; the small ones come first and are reserved at once."""
        size = self.size
        self._end = 0
        self._mapped = self._take(size * LINE)
        self._arrived = self._take(size * LINE)
        self._finished = self._take(size * LINE)
        self._headers = self._take(ROUNDS * size * _HEADER_BYTES)
        self._splits = self._take(ROUNDS * size * 2 * size * 8)
        self._ring_counters = self._take(size * size * 3 * LINE)
        self._ring_headers = self._take(size * size * RING_SLOTS * _HEADER_BYTES)
        self._refusals = self._take(size * size * REFUSAL_BYTES)
        self._stacks = self._take(ROUNDS * size * STACK_BYTES if debug else 0)
        self._ring_stacks = self._take(size * size * RING_SLOTS * STACK_BYTES if debug else 0)
        self._small = self._take(ROUNDS * size * SMALL_BYTES)
        self._reserved = self._end
        self._large = self._take(ROUNDS * size * self.slot_bytes)
        self._rings = self._take(size * size * RING_SLOTS * self.ring_slot_bytes)
        self._bytes = self._end

    def _take(self, count):
        start = self._end
        self._end += -(-count // _PAGE) * _PAGE
        return start

    def _array(self, offset, shape, dtype=np.int64):
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self._bytes_view[offset : offset + count].view(dtype).reshape(shape)

    def _make_arrays(self, debug):
        size = self.size
        self.headers = self._array(self._headers, (ROUNDS, size, HEADER_WORDS))
        self.splits = self._array(self._splits, (ROUNDS, size, 2, size))
        self.ring_headers = self._array(self._ring_headers, (size, size, RING_SLOTS, HEADER_WORDS))
        self.refusals = self._array(self._refusals, (size, size, REFUSAL_BYTES), np.uint8)
        self.stacks = self._array(self._stacks, (ROUNDS, size, STACK_BYTES), np.uint8) if debug else None
        self.ring_stacks = self._array(self._ring_stacks, (size, size, RING_SLOTS, STACK_BYTES), np.uint8) if debug else None
        self._mapped_flags = self._array(self._mapped, (size, LINE // 8))[:, 0]

    def _announce_mapping(self):
        self._mapped_flags[self.rank] = 1
        full_fence()  # of two that come together at least one must see both flags
        self.unlink_if_mapped()

    def unlink_if_mapped(self):
        """Remove the file's name once every member has it mapped."""
        if self._mapped_flags.all():
            self._file.unlink()

    # ---- addresses ----------------------------------------------------------------------------------------------------

    def headers_address(self, round_):
        """First header of a round; the next rank's is `HEADER_WORDS * 8` bytes further."""
        return self._base + self._headers + (round_ % ROUNDS) * self.size * _HEADER_BYTES

    def ring_header(self, source, destination, count):
        """Address of the header beside the ring slot of write number `count`."""
        ring = (source * self.size + destination) * RING_SLOTS + count % RING_SLOTS
        return self._base + self._ring_headers + ring * _HEADER_BYTES

    def slots(self, round_, large):
        """(address of rank 0's slot, distance in bytes to the next rank's)."""
        return self.large_slots(round_) if large else self.small_slots(round_)

    def small_slots(self, round_):
        """(address of rank 0's small slot, distance in bytes to the next rank's)."""
        return self._base + self._small + (round_ % ROUNDS) * self.size * SMALL_BYTES, SMALL_BYTES

    def large_slots(self, round_):
        """(address of rank 0's large slot, distance in bytes to the next rank's)."""
        return self._base + self._large + (round_ % ROUNDS) * self.size * self.slot_bytes, self.slot_bytes

    def ring_counters(self, source, destination):
        """Addresses of a ring's counters: slots written, slots read, messages refused."""
        first = self._base + self._ring_counters + (source * self.size + destination) * 3 * LINE
        return first, first + LINE, first + 2 * LINE

    def ring_slot(self, source, destination, count):
        """Address of the ring slot of write number `count`, from 0."""
        ring = (source * self.size + destination) * RING_SLOTS + count % RING_SLOTS
        return self._base + self._rings + ring * self.ring_slot_bytes

    # ---- space --------------------------------------------------------------------------------------------------------

    def reserve_large(self):
        """Reserve the space of this rank's large slots."""
        if not self._large_reserved:
            for round_ in range(ROUNDS):
                self._file.reserve(self._large + (round_ * self.size + self.rank) * self.slot_bytes, self.slot_bytes)
            self._large_reserved = True

    def reserve_ring(self, destination):
        """Reserve the space of this rank's ring to another rank."""
        if destination not in self._rings_reserved:
            count = RING_SLOTS * self.ring_slot_bytes
            self._file.reserve(self._rings + (self.rank * self.size + destination) * count, count)
            self._rings_reserved.add(destination)

    def close(self):
        """Close the file; the memory is freed with its last array."""
        self._file.close()
