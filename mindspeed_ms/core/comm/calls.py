"""Headers of collective calls and messages: integers that ranks compare, and the error texts where they differ."""

import os
import traceback

import numpy as np

from mindspeed_ms.core.comm.errors import MismatchError
from mindspeed_ms.core.comm.interface import REDUCTIONS
from mindspeed_ms.core.comm.payload import DTYPE_NAMES, DTYPE_NUMBERS

DEBUG_ENVIRONMENT_VARIABLE = "MINDSPEED_MS_COMM_DEBUG"
OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "barrier",
    "all_gather_object",
    "broadcast_object",
    "message",
)
_OPERATION_NUMBERS = {name: number for number, name in enumerate(OPERATIONS)}
_NO_DETAIL = -1
# words: operation, dtype, detail (reduction, or source rank), sequence number, number of axes, up to 12 lengths, bytes
_FIRST_LENGTH, _MAXIMUM_AXES, _BYTES_WORD = 5, 12, 17
COMPARED_WORDS = _BYTES_WORD
WORDS = _BYTES_WORD + 1
_FREE_LENGTH = -1
_SEQUENCE_WORD = 3
_TEMPLATES_KEPT = 4096
_templates = {}


def debug_enabled():
    """True if MINDSPEED_MS_COMM_DEBUG asks for the caller's stack with each call."""
    return os.environ.get(DEBUG_ENVIRONMENT_VARIABLE, "").lower() not in ("", "0", "false")


class Call:
    """Header of one call of one rank.

    Args:
        operation (str): one of `OPERATIONS`.
        dtype (str), shape: of the tensor; the same on every rank.
        detail (str or int): the reduction's name, or the source's global rank.
        nbytes (int): bytes that this rank gives.
        splits (tuple): of an all_to_all, rows for each rank and rows from each rank; axis 0 may then differ between
            ranks.
        blocking (bool): it is waited for at once.

    Attributes:
        template (np.ndarray): the header but for the sequence number; shared between calls.
    """

    __slots__ = ("blocking", "detail", "dtype", "nbytes", "operation", "sequence", "shape", "splits", "template")

    def __init__(self, operation, dtype="uint8", shape=(), detail=None, nbytes=0, splits=None, blocking=True):
        self.operation = operation
        self.dtype = dtype
        self.shape = shape
        self.detail = detail
        self.nbytes = nbytes
        self.splits = splits
        self.blocking = blocking
        self.sequence = 0
        key = (operation, dtype, shape, detail, nbytes, splits is None)
        self.template = _templates.get(key)
        if self.template is None:
            if len(_templates) >= _TEMPLATES_KEPT:
                _templates.clear()
            self.template = _templates[key] = np.array(self._words(), np.int64)

    def words(self):
        """The header as `WORDS` int64 numbers."""
        words = self.template.copy()
        words[_SEQUENCE_WORD] = self.sequence
        return words

    def _words(self):
        shape = list(self.shape)
        axes = len(shape)
        if axes > _MAXIMUM_AXES:
            shape = shape[: _MAXIMUM_AXES - 1] + [int(np.prod(shape[_MAXIMUM_AXES - 1 :]))]
        if self.splits is not None:
            shape[0] = _FREE_LENGTH
        if self.operation in ("all_reduce", "reduce_scatter"):
            detail = REDUCTIONS.index(self.detail)
        else:
            detail = _NO_DETAIL if self.detail is None else self.detail
        return [
            _OPERATION_NUMBERS[self.operation],
            DTYPE_NUMBERS[self.dtype],
            detail,
            0,
            axes,
            *shape,
            *([0] * (_MAXIMUM_AXES - len(shape))),
            self.nbytes,
        ]

    def __str__(self):
        return describe(self.words())


def describe(words):
    """Text of a header, such as `all_reduce(sum, float32 [4, 8]), call 3`."""
    operation, dtype, detail, sequence, axes = (int(word) for word in words[:_FIRST_LENGTH])
    name = OPERATIONS[operation] if 0 <= operation < len(OPERATIONS) else f"operation {operation}"
    if name == "barrier":
        return f"barrier, call {sequence}"
    if name in ("all_gather_object", "broadcast_object"):
        inside = [] if detail == _NO_DETAIL else [f"from rank {detail}"]
    else:
        lengths = [int(word) for word in words[_FIRST_LENGTH : _FIRST_LENGTH + min(axes, _MAXIMUM_AXES)]]
        shape = ", ".join("any" if length == _FREE_LENGTH else str(length) for length in lengths)
        inside = [f"{DTYPE_NAMES[dtype]} [{shape}]"]
        if name in ("all_reduce", "reduce_scatter"):
            inside.insert(0, REDUCTIONS[detail])
        elif detail != _NO_DETAIL:
            inside.insert(0, f"from rank {detail}")
    return f"{name}({', '.join(inside)}), call {sequence}"


def describe_message(words):
    """Text of a message's header, such as `float32 [4, 8], message 3`."""
    return describe(words).removeprefix("message(").replace("), call", ", message")


def describe_mismatch(group, headers):
    """Text of differing headers in a group; `headers[i]` is the one of rank i."""
    callers = {}
    for index in range(group.size):
        callers.setdefault(describe(headers[index]), []).append(group.ranks[index])
    parts = [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} called {text}"
        for text, ranks in callers.items()
    ]
    return f"different calls met on group {group.name}: {'; '.join(parts)}"


def describe_stacks(group, stacks):
    """Text of the callers' stacks (uint8 arrays); None if they were not recorded."""
    if stacks is None:
        return f". Set {DEBUG_ENVIRONMENT_VARIABLE}=1 to see where each was called."
    return "".join(
        f"\n---- rank {group.ranks[index]} called from\n" + stacks[index].tobytes().rstrip(b"\0").decode(errors="replace")
        for index in range(group.size)
    )


def check_matching_splits(group, splits):
    """Refuse an all_to_all in which a rank expects other rows than are sent to it; all ranks reach the same result.

    Args:
        splits (np.ndarray): `[rank, 2, size]`: rows for each rank, rows from each rank.
    """
    if np.array_equal(splits[:, 0], splits[:, 1].T):
        return
    sender, receiver = np.argwhere(splits[:, 0] != splits[:, 1].T)[0]
    raise MismatchError(
        f"different splits met in all_to_all on group {group.name}: rank {group.ranks[sender]} sends "
        f"{splits[sender, 0, receiver]} rows to rank {group.ranks[receiver]}, which expects {splits[receiver, 1, sender]}."
    )


def caller_stack(limit):
    """Stack of the caller (at most `limit` bytes), innermost frame last, without frames of this package's comm."""
    here = os.path.dirname(os.path.abspath(__file__))
    frames = [frame for frame in traceback.extract_stack() if os.path.dirname(os.path.abspath(frame.filename)) != here]
    return "".join(traceback.format_list(frames)).encode()[-limit:]
