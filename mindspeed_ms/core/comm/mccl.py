"""Backend `mccl`: collectives on CPU under msrun, composed from send and receive of MindSpore's own communication.

MindSpore's native CPU collectives know few dtypes and no asynchronous form, so every call here is messages of bytes. In
a collective each rank sends one message to every other: a header, and what the call gives to that rank. As all members
always exchange headers, a differing call is an error on all of them. Reductions run in rank order in the same code as
shm's: the results are equal bit by bit.

Everything is sent in one step, also by all_reduce: a second step could only be sent by a rank that waits, and ranks
that wait for different calls would then block each other. Asynchronous calls send when they are made and receive when
they are waited for, in the order in which they were made. A lost peer is only noticed after the timeout
(MS_CPU_COMM_OP_TIMEOUT, set from ours) or by msrun, which then ends the job.
"""

import hashlib
import os
from collections import deque

import numpy as np
from mindspore.communication import get_rank
from mindspore.communication import init as init_mindspore

from mindspeed_ms.core.comm import calls
from mindspeed_ms.core.comm import shm_kernels as kernels
from mindspeed_ms.core.comm.calls import COMPARED_WORDS, Call
from mindspeed_ms.core.comm.errors import CommError, MismatchError
from mindspeed_ms.core.comm.host import HostProcessGroup
from mindspeed_ms.core.comm.interface import CompletedHandle, Handle
from mindspeed_ms.core.comm.mccl_mail import STACK_BYTES, TIMEOUT_VARIABLE, Letter, Mailbox
from mindspeed_ms.core.comm.payload import address
from mindspeed_ms.core.comm.reduction import combine_into

_NOTHING = np.empty(0, np.uint8)


class MindsporeJob:
    """MCCL communication of one rank.

    Raises:
        CommError: the process was not started by msrun.
    """

    def __init__(self, environment, timeout):
        if not os.environ.get("MS_ROLE"):
            raise CommError(
                "backend mccl needs the scheduler that msrun starts: start the script with msrun, or with "
                "mindspeed_ms.launch and --master_port, or use backend shm for ranks of one host."
            )
        os.environ.setdefault(TIMEOUT_VARIABLE, str(max(1, int(timeout))))
        kernels.warm_up()
        init_mindspore("mccl")
        if get_rank() != environment.rank:
            raise CommError(
                f"MindSpore calls this process rank {get_rank()}, RANK_ID says {environment.rank}: start the job "
                "with msrun's --worker_num and --local_worker_num, or give --node_rank on every host."
            )
        self._rank = environment.rank
        self._mailbox = Mailbox(environment.world_size)
        self._groups_made = {}

    def new_group(self, name, ranks, timeout):
        """Group of these ranks. MindSpore has one timeout for all groups, that of `init`."""
        key = (name, tuple(ranks))
        instance = self._groups_made[key] = self._groups_made.get(key, 0) + 1
        digest = hashlib.sha256(repr((key, instance)).encode()).digest()
        return MindsporeGroup(name, ranks, self._rank, self._mailbox, int.from_bytes(digest[:7], "little"))

    def close(self, exception=None):
        """Do nothing: MindSpore ends its communication with the process."""


class _Collective(Handle):
    """Handle of a collective whose messages are sent and whose answers are still to be received."""

    def __init__(self, group, call, finish):
        self._group, self._call, self._finish = group, call, finish
        self.done = False
        self.error = None

    def wait(self):
        """Complete all earlier collectives of the group, and this one."""
        if not self.done:
            self._group.complete(self)
        if self.error is not None:
            raise self.error

    def is_completed(self):
        """True after `wait`; nothing advances in the background."""
        return self.done

    def receive(self):
        """Receive from every peer, compare the headers, finish."""
        letters = self._group.collect()
        self._group.compare(self._call, letters)
        self._finish({peer: letter.contents for peer, letter in letters.items()})
        self.done = True


class _Receive(Handle):
    """Handle of a message that is still to be received."""

    def __init__(self, group, call, out, peer):
        self._group, self._call, self._out, self._peer = group, call, out, peer
        self.done = False

    def wait(self):
        """Receive this message and all earlier ones from that peer."""
        while not self.done:
            self._group.receive_next(self._peer)

    def is_completed(self):
        """True after `wait`; nothing advances in the background."""
        return self.done

    def take(self, letter):
        """Check the header of the letter and fill the output."""
        group, expected = self._group, self._call.words()
        if not np.array_equal(letter.words[:COMPARED_WORDS], expected[:COMPARED_WORDS]):
            raise group.fail(
                MismatchError(
                    f"different messages met on group {group.name}: rank {group.ranks[self._peer]} sends "
                    f"{calls.describe_message(letter.words)}; rank {group.ranks[group.rank]} expects "
                    f"{calls.describe_message(expected)}"
                )
            )
        self._out.view(np.uint8)[:] = letter.contents
        self.done = True


