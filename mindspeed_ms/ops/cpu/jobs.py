"""Jobs of kernels on several threads without the interpreter lock: a board that announces the current job to helpers.

The thread that starts a job leaves the kernel's arguments on its stack and writes their address and that of the machine code
that takes pieces on the board. Helpers that see the job's number change take pieces too. Python has no part in it, so a helper
begins within a microsecond, and the starter waits only for pieces that a helper has begun.
"""

import functools
import platform

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mindspeed_ms.core.compiled import compiled
from mindspeed_ms.ops.cpu.vectors import prefetch

_NUMBER, _OPEN, _INSIDE, _NEXT, _NEXT_OF_HELPERS, _BUSY, _SOON = range(0, 56, 8)  # each on a cache line of its own
_CODE, _ARGUMENTS, _MIDDLE, _TOTAL, _PIECE, _FAILED = range(56, 62)
_SOON_STOP = _SOON + 1
_SIZE = 64
_SOON_BYTES = 2048
_YIELD_EVERY = 64
_INT = ir.IntType(64)
_CODE_TYPE = ir.FunctionType(_INT, [_INT] * 4)
_yield_processor = types.ExternalFunction("sched_yield", types.int32())


def new_board():
    """Board of a group of threads, int64 array.

    Places: number of the newest job; number of the job that helpers may enter, 0 for none; helpers inside; start of the
    starter's next piece, and of the helpers'; threads that want to start a job; memory that is read soon, from and to;
    addresses of the machine code and of the arguments; where the helpers' pieces begin; total; piece; a piece failed.
    """
    return np.zeros(_SIZE, np.int64)


def announce(board, address, size):
    """Say that a job soon reads `size` bytes from an address on: its helpers, who begin with the second half, load that into
    their caches while they wait. A guess that proves wrong does no harm."""
    board[_SOON_STOP] = 0
    board[_SOON] = address + size // 2
    board[_SOON_STOP] = address + size


@intrinsic
def _address(typing_context, board, index):
    """Address of board[index]."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(builder.gep(data, [arguments[1]]), _INT)

    return types.int64(board, types.int64), generate


def _pointer(builder, address):
    return builder.inttoptr(address, _INT.as_pointer())


@intrinsic
def _add(typing_context, address, number):
    """Atomic addition to the int64 at an address; returns the value before. All threads see one order."""

    def generate(context, builder, signature, arguments):
        return builder.atomic_rmw("add", _pointer(builder, arguments[0]), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _read(typing_context, address):
    """Atomic read of the int64 at an address."""

    def generate(context, builder, signature, arguments):
        return builder.load_atomic(_pointer(builder, arguments[0]), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def _write(typing_context, address, value):
    """Atomic write of the int64 at an address; returns the value before."""

    def generate(context, builder, signature, arguments):
        return builder.atomic_rmw("xchg", _pointer(builder, arguments[0]), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _counter(typing_context):
    """Address of an int64 0 on the stack of the calling function."""

    def generate(context, builder, signature, arguments):
        slot = cgutils.alloca_once(builder, _INT)
        builder.store(_INT(0), slot)
        return builder.ptrtoint(slot, _INT)

    return types.int64(), generate


@intrinsic
def _pause(typing_context):
    """Let the other thread of the processor core work: a loop that only looks would take half of its time."""

    def generate(context, builder, signature, arguments):
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _take(typing_context, code, counter, total, piece, arguments):
    """Take pieces until the counter at an address has reached `total`, by the machine code at an address; 1 if one failed."""

    def generate(context, builder, signature, values):
        return builder.call(builder.inttoptr(values[0], _CODE_TYPE.as_pointer()), values[1:])

    return types.int64(*[types.int64] * 5), generate


def _function(function):
    return functools.partial(compiled, room="jobs", nogil=True, error_model="numpy")(function)


@_function
def run(board, code, arguments, total, piece):
    """Run a job with the helpers of a board, alone while another thread has one there; 1 if a piece failed, else 0."""
    if piece >= total:
        return _take(code, _counter(), total, piece, arguments)
    busy, is_open, inside = _address(board, _BUSY), _address(board, _OPEN), _address(board, _INSIDE)
    if _add(busy, 1):
        _add(busy, -1)
        return _take(code, _counter(), total, total, arguments)
    middle = (total + piece) // (2 * piece) * piece
    board[_CODE], board[_ARGUMENTS], board[_MIDDLE], board[_TOTAL], board[_PIECE] = code, arguments, middle, total, piece
    board[_NEXT], board[_NEXT_OF_HELPERS], board[_FAILED], board[_SOON_STOP] = 0, middle, 0, 0
    number = board[_NUMBER] + 1
    _write(is_open, number)
    _write(_address(board, _NUMBER), number)
    failed = _take(code, _address(board, _NEXT), middle, piece, arguments)
    failed |= _take(code, _address(board, _NEXT_OF_HELPERS), total, piece, arguments)
    _write(is_open, 0)
    rounds = 0
    while _read(inside):
        _pause()
        rounds += 1
        if rounds % _YIELD_EVERY == 0:
            _yield_processor()
    failed |= _read(_address(board, _FAILED))
    _add(busy, -1)
    return failed


@_function
def help_until_idle(board, rounds):
    """Take pieces of the jobs of a board, the current one first, until none was announced for some rounds of looking."""
    number, inside, seen, idle = _address(board, _NUMBER), _address(board, _INSIDE), 0, 0
    soon, soon_stop = _address(board, _SOON), _address(board, _SOON_STOP)
    while idle < rounds:
        current = _read(number)
        if current == seen:
            if _read(soon) < _read(soon_stop):
                prefetch(_add(soon, _SOON_BYTES), _SOON_BYTES)
                continue
            _pause()
            idle += 1
            if idle % _YIELD_EVERY == 0:
                _yield_processor()
            continue
        seen, idle = current, 0
        _add(inside, 1)
        # from here on the starter waits, so what the board says belongs to an open job
        if _read(_address(board, _OPEN)) == current:
            code, arguments, piece = board[_CODE], board[_ARGUMENTS], board[_PIECE]
            failed = _take(code, _address(board, _NEXT_OF_HELPERS), board[_TOTAL], piece, arguments)
            failed |= _take(code, _address(board, _NEXT), board[_MIDDLE], piece, arguments)
            if failed:
                _write(_address(board, _FAILED), 1)
        _add(inside, -1)


_PIECES = """def {name}(counter, total, piece, {arguments}):
    start = advance_(counter, piece)
    while start < total:
        body_(start, min(start + piece, total), {arguments})
        start = advance_(counter, piece)
