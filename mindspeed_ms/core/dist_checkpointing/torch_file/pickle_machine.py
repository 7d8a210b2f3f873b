"""Executes the opcodes of a pickle on plain data; what a name, a call or a state means is up to `unpickler`.

Python's own Unpickler cannot be restricted far enough: it allocates what a length or a memo index says before it looks at the
data, and BUILD sets attributes of whatever it finds, classes included. Here lengths are compared with the bytes that are
left, and every constructor is one of ours.

Source of the format: Python's `pickletools`.
"""

import struct

import numpy as np

from mindspeed_ms.core.dist_checkpointing.errors import CheckpointError
from mindspeed_ms.core.dist_checkpointing.torch_file.objects import Global, Opaque, shown

_LONGEST_INTEGER = 1024
_LONGEST_LINE, _LONGEST_STRING, _LONGEST_PICKLE = 1 << 16, 1 << 28, 1 << 30
_DEEPEST_KEY, _WIDEST_KEY = 3, 32
_KEYS = (str, bytes, int, float, type(None), Global, Opaque, np.generic)


class PickleMachine:
    """Runs one pickle.

    Args:
        path (str): for messages.
        data (bytes or mmap): holds the pickle.
        position (int): where it starts; afterwards where it ended.
        objects: has `find(module, name)`, `call(callee, arguments)`, `new(cls, arguments)`, `build(object, state)` and
            `persistent(identity)`, see `unpickler`.
    """

    def __init__(self, path, data, objects, position=0):
        self.path, self.data, self.objects = path, data, objects
        self.start = self.position = position
        self.stack, self.marks, self.memo = [], [], {}

    def run(self):
        """Object that the pickle describes.

        Raises:
            CheckpointError: damaged, or something that is not allowed.
        """
        data = self.data
        try:
            while (opcode := data[self.position]) != 0x2E:  # STOP
                action = _ACTIONS.get(opcode)
                if action is None:
                    raise ValueError(f"it has the unknown opcode {opcode:#04x} at byte {self.position - self.start}")
                self.position += 1
                action(self)
            self.position += 1
            if self.marks or len(self.stack) != 1:
                raise ValueError(f"it ends with {len(self.stack)} objects and {len(self.marks)} marks instead of one object")
            return self.stack[0]
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, struct.error) as error:
            early = isinstance(error, IndexError) and self.position >= len(data)
            reason = "it ends early" if early else str(error) if type(error) is ValueError else repr(error)
            raise CheckpointError(f"{self.path}: its pickle is damaged: {shown(reason)}.") from error

    @property
    def consumed(self):
        """Bytes that were read."""
        return self.position - self.start

    def take(self, count):
        """Next `count` bytes."""
        start, self.position = self.position, self.position + count
        if count > _LONGEST_STRING or self.consumed > _LONGEST_PICKLE or self.position > len(self.data):
            raise ValueError(f"it says {count} bytes at byte {start - self.start}, where {len(self.data) - start} are left")
        return self.data[start : self.position]

    def line(self):
        """Next bytes up to the end of the line."""
        start, end = self.position, self.data.find(b"\n", self.position, self.position + _LONGEST_LINE)
        if end < 0:
            raise ValueError(f"it has no end of the line that starts at byte {start - self.start}")
        self.position = end + 1
        return self.data[start:end]

    def unsigned(self, count):
        """Next `count` bytes as a number."""
        return int.from_bytes(self.take(count), "little")

    def since_mark(self):
        """Objects on the stack since the last mark, removed from it."""
        objects, self.stack = self.stack, self.marks.pop()
        return objects

    def pop(self, count):
        """Last `count` objects of the stack, removed from it."""
        if len(self.stack) < count:
            raise ValueError("its stack is empty")
        objects = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return objects

    def set_items(self, pairs):
        """Put [key, value, key, value, ...] into the dict on top of the stack."""
        target = self.stack[-1]
        if not isinstance(target, dict) or len(pairs) % 2:
            raise ValueError(f"it puts items into a {type(target).__name__}")
        for key in pairs[::2]:
            check_key(key)
        for key, value in zip(pairs[::2], pairs[1::2]):
            target[key] = value

    def append(self, objects):
        """Append to the list on top of the stack."""
        if type(self.stack[-1]) is not list:
            raise ValueError(f"it appends to a {type(self.stack[-1]).__name__}")
        self.stack[-1].extend(objects)

    def add(self, objects):
        """Add to the set on top of the stack."""
        if type(self.stack[-1]) is not set:
            raise ValueError(f"it adds to a {type(self.stack[-1]).__name__}")
        for key in objects:
            check_key(key)
        self.stack[-1].update(objects)


