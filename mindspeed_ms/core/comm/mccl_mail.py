"""Byte messages through MindSpore's CPU communication (MCCL send and receive).

MindSpore keeps one queue for each ordered pair of ranks, whatever group or tag is named; a receive must be at least as
long as the message, and empty messages break the queue. So every message is an envelope, with its contents inside if
they are short, else followed by them; the envelope names the channel, and messages for another channel are kept
until they are received. A send is buffered by MindSpore and returns at once; a receive blocks.
"""

import os
from collections import deque
from dataclasses import dataclass

import numpy as np
from mindspore import Tensor
from mindspore.ops.auto_generate.gen_ops_prim import dist_comm_irecv_op, dist_comm_isend_op

from mindspeed_ms.core.autograd import synchronize
from mindspeed_ms.core.comm.calls import WORDS
from mindspeed_ms.core.comm.errors import CommError
from mindspeed_ms.core.comm.waiting import LONGER, waits_for

TIMEOUT_VARIABLE = "MS_CPU_COMM_OP_TIMEOUT"
STACK_BYTES = 2048
_WORLD = "mccl_world_group"
_INLINE_BYTES = 4096
# words of an envelope: channel, bytes of the contents, number of splits, bytes of the stack, then the call's header
_CHANNEL, _CONTENT_BYTES, _SPLITS, _STACK = range(4)
_FIXED_WORDS = 4 + WORDS


@dataclass
class Letter:
    """A received message: the call's header words, its splits and the sender's stack (empty if none), the contents."""

    words: np.ndarray
    splits: np.ndarray
    stack: np.ndarray
    contents: np.ndarray


class Mailbox:
    """Messages of this rank to and from all others.

    Args:
        world_size (int): number of ranks.
    """

    def __init__(self, world_size):
        self._envelope_bytes = 8 * (_FIXED_WORDS + 2 * world_size) + STACK_BYTES + _INLINE_BYTES
        self._kept = {}

    def send(self, rank, channel, call, contents, stack=b""):
        """Send `contents` (flat uint8) with the header of `call` to a global rank; it may be changed afterwards.

        Raises:
            CommError: MindSpore could not send.
        """
        splits = [] if call.splits is None else [*call.splits[0], *call.splits[1]]
        words = np.array([channel, contents.size, len(splits), len(stack), *call.words().tolist(), *splits], np.int64)
        parts = [words.view(np.uint8), np.frombuffer(stack, np.uint8)]
        inline = contents.size <= _INLINE_BYTES
        if inline:
            parts.append(contents)
        self._send(rank, np.concatenate(parts))
        if not inline:
            self._send(rank, contents)

    def receive(self, rank, channel):
        """Block until a message of the channel has come from a global rank; returns its `Letter`."""
        kept = self._kept.get((rank, channel))
        while not kept:
            found, letter = self._next(rank)
            self._kept.setdefault((rank, found), deque()).append(letter)
            kept = self._kept.get((rank, channel))
        return kept.popleft()

    def _next(self, rank):
        envelope = np.zeros(self._envelope_bytes, np.uint8)
        self._receive(rank, envelope)
        words = envelope[: 8 * _FIXED_WORDS].view(np.int64)
        splits, stack_bytes, size = int(words[_SPLITS]), int(words[_STACK]), int(words[_CONTENT_BYTES])
        start = 8 * (_FIXED_WORDS + splits)
        stack = envelope[start : start + stack_bytes]
        if size <= _INLINE_BYTES:
            contents = envelope[start + stack_bytes : start + stack_bytes + size]
        else:
            contents = np.empty(size, np.uint8)
            self._receive(rank, contents)
        letter = Letter(words[4:], envelope[8 * _FIXED_WORDS : start].view(np.int64), stack, contents)
        return int(words[_CHANNEL]), letter

    def _send(self, rank, data):
        self._run("send to", rank, lambda: dist_comm_isend_op(Tensor.from_numpy(np.ascontiguousarray(data)), rank, _WORLD, 0))

    def _receive(self, rank, data):
        self._run("receive from", rank, lambda: dist_comm_irecv_op(Tensor.from_numpy(data), 0, rank, _WORLD))

    @staticmethod
    def _run(what, rank, operation):
        try:
            operation()
            synchronize()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()
            raise CommError(
                f"could not {what} rank {rank} ({reason[0] if reason else error}): it ended, or did not come "
                f"within {TIMEOUT_VARIABLE}={os.environ.get(TIMEOUT_VARIABLE)} s.{waits_for()} {LONGER}."
            ) from error
