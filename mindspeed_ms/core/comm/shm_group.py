"""Process group in shared memory: its collectives, as generators that `progress` advances.

See `shm_region` for the rounds and rings that the data goes through.
"""

from collections import deque

import numpy as np

from mindspeed_ms.core.comm import calls
from mindspeed_ms.core.comm import shm_kernels as kernels
from mindspeed_ms.core.comm.calls import COMPARED_WORDS, Call
from mindspeed_ms.core.comm.errors import MismatchError
from mindspeed_ms.core.comm.host import HostProcessGroup
from mindspeed_ms.core.comm.progress import Operation
from mindspeed_ms.core.comm.reduction import array_at, combine_into
from mindspeed_ms.core.comm.shm_messages import Messages
from mindspeed_ms.core.comm.shm_region import HEADER_WORDS, ROUNDS, SMALL_BYTES, STACK_BYTES, Region

_HEADER_STRIDE = HEADER_WORDS * 8
_NOTHING = np.empty(0, np.uint8)


class SharedMemoryGroup(HostProcessGroup):
    """Process group whose ranks map one shared region.

    Args:
        path (str): of the region's file.
        engine (Engine): advances this rank's calls.
        timeout (float): seconds that a call may wait.
        debug (bool): carry the caller's stack with each call.
    """

    def __init__(self, name, ranks, global_rank, path, engine, timeout, debug):
        super().__init__(name, ranks, global_rank)
        self.engine = engine
        self.timeout = timeout
        self.region = Region(path, self.rank, self.size, f"group {name}", debug)
        self.messages = Messages(self)
        self._debug = debug
        self._collectives = deque()
        self._next_round = 1
        self._completed = 0
        self._sequence = 0
        self._error = None
        # up to this size every rank reads and combines all data itself; above, each combines a share and they exchange these
        self._direct_bytes = self.region.slot_bytes if self.size == 2 else min(self.region.slot_bytes, (256 << 10) // self.size)

    # ---- what the engine needs ----------------------------------------------------------------------------------------

    def advance(self):
        """Advance the calls as far as they can: the oldest may complete, later ones may publish."""
        while self._collectives:
            head = self._collectives[0]
            head.step()
            if not head.done:
                break
            if self._collectives and self._collectives[0] is head:
                self._collectives.popleft()
        if len(self._collectives) > 1:
            self._publish_later_ones()
        self.messages.advance()

    def _publish_later_ones(self):
        before = self._collectives[0]
        for operation in list(self._collectives)[1:]:
            if not before.posted:
                break
            if not operation.posted:
                operation.step()
            before = operation

    def idle(self):
        """True if no call is under way."""
        return not self._collectives and self.messages.idle()

    def pending(self):
        """Calls under way, oldest first."""
        return [*self._collectives, *self.messages.pending()]

    def is_only(self, operation):
        """True if no other call is under way."""
        return len(self._collectives) + self.messages.count() == 1

    def fail(self, error):
        """End all calls with an error; the group cannot be used afterwards."""
        if self._error is None:
            self._error = error
        operations = self.pending()
        self._collectives.clear()
        self.messages.clear()
        for operation in operations:
            if not operation.done:
                operation.fail(error)

    def awaited(self, operation):
        """Global ranks that must act before `operation` can advance."""
        if operation.waits is None or operation.done:
            return []
        kind, *values = operation.waits
        if kind == "earlier":
            return self.awaited(self._collectives[0]) if self._collectives[0] is not operation else []
        if kind == "arrived":
            return self._behind(self.region.arrived, values[0])
        if kind == "arrived_one":
            return [self.ranks[values[1]]]
        if kind == "finished":
            return self._behind(self.region.finished, values[0])
        return [self.ranks[values[0]]]

    def _behind(self, counters, value):
        return [
            self.ranks[index]
            for index in range(self.size)
            if index != self.rank and kernels.read_counter(counters + index * kernels.LINE) < value
        ]

    def check_usable(self):
        """Refuse a call after an error: the ranks are out of step."""
        if self._error is not None:
            raise type(self._error)(f"group {self.name} is of no more use after an error: {self._error}")

    def close(self):
        """Unmap the region."""
        self.region.close()

    # ---- starting calls -----------------------------------------------------------------------------------------------

    def _start(self, call, make_generator, *arguments):
        self.check_usable()
        self._sequence += 1
        call.sequence = self._sequence
        operation = Operation(self, call)
        operation.start(make_generator(operation, *arguments))
        self._collectives.append(operation)
        self.engine.start(operation)
        return operation

    def _start_all_reduce(self, call, source, out):
        if source.nbytes <= self._direct_bytes:
            return self._start(call, self._all_reduce_directly, source, out)
        return self._start(call, self._all_reduce_by_shares, source, out)

    def _start_all_gather(self, call, source, out):
        return self._start(call, self._gather, source, out)

    def _start_reduce_scatter(self, call, source, out):
        return self._start(call, self._scatter, source, out)

    def _start_broadcast(self, call, data, source):
        return self._start(call, self._spread, data, source)

    def _start_all_to_all(self, call, source, out, row):
        return self._start(call, self._exchange, source, out, row)

    def _start_send(self, call, data, peer, async_op):
        return self.messages.start_send(call, data, peer, async_op)

    def _start_recv(self, call, out, peer):
        return self.messages.start_recv(call, out, peer)

    def barrier(self):
        """Return when every rank has called it."""
        self._start(Call("barrier"), self._meet).wait()

    # ---- rounds -------------------------------------------------------------------------------------------------------

    def _room(self, operation):
        """Claim the next round, and wait until this rank's slots of it are free."""
        needed = self._next_round - ROUNDS
        if needed > 0:
            while kernels.wait_all(self.region.finished, self.size, needed, self.engine.spins) >= 0:
                operation.waits = ("finished", needed)
                yield
        self._next_round += 1
        return self._next_round - 1

    def _header(self, operation, round_, first):
        """Address where the first round's header goes, 0 for later rounds; what does not fit into it is written here."""
        if not first:
            return 0
        slot = round_ % ROUNDS
        if operation.call.splits is not None:
            self.region.splits[slot, self.rank] = operation.call.splits
        if self._debug:
            stack = np.frombuffer(calls.caller_stack(STACK_BYTES), np.uint8)
            self.region.stacks[slot, self.rank, :] = 0
            self.region.stacks[slot, self.rank, : stack.size] = stack
        return self.region.headers_address(round_) + self.rank * _HEADER_STRIDE

    def _publish(self, operation, data, offset, count, large, first):
        """Put `count` bytes of `data` (uint8) into this rank's slot of a new round; returns the round."""
        if large:
            self.region.reserve_large()
        round_ = yield from self._room(operation)
        base, stride = self.region.slots(round_, large)
        kernels.publish(
            self._header(operation, round_, first),
            operation.call.template,
            operation.call.sequence,
            base + self.rank * stride,
            data,
            offset,
            count,
            self.region.own_arrived,
            round_,
        )
        self.engine.moves += 1
        return round_

    def _arrivals(self, operation, round_, first):
        """Wait until all ranks have published a round and the call's turn has come; check headers."""
        while self._completed != round_ - 1:
            operation.waits = ("earlier",)
            yield
        headers = self.region.headers_address(round_) if first else 0
        while True:
            behind = kernels.arrivals(
                self.region.arrived, self.size, round_, self.engine.spins, headers, _HEADER_STRIDE, COMPARED_WORDS, self.rank
            )
            if behind == -1:
                return
            if behind < -1:
                raise self._mismatch(round_)
            operation.waits = ("arrived", round_)
            yield

    def _arrival_of(self, operation, round_, rank):
        """Wait until one rank has published a round and the call's turn has come."""
        while self._completed != round_ - 1:
            operation.waits = ("earlier",)
            yield
        while not kernels.wait_one(self.region.arrived + rank * kernels.LINE, round_, self.engine.spins):
            operation.waits = ("arrived_one", round_, rank)
            yield

    def _complete(self, round_):
        kernels.write_counter(self.region.own_finished, round_)
        self._completed = round_
        self.engine.moves += 1

    def _mismatch(self, round_):
        slot = round_ % ROUNDS
        stacks = self.region.stacks[slot] if self._debug else None
        return MismatchError(calls.describe_mismatch(self, self.region.headers[slot]) + calls.describe_stacks(self, stacks))

    # ---- the calls ----------------------------------------------------------------------------------------------------

    def _meet(self, operation):
        round_ = yield from self._publish(operation, _NOTHING, 0, 0, False, True)
        operation.posted = True
        yield from self._arrivals(operation, round_, True)
        self._complete(round_)

    def _all_reduce_directly(self, operation, source, out):
        """All-reduce in which every rank reads and combines everything."""
        call, data = operation.call, source.view(np.uint8)
        large = data.size > SMALL_BYTES
        round_ = yield from self._publish(operation, data, 0, data.size, large, True)
        operation.posted = True
        yield from self._arrivals(operation, round_, True)
        base, stride = self.region.slots(round_, large)
        combine_into(out, call.dtype, call.detail, base, stride, self.size)
        self._complete(round_)

    def _all_reduce_by_shares(self, operation, source, out):
        """All-reduce in which each rank combines one share of a slot and publishes it in the next round."""
        region, call, width = self.region, operation.call, source.itemsize
        data, result = source.view(np.uint8), out.view(np.uint8)
        for start in range(0, data.size, region.slot_bytes):
            count = min(region.slot_bytes, data.size - start)
            round_ = yield from self._publish(operation, data, start, count, True, start == 0)
            yield from self._arrivals(operation, round_, start == 0)
            share = -(-count // (width * self.size)) * width
            first, last = min(count, self.rank * share), min(count, (self.rank + 1) * share)
            base, stride = region.large_slots(round_)
            next_round = yield from self._room(operation)
            shares, _ = region.large_slots(next_round)
            own = array_at(shares + self.rank * stride + first, (last - first) // width, source.dtype)
            combine_into(own, call.dtype, call.detail, base + first, stride, self.size)
            self._complete(round_)
            kernels.write_counter(region.own_arrived, next_round)
            operation.posted = start + count == data.size
            yield from self._arrivals(operation, next_round, False)
            kernels.gather_parts(result, start, shares, stride, self.size, share, count)
            self._complete(next_round)

    def _gather(self, operation, source, out):
        data, result = source.view(np.uint8), out.view(np.uint8)
        large, total, per_round = data.size > SMALL_BYTES, data.size, self.region.slot_bytes
        for start in range(0, max(total, 1), per_round):
            count = min(per_round, total - start)
            round_ = yield from self._publish(operation, data, start, count, large, start == 0)
            operation.posted = start + count == total
            yield from self._arrivals(operation, round_, start == 0)
            base, stride = self.region.slots(round_, large)
            kernels.gather(result, start, total, base, stride, self.size, count)
            self._complete(round_)

    def _scatter(self, operation, source, out):
        """Scatter: a slot holds the pieces for all ranks, one after the other."""
        region, call, width = self.region, operation.call, source.itemsize
        data, length = source.view(np.uint8), out.nbytes
        large = data.size > SMALL_BYTES
        per_round = max(1, region.slot_bytes // (width * self.size)) * width
        for start in range(0, max(length, 1), per_round):
            count = min(per_round, length - start)
            if large:
                region.reserve_large()
            round_ = yield from self._room(operation)
            base, stride = region.slots(round_, large)
            kernels.publish_strided(
                self._header(operation, round_, start == 0),
                call.template,
                call.sequence,
                base + self.rank * stride,
                data,
                start,
                length,
                count,
                self.size,
                region.own_arrived,
                round_,
            )
            self.engine.moves += 1
            operation.posted = start + count == length
            yield from self._arrivals(operation, round_, start == 0)
            combine_into(
                out[start // width : (start + count) // width],
                call.dtype,
                call.detail,
                base + self.rank * count,
                stride,
                self.size,
            )
            self._complete(round_)

    def _spread(self, operation, source, index):
        """Broadcast: only the source publishes data; all ranks publish the header."""
        data = source.view(np.uint8)
        large, total, per_round = data.size > SMALL_BYTES, data.size, self.region.slot_bytes
        is_source = self.rank == index
        for start in range(0, max(total, 1), per_round):
            count = min(per_round, total - start)
            round_ = yield from self._publish(
                operation, data, start, count if is_source else 0, large and is_source, start == 0
            )
            operation.posted = start + count == total
            if start == 0:
                yield from self._arrivals(operation, round_, True)
            else:
                yield from self._arrival_of(operation, round_, index)
            if not is_source:
                base, stride = self.region.slots(round_, large)
                kernels.gather(data, start, 0, base + index * stride, 0, 1, count)
            self._complete(round_)

    def _exchange(self, operation, source, out, row):
        """All-to-all: each rank publishes everything that it sends, slot by slot; each rank copies its own part."""
        region = self.region
        data, result = source.view(np.uint8), out.view(np.uint8)
        large, per_round = data.size > SMALL_BYTES, region.slot_bytes
        splits, longest = None, 1
        start = 0
        while start < longest:
            count = max(0, min(per_round, data.size - start))
            round_ = yield from self._publish(operation, data, start, count, large, start == 0)
            operation.posted = splits is not None and start + per_round >= longest
            yield from self._arrivals(operation, round_, start == 0)
            if splits is None:
                splits = region.splits[round_ % ROUNDS].copy()
                longest = kernels.longest_exchange(splits, row)
                if longest < 0:
                    calls.check_matching_splits(self, splits)
                operation.posted = per_round >= longest
            kernels.take_exchanged(
                result,
                splits,
                self.rank,
                row,
                start,
                per_round,
                *region.small_slots(round_),
                SMALL_BYTES,
                *region.large_slots(round_),
            )
            self._complete(round_)
            start += per_round
