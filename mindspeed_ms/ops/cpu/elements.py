"""CPU forms of casts, sums, biases, joins and masks of documents: numpy and kernels on the tensors' own memory."""

import mindspore as ms
import numpy as np

from mindspeed_ms.core import storage
from mindspeed_ms.core.autograd import Function
from mindspeed_ms.core.device import to_dtype
from mindspeed_ms.ops.cpu.arrays import column_sums, float32_of, rows_of, tensor_of

_HALVES = (ms.float16, ms.bfloat16)


class _Cast(Function):
    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = x.dtype
        return _converted(x, dtype)

    @staticmethod
    def backward(ctx, output_grad):
        return _converted(output_grad, ctx.dtype), None


def _converted(x, dtype):
    """Tensor of another dtype than `x` has; half precisions go through float32."""
    array = float32_of(x) if x.dtype in _HALVES else storage.read_array(x)
    if dtype in _HALVES:
        return tensor_of(np.asarray(array, np.float32, order="C"), dtype)
    return storage.from_array(np.asarray(array, storage.numpy_dtype(dtype), order="C"))


def cast(x, dtype):
    """See `ops.cast`."""
    dtype = to_dtype(dtype)
    return x if x.dtype == dtype else _Cast.apply(x, dtype)


class _Total(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return tensor_of(np.array(_sum(float32_of(x))), x.dtype)

    @staticmethod
    def backward(ctx, output_grad):
        return tensor_of(np.full(ctx.shape, float32_of(output_grad)), ctx.dtype)


def _sum(values):
    """float32 sum of an array, accumulated in float64, but along a column in float32: the numbers of MindSpore's sum, to the
    bit."""
    if values.ndim > 1 and values.size == values.shape[0] > 1:
        return np.add.accumulate(values.reshape(-1))[-1]
    return np.float32(values.sum(dtype=np.float64))


def total(x):
    """See `ops.total`."""
    return _Total.apply(x)


class _RowSums(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return tensor_of(float32_of(x).sum(axis=1, dtype=np.float64).astype(np.float32), x.dtype)

    @staticmethod
    def backward(ctx, output_grad):
        return tensor_of(np.repeat(float32_of(output_grad), ctx.shape[1]).reshape(ctx.shape), ctx.dtype)


def row_sums(x):
    """See `ops.row_sums`."""
    return _RowSums.apply(x)


class _LogSigmoid(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return storage.from_array(-np.logaddexp(np.float32(0), -storage.read_array(x)))

    @staticmethod
    def backward(ctx, output_grad):
        (x,) = ctx.saved_tensors
        slope = np.exp(-np.logaddexp(np.float32(0), storage.read_array(x)))
        return storage.from_array(np.asarray(storage.read_array(output_grad) * slope, np.float32))


def log_sigmoid(x):
    """See `ops.log_sigmoid`."""
    return _LogSigmoid.apply(x)


class _AddBias(Function):
    @staticmethod
    def forward(ctx, x, bias):
        return tensor_of(float32_of(x) + float32_of(bias), x.dtype)

    @staticmethod
    def backward(ctx, output_grad):
        needs_bias = ctx.needs_input_grad[1]
        return output_grad, tensor_of(_row_sum(float32_of(output_grad)), output_grad.dtype) if needs_bias else None


def _row_sum(values):
    """float32 sum over all dimensions but the last, accumulated like `_sum`: in float32 if only the first one is longer
    than 1."""
    rows = rows_of(values)
    return rows.sum(axis=0) if len(rows) == values.shape[0] else column_sums(rows)


def add_bias(x, bias):
    """See `ops.add_bias`."""
    return _AddBias.apply(x, bias)


def scaled(x, factor):
    """See `ops.scaled`."""
    return x if factor == 1.0 else tensor_of(float32_of(x) * np.float32(factor), x.dtype)


def is_zero(x):
    """See `ops.is_zero`."""
    return storage.from_array(np.asarray(storage.read_array(x) == 0, np.float32))


class _Cat(Function):
    @staticmethod
    def forward(ctx, dim, *tensors):
        ctx.dim, ctx.ends = dim, np.cumsum([tensor.shape[dim] for tensor in tensors])
        return storage.from_array(np.concatenate([storage.read_array(tensor) for tensor in tensors], dim), tensors[0].dtype)

    @staticmethod
    def backward(ctx, output_grad):
        parts = np.split(storage.read_array(output_grad), ctx.ends[:-1], ctx.dim)
        return None, *(storage.from_array(np.ascontiguousarray(part), output_grad.dtype) for part in parts)


def cat(tensors, dim=0):
    """See `ops.cat`."""
    return _Cat.apply(dim, *tensors)


class _CatShared(Function):
    @staticmethod
    def forward(ctx, own, shared):
        ctx.width = own.shape[-1]
        parts = storage.read_array(own), storage.read_array(shared)
        wide = np.broadcast_to(parts[1], (*own.shape[:-1], shared.shape[-1]))
        return storage.from_array(np.concatenate([parts[0], wide], -1), own.dtype)

    @staticmethod
    def backward(ctx, output_grad):
        grad = storage.read_array(output_grad)
        own = storage.from_array(np.ascontiguousarray(grad[..., : ctx.width]), output_grad.dtype)
        total = float32_of(output_grad)[..., ctx.width :].sum(axis=2, keepdims=True)
        return own, tensor_of(np.ascontiguousarray(total), output_grad.dtype)


def cat_shared(own, shared):
    """See `ops.cat_shared`."""
    if own.ndim != 4 or shared.shape != (*own.shape[:2], 1, shared.shape[-1]) or own.dtype != shared.dtype:
        raise ValueError(
            f"cat_shared got {own.dtype} {own.shape} and {shared.dtype} {shared.shape}: expected [s, b, n, i] and [s, b, 1, j] "
            "of one dtype."
        )
    return _CatShared.apply(own, shared)


def document_mask(ids, end):
    """See `ops.document_mask`."""
    ends = storage.read_array(ids) == end
    document = ends.cumsum(axis=1) - ends
    allowed = (document[:, :, None] == document[:, None, :]) & np.tri(ids.shape[1], dtype=bool)
    positions = allowed.sum(axis=-1, dtype=np.int32) - np.int32(1)  # a query sees its document up to itself
    return storage.from_array(positions), storage.from_array((~allowed).view(np.uint8))