"""


def shared_code(function, options):
    """Intrinsic `arguments -> (code, place)`: addresses of machine code that takes pieces, and of the arguments (a tuple).

    Args:
        function: Python function of `start, stop, ...`.
        options (dict): of `numba.njit`.
    """
    code = function.__code__
    names = ", ".join(code.co_varnames[2 : code.co_argcount])
    body = numba.njit(inline="always")(function)  # merged before compilation, which would otherwise happen twice
    namespace = {"body_": body, "advance_": _add}  # no names of a kernel
    exec(compile(_PIECES.format(name=function.__name__, arguments=names), code.co_filename, "exec"), namespace)
    pieces = numba.njit(**options)(namespace[function.__name__])

    @intrinsic
    def share(typing_context, arguments):
        counts = (types.int64,) * 3
        pieces_signature = typing_context.resolve_function_type(types.Dispatcher(pieces), (*counts, *arguments.types), {})

        def generate(context, builder, signature, values):
            slot = cgutils.alloca_once_value(builder, values[0])
            entry = _entry(context, builder, pieces.overloads[pieces_signature.args], pieces_signature, slot.type)
            addresses = [builder.ptrtoint(pointer, _INT) for pointer in (entry, slot)]
            return context.make_tuple(builder, signature.return_type, addresses)

        return types.UniTuple(types.int64, 2)(arguments), generate

    return share


def _entry(context, builder, result, signature, place_type):
    """Function of this module `(counter, total, piece, place of the arguments) -> 1 if a piece failed`."""
    context.active_code_library.add_linking_library(result.library)
    name = builder.module.get_unique_name(f"{builder.function.name}.pieces")
    entry = ir.Function(builder.module, _CODE_TYPE, name)
    entry.linkage = "internal"
    inner = ir.IRBuilder(entry.append_basic_block("entry"))
    *counts, place = entry.args
    arguments = cgutils.unpack_tuple(inner, inner.load(inner.inttoptr(place, place_type)), len(signature.args) - 3)
    status, _ = context.call_internal_no_propagate(inner, result.fndesc, signature, [*counts, *arguments])
    inner.ret(inner.zext(status.is_error, _INT))
    return entry
