"""CPU forms of a mixture of experts: products by BLAS, each expert's rows cut into tiles of columns; numpy for the router."""

import mindspore as ms
import numpy as np

from mindspeed_ms.core import storage
from mindspeed_ms.core.autograd import Function
from mindspeed_ms.ops import checks
from mindspeed_ms.ops.cpu import threads
from mindspeed_ms.ops.cpu.arrays import bits_of, empty, float32_of, integers_of, new_like, rows_of, tensor_of, tensor_of_bits
from mindspeed_ms.ops.cpu.blas import sgemm_address
from mindspeed_ms.ops.cpu.kernels import experts as kernels
from mindspeed_ms.ops.cpu.kernels import movement

_NARROW = 128
"""Fewer columns than this are not worth a tile: each tile packs the other operand anew."""
_FEW = 16
"""Up to so many largest elements are found by insertion."""


def _starts(counts):
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def _run(kernel, starts, columns, work, *arguments):
    """Run a kernel over the tiles of a product whose result has `columns` columns; `arguments` before and after `starts`."""
    rows, largest = int(starts[-1]), int(np.diff(starts).max(initial=0))
    # no tile has more than half of a thread's share of the work, so that an expert with most rows keeps all busy
    wanted = -(-2 * threads.thread_count() * largest // rows) if rows else 1
    parts = max(1, min(wanted, columns // _NARROW)) if threads.thread_count() > 1 else 1
    tiles = parts * (len(starts) - 1)
    before, after = arguments
    threads.run(kernel, tiles, work, sgemm_address(), *before, starts, parts, *after, pieces_per_thread=tiles)


def grouped_linear_forward(x, weight, counts):
    """See `ops.grouped_linear_forward`."""
    checks.check_grouped_linear(x, weight, counts)
    y = empty((x.shape[0], weight.shape[2]))
    values, weights = float32_of(x), float32_of(weight)
    _run(kernels.grouped_forward, _starts(counts), y.shape[1], y.size * x.shape[1], (values, weights), (y,))
    return tensor_of(y, x.dtype)


def grouped_linear_input_grad(output_grad, weight, counts):
    """See `ops.grouped_linear_input_grad`."""
    result = empty((output_grad.shape[0], weight.shape[1]))
    g, weights = float32_of(output_grad), float32_of(weight)
    _run(kernels.grouped_input_grad, _starts(counts), result.shape[1], result.size * g.shape[1], (g, weights), (result,))
    return tensor_of(result, output_grad.dtype)


def grouped_linear_weight_grad(output_grad, x, counts, accumulate_into=None, overwrite=False):
    """See `ops.grouped_linear_weight_grad`."""
    g, values = float32_of(output_grad), float32_of(x)
    if accumulate_into is not None and accumulate_into.dtype == ms.float32:
        # BLAS adds while it multiplies, which saves two passes over the gradient buffer
        _weight_grad(g, values, counts, 0.0 if overwrite else 1.0, storage.as_array(accumulate_into))
        return accumulate_into
    result = empty((len(counts), values.shape[1], g.shape[1]))
    _weight_grad(g, values, counts, 0.0, result)
    if accumulate_into is None:
        return tensor_of(result, x.dtype)
    result = result if overwrite else result + float32_of(accumulate_into)
    storage.write(accumulate_into, tensor_of(result, accumulate_into.dtype))
    return accumulate_into


def _weight_grad(g, values, counts, keep, target):
    work = g.size * values.shape[1] + target.size
    _run(kernels.grouped_weight_grad, _starts(counts), values.shape[1], work, (g, values), (keep, target))


class _GroupedLinear(Function):
    @staticmethod
    def forward(ctx, x, weight, counts):
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        return grouped_linear_forward(x, weight, counts)

    @staticmethod
    def backward(ctx, output_grad):
        x, weight = ctx.saved_tensors
        return (
            grouped_linear_input_grad(output_grad, weight, ctx.counts) if ctx.needs_input_grad[0] else None,
            grouped_linear_weight_grad(output_grad, x, ctx.counts) if ctx.needs_input_grad[1] else None,
            None,
        )


def grouped_linear(x, weight, counts):
    """See `ops.grouped_linear`."""
    return _GroupedLinear.apply(x, weight, np.asarray(counts, np.int64))


def expert_order(routing_map):
    """See `ops.expert_order`."""
    chosen = storage.read_array(routing_map).T != 0
    return storage.from_array(np.nonzero(chosen)[1].astype(np.int32)), np.count_nonzero(chosen, axis=1).astype(np.int64)


class _Permute(Function):
    @staticmethod
    def forward(ctx, x, order):
        rows, ctx.order, ctx.shape, ctx.dtype = bits_of(x), integers_of(order), x.shape, x.dtype
        output = new_like(rows, (ctx.order.size, x.shape[1]))
        threads.run(movement.gather_rows, ctx.order.size, output.size, rows, ctx.order, 0, output)
        return tensor_of_bits(output, x.dtype)

    @staticmethod
    def backward(ctx, output_grad):
        return tensor_of(_added(float32_of(output_grad), ctx.order, ctx.shape), ctx.dtype), None


def _added(rows, order, shape):
    """Rows added up by token: float32 array `shape`."""
    result = empty(shape)
    threads.run(movement.scatter_rows, shape[1], rows.size + result.size, rows, order, 0, result)
    return result


def permute(x, order):
    """See `ops.permute`."""
    return _Permute.apply(x, order)


class _Unpermute(Function):
    @staticmethod
    def forward(ctx, x, order, tokens, probs):
        values, ctx.order, ctx.dtype = float32_of(x), integers_of(order), x.dtype
        shape = tokens, x.shape[1]
        ctx.save_for_backward(*([] if probs is None else [x, probs]))
        if probs is None:
            return tensor_of(_added(values, ctx.order, shape), x.dtype)
        output = empty(shape)
        work = 2 * values.size + output.size
        threads.run(kernels.scatter_weighted_rows, shape[1], work, values, ctx.order, float32_of(probs), output)
        return tensor_of(output, x.dtype)

    @staticmethod
    def backward(ctx, output_grad):
        g, order = float32_of(output_grad), ctx.order
        x_grad, probs_grad = empty((order.size, g.shape[1])), None
        if not ctx.saved_tensors:
            threads.run(movement.gather_rows, order.size, x_grad.size, g, order, 0, x_grad)
            return tensor_of(x_grad, ctx.dtype), None, None, None
        x, probs = ctx.saved_tensors
        threads.run(kernels.gather_weighted_rows, order.size, 2 * x_grad.size, g, order, float32_of(probs), x_grad)
        if ctx.needs_input_grad[3]:
            probs_grad = empty(order.size)
            threads.run(kernels.dots_of_rows, order.size, 2 * x_grad.size, g, order, float32_of(x), probs_grad)
            probs_grad = tensor_of(probs_grad, probs.dtype)
        return tensor_of(x_grad, ctx.dtype), None, None, probs_grad


def unpermute(x, order, tokens, probs=None):
    """See `ops.unpermute`."""
    checks.check_unpermute(x, order, probs)
    return _Unpermute.apply(x, order, int(tokens), probs)


class _Picked(Function):
    """Elements of a float tensor at places of its flat memory, all different; the gradient goes back to these places."""

    @staticmethod
    def forward(ctx, x, places):
        ctx.places, ctx.shape = places, x.shape
        return tensor_of_bits(np.ascontiguousarray(bits_of(x).reshape(-1)[places]), x.dtype)

    @staticmethod
    def backward(ctx, output_grad):
        return _at(ctx.places, output_grad, ctx.shape), None


def _at(places, values, shape):
    """Tensor of `shape` with the elements of `values` at places of its flat memory, else 0."""
    elements = bits_of(values)
    result = np.zeros(shape, elements.dtype)
    result.reshape(-1)[places] = elements
    return tensor_of_bits(result, values.dtype)


class _Placed(Function):
    """The inverse of `_Picked`."""

    @staticmethod
    def forward(ctx, values, places, shape):
        ctx.places = places
        return _at(places, values, shape)

    @staticmethod
    def backward(ctx, output_grad):
        elements = bits_of(output_grad).reshape(-1)[ctx.places]
        return tensor_of_bits(np.ascontiguousarray(elements), output_grad.dtype), None, None


def permute_probs(probs, order, counts):
    """See `ops.permute_probs`."""
    experts = np.repeat(np.arange(len(counts)), counts)
    return _Picked.apply(probs, integers_of(order) * probs.shape[1] + experts)


def _places(indices, columns):
    """Places in the flat memory of rows of `columns` elements: int64 array of the shape of `indices`."""
    columns_of_rows = integers_of(indices)
    rows = np.arange(columns_of_rows.size // max(columns_of_rows.shape[-1], 1)) * columns
    return columns_of_rows + rows.reshape(*columns_of_rows.shape[:-1], 1)


def top_k(x, k):
    """See `ops.top_k`."""
    checks.check_top_k(x, k)
    rows = rows_of(float32_of(x))
    if k <= _FEW:
        values, indices = empty((len(rows), k)), np.empty((len(rows), k), np.int32)
        threads.run(kernels.largest, len(rows), rows.size, rows, values, indices)
    else:
        indices = np.argsort(-rows, axis=1, kind="stable")[:, :k].astype(np.int32)
    indices = storage.from_array(indices.reshape(*x.shape[:-1], k))
    return gather_columns(x, indices), indices


def gather_columns(x, indices):
    """See `ops.gather_columns`."""
    return _Picked.apply(x, _places(indices, x.shape[-1]))


def scatter_columns(values, indices, columns):
    """See `ops.scatter_columns`."""
    return _Placed.apply(values, _places(indices, columns), (*values.shape[:-1], columns))


class _Softmax(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.probs, ctx.dtype = _exponentials(float32_of(x))[0], x.dtype
        ctx.probs /= ctx.probs.sum(axis=-1, keepdims=True)
        return tensor_of(ctx.probs, x.dtype)

    @staticmethod
    def backward(ctx, output_grad):
        g, p = float32_of(output_grad), ctx.probs
        return tensor_of(p * (g - (g * p).sum(axis=-1, keepdims=True)), ctx.dtype)


def _exponentials(values):
    """(exponentials of the distances from each row's largest element, the largest elements)."""
    largest = values.max(axis=-1, keepdims=True)
    return np.exp(values - largest), largest


def softmax(x):
    """See `ops.softmax`."""
    return _Softmax.apply(x)


class _Sigmoid(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.dtype = x.dtype
        with np.errstate(over="ignore"):  # 1 / inf is the 0 that it should be
            ctx.y = np.float32(1) / (np.float32(1) + np.exp(-float32_of(x)))
        return tensor_of(ctx.y, x.dtype)

    @staticmethod
    def backward(ctx, output_grad):
        return tensor_of(float32_of(output_grad) * ctx.y * (1 - ctx.y), ctx.dtype)


def sigmoid(x):
    """See `ops.sigmoid`."""
    return _Sigmoid.apply(x)


class _LogSumExp(Function):
    @staticmethod
    def forward(ctx, x):
        exponentials, largest = _exponentials(float32_of(x))
        total = exponentials.sum(axis=-1, keepdims=True)
        ctx.probs, ctx.dtype = exponentials / total, x.dtype
        return tensor_of((largest + np.log(total))[..., 0], x.dtype)

    @staticmethod
    def backward(ctx, output_grad):
        return tensor_of(ctx.probs * float32_of(output_grad)[..., None], ctx.dtype)


def log_sum_exp(x):
    """See `ops.log_sum_exp`."""
    return _LogSumExp.apply(x)


class _LinearInDouble(Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return storage.from_array((_double(x) @ _double(weight).T).astype(np.float32))

    @staticmethod
    def backward(ctx, output_grad):
        x, weight = ctx.saved_tensors
        g = _double(output_grad)
        x_grad = (g @ _double(weight)).astype(np.float32)
        weight_grad = (rows_of(g).T @ rows_of(_double(x))).astype(np.float32)
        return tensor_of(x_grad, x.dtype), tensor_of(weight_grad, weight.dtype)


def _double(tensor):
    return float32_of(tensor).astype(np.float64)


def linear_in_double(x, weight):
    """See `ops.linear_in_double`."""
    return _LinearInDouble.apply(x, weight)