class MindsporeGroup(HostProcessGroup):
    """Process group over the job's mailbox, with one channel for collectives and one for messages.

    Args:
        mailbox (Mailbox): of the job.
        number (int): the same on all members, different from other groups.
    """

    def __init__(self, name, ranks, global_rank, mailbox, number):
        super().__init__(name, ranks, global_rank)
        self._mailbox = mailbox
        self._collective_channel, self._message_channel = 2 * number, 2 * number + 1
        self._debug = calls.debug_enabled()
        self._outstanding = deque()
        self._receives = {}
        self._sequence = 0
        self._message_sequences = {}
        self._error = None

    def _peers(self):
        """Indices of the other ranks, from the next one on."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _stack(self):
        return calls.caller_stack(STACK_BYTES) if self._debug else b""

    # ---- collectives --------------------------------------------------------------------------------------------------

    def _start(self, call, given, finish):
        """Send `given[i]` (bytes) to rank i; once all ranks' bytes are received, call `finish({i: bytes})`."""
        self._check_usable()
        self._sequence += 1
        call.sequence = self._sequence
        stack = self._stack()
        for peer in self._peers():
            self._mailbox.send(self.ranks[peer], self._collective_channel, call, given[peer], stack)
        operation = _Collective(self, call, finish)
        self._outstanding.append(operation)
        return operation

    def complete(self, operation):
        """Complete the outstanding collectives up to `operation`."""
        while not operation.done:
            head = self._outstanding[0]
            try:
                head.receive()
            except CommError as error:
                self.fail(error)
                return
            self._outstanding.popleft()

    def collect(self):
        """{index: the next collective letter of that rank}."""
        return {peer: self._mailbox.receive(self.ranks[peer], self._collective_channel) for peer in self._peers()}

    def compare(self, call, letters):
        """Refuse, on every member, headers that differ."""
        own = Letter(call.words(), np.array(call.splits or ()).reshape(-1), np.frombuffer(self._stack(), np.uint8), _NOTHING)
        ordered = [letters.get(index, own) for index in range(self.size)]
        if any(not np.array_equal(letter.words[:COMPARED_WORDS], own.words[:COMPARED_WORDS]) for letter in ordered):
            stacks = [letter.stack for letter in ordered] if self._debug else None
            raise MismatchError(
                calls.describe_mismatch(self, [letter.words for letter in ordered]) + calls.describe_stacks(self, stacks)
            )
        if call.splits is not None:
            splits = np.stack([letter.splits for letter in ordered]).reshape(self.size, 2, self.size)
            calls.check_matching_splits(self, splits)

    def fail(self, error):
        """Fail all outstanding calls, because the ranks are out of step. Returns the error."""
        self._error = self._error or error
        for operation in self._outstanding:
            operation.done, operation.error = True, error
        self._outstanding.clear()
        return error

    def _check_usable(self):
        if self._error is not None:
            raise type(self._error)(f"group {self.name} is of no more use after an error: {self._error}")

    def _start_all_reduce(self, call, source, out):
        own = source.copy()
        return self._start(call, [source.view(np.uint8)] * self.size, lambda received: self._combine(call, own, received, out))

    def _combine(self, call, own, received, out):
        """Stack the ranks' values and reduce them with the functions of shm."""
        rows = np.empty((self.size, own.size), own.dtype)
        rows[self.rank] = own
        for peer, data in received.items():
            rows[peer] = data.view(own.dtype)
        combine_into(out, call.dtype, call.detail, address(rows), own.nbytes, self.size)

    def _start_all_gather(self, call, source, out):
        data = source.view(np.uint8)
        parts = out.view(np.uint8).reshape(self.size, data.size)
        parts[self.rank] = data

        def place(received):
            for peer, content in received.items():
                parts[peer] = content

        return self._start(call, [data] * self.size, place)

    def _start_reduce_scatter(self, call, source, out):
        parts = source.view(np.uint8).reshape(self.size, out.nbytes)
        own = parts[self.rank].copy().view(source.dtype)
        return self._start(call, parts, lambda received: self._combine(call, own, received, out))

    def _start_broadcast(self, call, data, source):
        content = data.view(np.uint8)

        def take(received):
            if self.rank != source:
                content[:] = received[source]

        return self._start(call, [content if self.rank == source else _NOTHING] * self.size, take)

    def _start_all_to_all(self, call, source, out, row):
        input_bounds = np.concatenate(([0], np.cumsum(call.splits[0]))) * row
        output_bounds = np.concatenate(([0], np.cumsum(call.splits[1]))) * row
        data, result = source.view(np.uint8), out.view(np.uint8)
        given = [data[input_bounds[index] : input_bounds[index + 1]] for index in range(self.size)]
        own = given[self.rank].copy()

        def join(received):
            for peer, part in {**received, self.rank: own}.items():
                result[output_bounds[peer] : output_bounds[peer + 1]] = part

        return self._start(call, given, join)

    def barrier(self):
        """Return when every rank has called it."""
        self._start(Call("barrier"), [_NOTHING] * self.size, lambda received: None).wait()

    # ---- messages -----------------------------------------------------------------------------------------------------

    def _next_message(self, kind, peer):
        self._check_usable()
        number = self._message_sequences[kind, peer] = self._message_sequences.get((kind, peer), 0) + 1
        return number

    def _start_send(self, call, data, peer, async_op):
        call.sequence = self._next_message("send", peer)
        self._mailbox.send(self.ranks[peer], self._message_channel, call, data.view(np.uint8), self._stack())
        return CompletedHandle()

    def _start_recv(self, call, out, peer):
        call.sequence = self._next_message("recv", peer)
        receive = _Receive(self, call, out, peer)
        self._receives.setdefault(peer, deque()).append(receive)
        return receive

    def receive_next(self, peer):
        """Receive the message of the oldest open receive."""
        self._check_usable()
        self._receives[peer].popleft().take(self._mailbox.receive(self.ranks[peer], self._message_channel))