def check_key(key, depth=0):
    """ValueError if an object is no key of a dict whose hash is quickly counted."""
    if isinstance(key, tuple):
        if depth == _DEEPEST_KEY or len(key) > _WIDEST_KEY:
            raise ValueError("it has a key of nested tuples")
        for part in key:
            check_key(part, depth + 1)
    elif not isinstance(key, _KEYS):
        raise ValueError(f"it has a key of type {type(key).__name__}")


_ACTIONS = {}


def _opcode(*codes):
    def register(action):
        for code in codes:
            _ACTIONS[ord(code)] = action
        return action

    return register


def _pushes(code, value):
    """Opcode that pushes value(machine)."""

    def push(machine):
        new = value(machine)  # may replace machine.stack
        machine.stack.append(new)

    _ACTIONS[ord(code)] = push


def _unpacks(code, form):
    parsed = struct.Struct(form)
    _pushes(code, lambda machine: parsed.unpack(machine.take(parsed.size))[0])


def _counted(code, count_bytes, convert):
    _pushes(code, lambda machine: convert(machine.take(machine.unsigned(count_bytes))))


def _text(data):
    return data.decode("utf-8", "surrogatepass")


def _native_text(data):
    """str of Python 2."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _quoted(data):
    if len(data) < 2 or data[:1] != data[-1:] or data[:1] not in b"\"'" or b"\\" in data:
        raise ValueError("it has a damaged string")
    return _native_text(data[1:-1])


def _integer(machine, count):
    if count > _LONGEST_INTEGER:
        raise ValueError(f"it has an integer of {count} bytes")
    return int.from_bytes(machine.take(count), "little", signed=True)


def _integer_text(data):
    if len(data) > _LONGEST_INTEGER:
        raise ValueError(f"it has an integer of {len(data)} digits")
    return data == b"01" if data in (b"00", b"01") else int(data.rstrip(b"L"))


_pushes("N", lambda machine: None)
_pushes("\x88", lambda machine: True)
_pushes("\x89", lambda machine: False)
_pushes("]", lambda machine: [])
_pushes("}", lambda machine: {})
_pushes(")", lambda machine: ())
_pushes("\x8f", lambda machine: set())
_unpacks("J", "<i")
_unpacks("K", "<B")
_unpacks("M", "<H")
_unpacks("G", ">d")
_pushes("\x8a", lambda machine: _integer(machine, machine.unsigned(1)))
_pushes("\x8b", lambda machine: _integer(machine, machine.unsigned(4)))
_pushes("I", lambda machine: _integer_text(machine.line()))
_pushes("L", lambda machine: _integer_text(machine.line()))
_pushes("F", lambda machine: float(machine.line()))
_pushes("S", lambda machine: _quoted(machine.line()))
_pushes("V", lambda machine: machine.line().decode("raw-unicode-escape"))
_counted("T", 4, _native_text)
_counted("U", 1, _native_text)
_counted("X", 4, _text)
_counted("\x8c", 1, _text)
_counted("\x8d", 8, _text)
_counted("B", 4, bytes)
_counted("C", 1, bytes)
_counted("\x8e", 8, bytes)
_counted("\x96", 8, bytearray)
_pushes("t", lambda machine: tuple(machine.since_mark()))
_pushes("l", lambda machine: machine.since_mark())
_pushes("\x85", lambda machine: tuple(machine.pop(1)))
_pushes("\x86", lambda machine: tuple(machine.pop(2)))
_pushes("\x87", lambda machine: tuple(machine.pop(3)))
_pushes("2", lambda machine: machine.stack[-1])
_pushes("g", lambda machine: machine.memo[int(machine.line())])
_pushes("h", lambda machine: machine.memo[machine.unsigned(1)])
_pushes("j", lambda machine: machine.memo[machine.unsigned(4)])
_pushes("Q", lambda machine: machine.objects.persistent(*machine.pop(1)))
_pushes("R", lambda machine: machine.objects.call(*machine.pop(2)))
_pushes("\x81", lambda machine: machine.objects.new(*machine.pop(2)))


@_opcode("\x80")
def _protocol(machine):
    if machine.unsigned(1) > 5:
        raise ValueError("it has an unknown protocol")


@_opcode("\x95")
def _frame(machine):
    if machine.unsigned(8) > len(machine.data) - machine.position:
        raise ValueError("it has a frame longer than the file")


@_opcode("(")
def _mark(machine):
    machine.marks.append(machine.stack)
    machine.stack = []


@_opcode("0")
def _pop(machine):
    if machine.stack:
        machine.stack.pop()
    else:
        machine.since_mark()


@_opcode("1")
def _pop_mark(machine):
    machine.since_mark()


@_opcode("p")
def _put(machine):
    machine.memo[int(machine.line())] = machine.stack[-1]


@_opcode("q")
def _put1(machine):
    machine.memo[machine.unsigned(1)] = machine.stack[-1]


@_opcode("r")
def _put4(machine):
    machine.memo[machine.unsigned(4)] = machine.stack[-1]


@_opcode("\x94")
def _memoize(machine):
    machine.memo[len(machine.memo)] = machine.stack[-1]


@_opcode("d")
def _dict(machine):
    pairs = machine.since_mark()
    machine.stack.append({})
    machine.set_items(pairs)


@_opcode("s")
def _set_item(machine):
    machine.set_items(machine.pop(2))


@_opcode("u")
def _set_items(machine):
    machine.set_items(machine.since_mark())


@_opcode("a")
def _append(machine):
    machine.append(machine.pop(1))


@_opcode("e")
def _appends(machine):
    machine.append(machine.since_mark())


@_opcode("\x90")
def _add_items(machine):
    machine.add(machine.since_mark())


@_opcode("\x91")
def _frozen_set(machine):
    items = machine.since_mark()
    machine.stack.append(set())
    machine.add(items)
    machine.stack[-1] = frozenset(machine.stack[-1])


@_opcode("c")
def _global(machine):
    module, name = machine.line().decode(), machine.line().decode()
    machine.stack.append(machine.objects.find(module, name))


@_opcode("\x93")
def _stack_global(machine):
    module, name = machine.pop(2)
    if not isinstance(module, str) or not isinstance(name, str):
        raise ValueError("it names a class without a name")
    machine.stack.append(machine.objects.find(module, name))


@_opcode("i")
def _instance(machine):
    module, name = machine.line().decode(), machine.line().decode()
    arguments = tuple(machine.since_mark())
    machine.stack.append(machine.objects.call(machine.objects.find(module, name), arguments))


@_opcode("o")
def _object(machine):
    callee, *arguments = machine.since_mark()
    machine.stack.append(machine.objects.call(callee, tuple(arguments)))


@_opcode("\x92")
def _new_with_keywords(machine):
    cls, arguments, keywords = machine.pop(3)
    if keywords != {}:
        raise ValueError(f"it makes {cls} with keywords")
    machine.stack.append(machine.objects.new(cls, arguments))


@_opcode("b")
def _build(machine):
    (state,) = machine.pop(1)
    machine.objects.build(machine.stack[-1], state)
