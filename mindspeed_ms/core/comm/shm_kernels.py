"""Compiled kernels on shared memory: publish, wait, copy, reduce.

Everything is addressed by integers, so a call costs under a microsecond. Counters are read and written atomically with
acquire and release, and full fences order data against counters: nothing relies on the store
order of x86, so this holds on aarch64 as well. The compiled code is kept in the user's cache directory.

A counter fills a line of `LINE` bytes of its own. Functions that check all ranks return -1 if all are ready, else the
index of the first that is not.
"""

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from mindspeed_ms.core.compiled import compiled, one_process_compiles

LINE = 128  # two cache lines of x86, one or two of aarch64: neighbours are fetched in pairs
BLOCK = 2048  # elements combined at a time, so that partial results stay in the first-level cache
SUM, MAX, MIN, PROD = range(4)
SEQUENCE_WORD = 3  # of a call's header
_ROOM = "comm"


def kernel(function):
    """Decorator: compile without any freedom in floating-point arithmetic."""
    return compiled(function, _ROOM)


@intrinsic
def fence(typing_context):
    """Memory fence: the compiler and the processor move no load or store across it."""

    def generate(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def load(typing_context, address):
    """Atomic load (acquire) of the int64 at an address."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store(typing_context, address, value):
    """Atomic store (release) of an int64 at an address."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store_atomic(arguments[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def copy_bytes(typing_context, destination, source, count):
    """memcpy between two addresses."""

    def generate(context, builder, signature, arguments):
        byte_pointer = ir.IntType(8).as_pointer()
        destination, source, count = arguments
        cgutils.raw_memcpy(
            builder, builder.inttoptr(destination, byte_pointer), builder.inttoptr(source, byte_pointer), count, 1
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def yield_processor(typing_context):
    """Let another process run."""

    def generate(context, builder, signature, arguments):
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.IntType(32), []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def pointer_to(typing_context, address):
    """Address as the pointer that `carray` takes."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@kernel
def full_fence():
    """Memory fence for callers in Python."""
    fence()


@kernel
def read_counter(address):
    """Value of a counter."""
    value = load(address)
    fence()
    return value


@kernel
def write_counter(address, value):
    """Set a counter; a reader of the new value also sees everything written before it."""
    fence()
    store(address, value)
    fence()


@kernel
def wait_all(counters, count, value, spins):
    """Wait until `count` counters have reached `value`, yielding the processor at most `spins` times."""
    index = 0
    for _ in range(spins + 1):
        while index < count and load(counters + index * LINE) >= value:
            index += 1
        if index == count:
            fence()
            return -1
        yield_processor()
    return index


@kernel
def wait_one(counter, value, spins):
    """Wait until one counter has reached `value`; True if it has."""
    for _ in range(spins + 1):
        if load(counter) >= value:
            fence()
            return True
        yield_processor()
    return False


@kernel
def publish(header, template, sequence, destination, data, offset, count, counter, value):
    """Write a call's header (unless its address is 0) and `count` bytes of `data` from `offset` on; then set a counter."""
    if header:
        _write_header(header, template, sequence)
    if count:
        copy_bytes(destination, data.ctypes.data + offset, count)
    fence()
    store(counter, value)
    fence()


@kernel
def publish_strided(header, template, sequence, destination, data, offset, stride, size, count, counter, value):
    """`publish` for `count` pieces of `size` bytes that lie `stride` bytes apart."""
    if header:
        _write_header(header, template, sequence)
    for piece in range(count):
        copy_bytes(destination + piece * size, data.ctypes.data + offset + piece * stride, size)
    fence()
    store(counter, value)
    fence()


@kernel
def _write_header(header, template, sequence):
    words = carray(pointer_to(header), (template.size,), np.int64)
    for word in range(template.size):
        words[word] = template[word]
    words[SEQUENCE_WORD] = sequence


@kernel
def arrivals(counters, count, value, spins, headers, stride, words, mine):
    """`wait_all`, then a comparison of headers unless `headers` is 0: -2 - r if rank r's is the first unlike `mine`'s."""
    index = wait_all(counters, count, value, spins)
    if index >= 0 or headers == 0:
        return index
    own = carray(pointer_to(headers + mine * stride), (words,), np.int64)
    for rank in range(count):
        other = carray(pointer_to(headers + rank * stride), (words,), np.int64)
        for word in range(words):
            if own[word] != other[word]:
                return -2 - rank
    return -1


@kernel
def header_matches(header, template, sequence, words):
    """True if the header at an address equals that of this call."""
    other = carray(pointer_to(header), (words,), np.int64)
    for word in range(words):
        if other[word] != (sequence if word == SEQUENCE_WORD else template[word]):
            return False
    return True


@kernel
def gather(out, offset, out_stride, source, source_stride, count, size):
    """Copy `size` bytes from each of `count` places, `source_stride` apart, into `out`."""
    for rank in range(count):
        copy_bytes(out.ctypes.data + offset + rank * out_stride, source + rank * source_stride, size)


@kernel
def gather_parts(out, offset, source, stride, count, part, total):
    """Join `count` parts of `part` bytes (the last ones may be short or empty) of `total` bytes, each from its own place."""
    for rank in range(count):
        start = min(rank * part, total)
        end = min(start + part, total)
        copy_bytes(out.ctypes.data + offset + start, source + rank * stride + start, end - start)


@kernel
def longest_exchange(splits, row):
    """Most bytes that a rank sends by `splits` `[rank, to or from, other]`; -1 if two ranks disagree about rows."""
    size = splits.shape[0]
    longest = 0
    for rank in range(size):
        total = 0
        for other in range(size):
            total += splits[rank, 0, other] * row
            if splits[rank, 0, other] != splits[other, 1, rank]:
                return -1
        longest = max(longest, total)
    return longest


@kernel
def take_exchanged(out, splits, mine, row, start, window, small, small_stride, small_bytes, large, large_stride):
    """Copy the data for rank `mine` out of bytes `start` to `start + window` of every rank's data."""
    size = splits.shape[0]
    place = 0
    for rank in range(size):
        first = 0
        total = 0
        for other in range(size):
            length = splits[rank, 0, other] * row
            total += length
            if other < mine:
                first += length
        length = splits[rank, 0, mine] * row
        begin = max(first, start)
        end = min(first + length, start + window)
        if end > begin:
            source = small + rank * small_stride if total <= small_bytes else large + rank * large_stride
            copy_bytes(out.ctypes.data + place + begin - first, source + begin - start, end - begin)
        place += length


@kernel
def combine(out, source, stride, count, op):
    """out[i] = op over ranks r, in rank order, of the i-th element at `source + r * stride`; the type is that of `out`."""
    for start in range(0, out.size, BLOCK):
        length = min(BLOCK, out.size - start)
        block = out[start : start + length]
        offset = start * out.itemsize
        first = carray(pointer_to(source + offset), (length,), out.dtype)
        for i in range(length):
            block[i] = first[i]
        for rank in range(1, count):
            other = carray(pointer_to(source + rank * stride + offset), (length,), out.dtype)
            if op == SUM:
                for i in range(length):
                    block[i] = block[i] + other[i]
            elif op == MAX:
                for i in range(length):
                    block[i] = block[i] if (block[i] >= other[i] or block[i] != block[i]) else other[i]
            elif op == MIN:
                for i in range(length):
                    block[i] = block[i] if (block[i] <= other[i] or block[i] != block[i]) else other[i]
            else:
                for i in range(length):
                    block[i] = block[i] * other[i]


@kernel
def _widen(destination, source, length):
    """Convert bfloat16 bits to float32 bits."""
    for i in range(length):
        destination[i] = np.uint32(source[i]) << np.uint32(16)


@kernel
def combine_bfloat16(out, source, stride, count, op):
    """`combine` for bfloat16 bits (`out` uint16): accumulated in float32, rounded once to nearest even."""
    total = np.empty(BLOCK, np.float32)
    addend = np.empty(BLOCK, np.float32)
    total_bits = total.view(np.uint32)
    addend_bits = addend.view(np.uint32)
    for start in range(0, out.size, BLOCK):
        length = min(BLOCK, out.size - start)
        offset = start * 2
        _widen(total_bits, carray(pointer_to(source + offset), (length,), np.uint16), length)
        for rank in range(1, count):
            _widen(addend_bits, carray(pointer_to(source + rank * stride + offset), (length,), np.uint16), length)
            if op == SUM:
                for i in range(length):
                    total[i] = total[i] + addend[i]
            elif op == MAX:
                for i in range(length):
                    total[i] = total[i] if (total[i] >= addend[i] or total[i] != total[i]) else addend[i]
            elif op == MIN:
                for i in range(length):
                    total[i] = total[i] if (total[i] <= addend[i] or total[i] != total[i]) else addend[i]
            else:
                for i in range(length):
                    total[i] = total[i] * addend[i]
        for i in range(length):
            bits = total_bits[i]
            if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
                out[start + i] = np.uint16((bits >> np.uint32(16)) | np.uint32(0x40))
            else:
                even = (bits >> np.uint32(16)) & np.uint32(1)
                out[start + i] = np.uint16((bits + np.uint32(0x7FFF) + even) >> np.uint32(16))


def warm_up():
    """Compile (or load from the cache) the kernels of every job, one process at a time, so that the others find them cached."""
    words = np.zeros(4 * LINE, np.int64)
    data = words.view(np.uint8)
    base = words.ctypes.data
    splits = np.zeros((1, 2, 1), np.int64)
    with one_process_compiles(_ROOM, gather.__name__):
        full_fence()
        read_counter(base)
        write_counter(base, 0)
        wait_all(base, 1, 0, 0)
        wait_one(base, 0, 0)
        publish(0, words, 0, base, data, 0, 0, base, 0)
        publish_strided(0, words, 0, base, data, 0, 0, 0, 0, base, 0)
        arrivals(base, 1, 0, 0, 0, 8, 1, 0)
        header_matches(base, words, 0, 1)
        gather(data, 0, 8, base, 8, 0, 0)
        gather_parts(data, 0, base, 8, 1, 0, 0)
        longest_exchange(splits, 1)
        take_exchanged(data, splits, 0, 1, 0, 0, base, 8, 8, base, 8)
        combine(np.zeros(1, np.float32), base, 8, 1, SUM)
