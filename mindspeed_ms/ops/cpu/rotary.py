"""CPU forms of rotary position embedding and of the split of the fused qkv linear's output."""

import numpy as np

from mindspeed_ms.core import storage
from mindspeed_ms.core.autograd import Function
from mindspeed_ms.ops.cpu import threads
from mindspeed_ms.ops.cpu.arrays import bits_of, empty, float32_of, new_like, tensor_of, tensor_of_bits
from mindspeed_ms.ops.cpu.kernels import movement


class _Rotary(Function):
    @staticmethod
    def forward(ctx, t, cos, sin, interleaved):
        ctx.angles, ctx.interleaved = (_angles_of(cos), _angles_of(sin)), interleaved
        return _rotate(t, *ctx.angles, interleaved)

    @staticmethod
    def backward(ctx, output_grad):
        cos, sin = ctx.angles
        return _rotate(output_grad, cos, _inverse(sin, ctx.interleaved), ctx.interleaved), None, None, None


def _angles_of(table):
    """Array [s, b or 1, rot] of cos or sin [s, b or 1, 1, rot]."""
    array = float32_of(table)
    return array.reshape(array.shape[0], array.shape[1], array.shape[3])


def _inverse(sin, interleaved):
    """sin of the inverse rotation: what an element takes of its partner is what the partner took of it."""
    shape = sin.shape[2] // 2, 2
    pairs = sin.reshape(*sin.shape[:2], *(shape if interleaved else shape[::-1]))
    return np.negative(np.flip(pairs, 3 if interleaved else 2)).reshape(sin.shape)


def _rotate(t, cos, sin, interleaved):
    values = float32_of(t)
    output = empty(values.shape)
    tokens = values.shape[0] * values.shape[1]
    threads.run(movement.rotary, tokens, values.size, values, cos, sin, interleaved, output)
    return tensor_of(output, t.dtype)


def apply_rotary(t, cos, sin, interleaved=False, fused=True):
    """See `ops.apply_rotary`."""
    del fused
    if t.ndim != 4:
        raise ValueError(f"apply_rotary got t {t.shape}: expected [s, b, n, d].")
    _check_tables("apply_rotary", cos, sin, *t.shape[:2], t.shape[3])
    return _Rotary.apply(t, cos, sin, bool(interleaved))


def _check_tables(name, cos, sin, length, batch, size):
    shape = cos.shape
    if (
        len(shape) != 4
        or shape != sin.shape
        or shape[0] != length
        or shape[2] != 1
        or shape[1] not in (1, batch)
        or shape[3] > size
        or shape[3] % 2
    ):
        raise ValueError(
            f"{name} got cos {shape} and sin {sin.shape} for heads [{length}, {batch}, n, {size}]: expected twice "
            "[s, b or 1, 1, rot] with an even rot of at most d."
        )


class _SplitAndRotate(Function):
    @staticmethod
    def forward(ctx, mixed, cos, sin, groups, queries_per_group, head_size, interleaved):
        ctx.angles, ctx.interleaved, ctx.shape = (_angles_of(cos), _angles_of(sin)), interleaved, mixed.shape
        s, b = mixed.shape[:2]
        source = float32_of(mixed).reshape(s, b, groups, queries_per_group + 2, head_size)
        query, key, value = (empty((s, b, groups, count, head_size)) for count in (queries_per_group, 1, 1))
        parts = query, key, value[:, :, :, 0]
        threads.run(movement.split_and_rotate, s * b, source.size, source, *ctx.angles, interleaved, *parts)
        return tuple(tensor_of(part.reshape(s, b, -1, head_size), mixed.dtype) for part in parts)

    @staticmethod
    def backward(ctx, query_grad, key_grad, value_grad):
        query, key, value = (float32_of(grad) for grad in (query_grad, key_grad, value_grad))
        s, b, groups, size = value.shape
        query, key = (heads.reshape(s, b, groups, -1, size) for heads in (query, key))
        cos, sin = ctx.angles
        mixed = empty((s, b, groups, query.shape[3] + 2, size))
        tables = cos, _inverse(sin, ctx.interleaved), ctx.interleaved
        threads.run(movement.join_and_rotate, s * b, mixed.size, query, key, value, *tables, mixed)
        return tensor_of(mixed.reshape(ctx.shape), query_grad.dtype), *[None] * 6


class _SplitQueryKeyValue(Function):
    @staticmethod
    def forward(ctx, mixed, groups, queries_per_group, head_size):
        source = bits_of(mixed)
        s, b = mixed.shape[:2]
        parts = [
            new_like(source, (s * b, groups, queries_per_group * head_size)),
            new_like(source, (s * b, groups, head_size)),
            new_like(source, (s * b, groups, head_size)),
        ]
        threads.run(movement.split_query_key_value, s * b, source.size, source.reshape(s * b, groups, -1), *parts)
        ctx.shape = mixed.shape
        return tuple(tensor_of_bits(part.reshape(s, b, -1, head_size), mixed.dtype) for part in parts)

    @staticmethod
    def backward(ctx, query_grad, key_grad, value_grad):
        query, key, value = bits_of(query_grad), bits_of(key_grad), bits_of(value_grad)
        s, b, groups, size = key.shape
        mixed = new_like(query, ctx.shape)
        threads.run(
            movement.join_query_key_value,
            s * b,
            mixed.size,
            query.reshape(s * b, groups, -1),
            key.reshape(s * b, groups, size),
            value.reshape(s * b, groups, size),
            mixed.reshape(s * b, groups, -1),
        )
        return tensor_of_bits(mixed, query_grad.dtype), None, None, None


def split_query_key_value(mixed, groups, queries_per_group, head_size, rotary=None, fused=True):
    """See `ops.split_query_key_value`."""
    del fused
    width = groups * (queries_per_group + 2) * head_size
    if mixed.ndim != 3 or mixed.shape[2] != width:
        raise ValueError(
            f"split_query_key_value got {mixed.shape}: expected [s, b, {width}] for {groups} groups of "
            f"{queries_per_group} queries, a key and a value of size {head_size}."
        )
    if rotary is None:
        return _SplitQueryKeyValue.apply(mixed, groups, queries_per_group, head_size)
    cos, sin, interleaved = rotary
    _check_tables("split_query_key_value", cos, sin, *mixed.shape[:2], head_size)
    return _SplitAndRotate.apply(mixed, cos, sin, groups, queries_per_group, head_size, bool(interleaved))


def rotary_position_embedding(x, cos, sin, mode):
    """See `ops.npu_rotary_position_embedding`: every vector becomes a token with its own angles."""
    tables = []
    for table in (cos, sin):
        wide = np.ascontiguousarray(np.broadcast_to(float32_of(table), x.shape))
        tables.append(storage.from_array(wide.reshape(-1, 1, 1, x.shape[-1])))
    return apply_rotary(x.reshape(-1, 1, 1, x.shape[-1]), *tables, bool(mode)).reshape(x.shape)
