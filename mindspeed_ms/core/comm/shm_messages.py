"""Point-to-point messages in shared memory: one ring of slots per ordered pair of ranks.

A send is complete when all of it is in the ring. A blocking send that finds the ring full, and stays so, keeps a copy
of the rest, which goes out while the rank waits for anything later; so ranks that all send first never block each other.
"""

import time
from collections import deque

import numpy as np

from mindspeed_ms.core.comm import calls
from mindspeed_ms.core.comm import shm_kernels as kernels
from mindspeed_ms.core.comm.calls import COMPARED_WORDS
from mindspeed_ms.core.comm.errors import MismatchError
from mindspeed_ms.core.comm.interface import CompletedHandle
from mindspeed_ms.core.comm.progress import Operation
from mindspeed_ms.core.comm.shm_region import REFUSAL_BYTES, RING_SLOTS, STACK_BYTES

_STALL_SECONDS = 0.005


class Message(Operation):
    """Handle of a send or a receive."""

    __slots__ = ("data", "kind", "peer")

    def __init__(self, group, call, kind, peer, data):
        super().__init__(group, call)
        self.kind, self.peer, self.data = kind, peer, data
        self.waits = ("ring", peer)

    @property
    def name(self):
        """ "send" or "recv"."""
        return self.kind

    def description(self):
        """Text of the message, its peer and its group."""
        direction = "to" if self.kind == "send" else "from"
        inside = calls.describe_message(self.call.words())
        return f"{self.kind}({inside}) {direction} rank {self.group.ranks[self.peer]} on group {self.group.name}"


class Messages:
    """Point-to-point messages of this rank on a group."""

    def __init__(self, group):
        self._group = group
        self._region = group.region
        self._queues = {}
        self._sequences = {}
        self._slots_done = {}

    # ---- what the group's calls need ----------------------------------------------------------------------------------

    def advance(self):
        """Advance the oldest message of every direction as far as it can."""
        for key in list(self._queues):
            queue = self._queues.get(key)
            while queue:
                queue[0].step()
                if not queue or not queue[0].done:
                    break
                queue.popleft()
            if not queue:
                self._queues.pop(key, None)

    def idle(self):
        """True if no message is under way."""
        return not self._queues

    def pending(self):
        """Messages under way."""
        return [message for queue in self._queues.values() for message in queue]

    def count(self):
        """Number of messages under way."""
        return sum(map(len, self._queues.values()))

    def clear(self):
        """Drop the messages under way."""
        for queue in self._queues.values():
            queue.clear()
        self._queues.clear()

    # ---- starting -----------------------------------------------------------------------------------------------------

    def start_send(self, call, data, peer, async_op):
        """Send to the rank with index `peer`; returns its handle."""
        self._region.reserve_ring(peer)
        message = self._start(call, "send", peer, data, self._send)
        if not async_op and not message.done:
            return self._wait_or_keep(message)
        return message

    def start_recv(self, call, out, peer):
        """Receive from the rank with index `peer` into `out`; returns the handle."""
        return self._start(call, "recv", peer, out, self._receive)

    def _start(self, call, kind, peer, data, make_generator):
        self._group.check_usable()
        key = kind, peer
        call.sequence = self._sequences[key] = self._sequences.get(key, 0) + 1
        message = Message(self._group, call, kind, peer, data.view(np.uint8))
        message.start(make_generator(message))
        self._queues.setdefault(key, deque()).append(message)
        self._group.engine.start(message)
        return message

    def _wait_or_keep(self, message):
        """Give the receiver a moment to make room, then keep a copy of the rest."""
        engine = self._group.engine
        stalled = time.monotonic()
        while not message.done:
            before = engine.moves
            time.sleep(50e-6)
            engine.advance()
            now = time.monotonic()
            if engine.moves != before:
                stalled = now
            elif now - stalled > _STALL_SECONDS:
                message.data = message.data.copy()
                return CompletedHandle()
        return message

    # ---- the ring -----------------------------------------------------------------------------------------------------

    def _send(self, message):
        group, region, call = self._group, self._region, message.call
        peer, total = message.peer, call.nbytes
        written, read, refused = region.ring_counters(group.rank, peer)
        for start in range(0, max(total, 1), region.ring_slot_bytes):
            count = min(region.ring_slot_bytes, total - start)
            index = self._slots_done.get(("send", peer), 0)
            while True:
                if kernels.read_counter(refused):
                    raise MismatchError(self._refusal(group.rank, peer))
                if kernels.wait_one(read, index - RING_SLOTS + 1, group.engine.spins):
                    break
                yield
            header = region.ring_header(group.rank, peer, index) if start == 0 else 0
            if header and region.ring_stacks is not None:
                self._write_stack(region.ring_stacks[group.rank, peer, index % RING_SLOTS])
            kernels.publish(
                header,
                call.template,
                call.sequence,
                region.ring_slot(group.rank, peer, index),
                message.data,
                start,
                count,
                written,
                index + 1,
            )
            self._slots_done["send", peer] = index + 1
            group.engine.moves += 1

    @staticmethod
    def _write_stack(area):
        stack = np.frombuffer(calls.caller_stack(STACK_BYTES), np.uint8)
        area[:] = 0
        area[: stack.size] = stack

    def _receive(self, message):
        group, region, call = self._group, self._region, message.call
        peer, total = message.peer, call.nbytes
        written, read, _ = region.ring_counters(peer, group.rank)
        for start in range(0, max(total, 1), region.ring_slot_bytes):
            count = min(region.ring_slot_bytes, total - start)
            index = self._slots_done.get(("recv", peer), 0)
            while not kernels.wait_one(written, index + 1, group.engine.spins):
                yield
            if start == 0 and not kernels.header_matches(
                region.ring_header(peer, group.rank, index), call.template, call.sequence, COMPARED_WORDS
            ):
                raise self._refuse(message, index % RING_SLOTS)
            kernels.gather(message.data, start, 0, region.ring_slot(peer, group.rank, index), 0, 1, count)
            kernels.write_counter(read, index + 1)
            self._slots_done["recv", peer] = index + 1
            group.engine.moves += 1

    def _refuse(self, message, slot):
        """Report to the sender that its message differs from the expected one; returns the error."""
        group, region = self._group, self._region
        sent = region.ring_headers[message.peer, group.rank, slot]
        text = (
            f"different messages met on group {group.name}: rank {group.ranks[message.peer]} sends "
            f"{calls.describe_message(sent)}; rank {group.ranks[group.rank]} expects "
            f"{calls.describe_message(message.call.words())}"
        )
        if region.ring_stacks is not None:
            stack = region.ring_stacks[message.peer, group.rank, slot].tobytes().rstrip(b"\0").decode(errors="replace")
            text += f"\n---- sent from\n{stack}"
        data = np.frombuffer(text.encode()[:REFUSAL_BYTES], np.uint8)
        region.refusals[message.peer, group.rank, : data.size] = data
        kernels.write_counter(region.ring_counters(message.peer, group.rank)[2], 1)
        return MismatchError(text)

    def _refusal(self, source, destination):
        return self._region.refusals[source, destination].tobytes().rstrip(b"\0").decode(errors="replace")
