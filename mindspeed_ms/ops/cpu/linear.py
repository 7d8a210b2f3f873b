"""CPU forms of linear layers and matrix products, in float32; half precisions are converted and rounded once.

The forward and the weight gradient use BLAS, which is as fast as MindSpore's kernel on one thread, loses less to other
processes when spread by `threads`, and can add to its result. Deep input gradients and batches use MindSpore's kernel,
which is faster there.
"""

import mindspore as ms
import numpy as np
from mindspore import mint

from mindspeed_ms.core import storage
from mindspeed_ms.core.autograd import Function
from mindspeed_ms.ops.cpu import threads
from mindspeed_ms.ops.cpu.arrays import column_sums, empty, float32_of, rows_of, tensor_of
from mindspeed_ms.ops.cpu.blas import sgemm_address
from mindspeed_ms.ops.cpu.kernels import low_rank, products
from mindspeed_ms.ops.cpu.kernels.movement import add_bias

_NARROW = 256
"""Fewer columns than this are not worth cutting: the rows are."""
_DEEP = 4096
"""From this inner size on MindSpore's kernel computes the input gradient, unless any order will do."""


def _product(a, b, transpose_a, transpose_b):
    """Product of two float32 matrices, or batches of matrices [n, ., .]: float32 array."""
    left, right = (values.reshape(-1, *values.shape[-2:]) for values in (a, b))
    left, right = (_transposed(left) if transpose_a else left), (_transposed(right) if transpose_b else right)
    # MatMul and BatchMatMul keep 1,400 bytes of host memory of each call for their two flags
    result = storage.read_array(mint.bmm(storage.from_array(left), storage.from_array(right)))
    return result.reshape(result.shape[3 - a.ndim :])


def _transposed(batches):
    return np.ascontiguousarray(batches.swapaxes(1, 2))


def _check_linear(x, weight):
    if weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear got an input of shape {x.shape} and a weight of shape {weight.shape}: "
            "expected [..., input_size] and [output_size, input_size]."
        )
    if x.dtype is not weight.dtype and x.dtype != weight.dtype:
        raise ValueError(f"linear got an input of {x.dtype} and a weight of {weight.dtype}: expected one dtype.")


def linear_forward(x, weight, bias=None):
    """See `ops.linear_forward`."""
    _check_linear(x, weight)
    values = rows_of(float32_of(x))
    is_few = len(values) <= products.FEW_ROWS
    rows = storage.read_array(weight)
    is_narrowed = is_few and rows.dtype == np.int16  # bits of bfloat16, which the kernel widens on its way: it is read once
    rows = np.ascontiguousarray(rows) if is_narrowed else float32_of(weight)
    flat = empty((len(values), len(rows)))
    if is_few:
        kernel = products.linear_few_bfloat16 if is_narrowed else products.linear_few
        threads.run(kernel, -(-rows.shape[0] // products.COLUMNS), flat.size * values.shape[1], values, rows, flat)
        threads.reads_weight(rows.__array_interface__["data"][0], rows.nbytes)
    elif rows.shape[0] >= _NARROW:
        _run_product(products.linear_columns, rows.shape[0], flat.size * values.shape[1], values, rows, flat)
    else:
        _run_product(products.linear_rows, len(values), flat.size * values.shape[1], values, rows, 0.0, flat)
    if bias is not None:
        threads.run(add_bias, len(flat), flat.size, flat, float32_of(bias))
    return tensor_of(flat.reshape(*x.shape[:-1], len(rows)), x.dtype)


def _run_product(kernel, total, work, *arguments):
    """Run a kernel of `products` over `total` rows or columns, a piece per thread: each packs one operand anew."""
    threads.run(kernel, total, work, sgemm_address(), *arguments, pieces_per_thread=1)


def linear_input_grad(output_grad, weight, any_order=False):
    """See `ops.linear_input_grad`."""
    g, rows = rows_of(float32_of(output_grad)), float32_of(weight)
    shape = (*output_grad.shape[:-1], weight.shape[1])
    if rows.shape[0] >= _DEEP and not any_order:
        return tensor_of(_product(g, rows, False, False).reshape(shape), output_grad.dtype)
    result = empty(shape)
    flat = rows_of(result)
    if flat.shape[1] >= _NARROW:
        _run_product(products.input_grad_columns, flat.shape[1], g.size * flat.shape[1], g, rows, flat)
    else:
        _run_product(products.input_grad_rows, len(flat), g.size * flat.shape[1], g, rows, 0.0, flat)
    return tensor_of(result, output_grad.dtype)


def linear_weight_grad(output_grad, x, accumulate_into=None, overwrite=False):
    """See `ops.linear_weight_grad`."""
    g, values = rows_of(float32_of(output_grad)), rows_of(float32_of(x))
    if accumulate_into is not None and accumulate_into.dtype == ms.float32:
        # BLAS adds while it multiplies, which saves two passes over the gradient buffer
        return _weight_grad(g, values, 0.0 if overwrite else 1.0, accumulate_into)
    result = _weight_grad(g, values, 0.0, storage.from_array(empty((g.shape[1], values.shape[1]))))
    if accumulate_into is None:
        return tensor_of(storage.read_array(result), x.dtype)
    total = storage.read_array(result) + (0 if overwrite else float32_of(accumulate_into))
    storage.write(accumulate_into, tensor_of(total, accumulate_into.dtype))
    return accumulate_into


def _weight_grad(g, values, keep, target):
    _run_product(products.weight_grad_rows, g.shape[1], g.size * values.shape[1], g, values, keep, storage.as_array(target))
    return target


def add_linear(output, x, weight):
    """See `ops.add_linear`."""
    _check_linear(x, weight)
    total, values = float32_of(output), rows_of(float32_of(x))
    flat = rows_of(total)
    _run_product(products.linear_rows, len(flat), flat.size * values.shape[1], values, float32_of(weight), 1.0, flat)
    return tensor_of(total, output.dtype)


def add_linear_input_grad(input_grad, output_grad, weight):
    """See `ops.add_linear_input_grad`."""
    total, g = float32_of(input_grad), rows_of(float32_of(output_grad))
    flat = rows_of(total)
    _run_product(products.input_grad_rows, len(flat), g.size * flat.shape[1], g, float32_of(weight), 1.0, flat)
    return tensor_of(total, input_grad.dtype)


def narrow_weight_grad(narrow, wide, transposed=False):
    """See `ops.narrow_weight_grad`."""
    few, values = rows_of(float32_of(narrow)), rows_of(float32_of(wide))
    result = empty((few.shape[1], values.shape[1]))
    groups = -(-values.shape[1] // low_rank.COLUMNS)
    threads.run(low_rank.narrow_weight_grad, groups, few.size * values.shape[1], few, values, result, pieces_per_thread=2)
    return tensor_of(np.ascontiguousarray(result.T) if transposed else result, narrow.dtype)


def bias_grad(output_grad):
    """See `ops.bias_grad`."""
    return tensor_of(column_sums(rows_of(float32_of(output_grad))), output_grad.dtype)


class _Linear(Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return linear_forward(x, weight, bias)

    @staticmethod
    def backward(ctx, output_grad):
        x, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        return (
            linear_input_grad(output_grad, weight) if needs_input else None,
            linear_weight_grad(output_grad, x) if needs_weight else None,
            bias_grad(output_grad) if ctx.bias_dtype is not None and needs_bias else None,
        )


def linear(x, weight, bias=None):
    """See `ops.linear`."""
    return _Linear.apply(x, weight, bias)


def _batches_of(tensor):
    array = float32_of(tensor)
    return array if array.ndim == 2 else array.reshape(-1, *array.shape[-2:])


class _MatMul(Function):
    @staticmethod
    def forward(ctx, a, b, transpose_a, transpose_b):
        ctx.save_for_backward(a, b)
        ctx.transposes = transpose_a, transpose_b
        result = _product(_batches_of(a), _batches_of(b), transpose_a, transpose_b)
        return tensor_of(result.reshape(*a.shape[:-2], *result.shape[-2:]), a.dtype)

    @staticmethod
    def backward(ctx, output_grad):
        a, b = ctx.saved_tensors
        transpose_a, transpose_b = ctx.transposes
        left, right, g = _batches_of(a), _batches_of(b), _batches_of(output_grad)
        left_grad = right_grad = None
        if ctx.needs_input_grad[0]:
            left_grad = _product(right, g, transpose_b, True) if transpose_a else _product(g, right, False, not transpose_b)
            left_grad = tensor_of(left_grad.reshape(a.shape), a.dtype)
        if ctx.needs_input_grad[1]:
            right_grad = _product(g, left, True, transpose_a) if transpose_b else _product(left, g, not transpose_a, False)
            right_grad = tensor_of(right_grad.reshape(b.shape), b.dtype)
        return left_grad, right_grad, None, None


def matmul(a, b, transpose_a=False, transpose_b=False):
    """See `ops.matmul`."""
    inner = a.shape[-2 if transpose_a else -1], b.shape[-1 if transpose_b else -2]
    if a.ndim < 2 or a.shape[:-2] != b.shape[:-2] or inner[0] != inner[1]:
        raise ValueError(
            f"matmul got shapes {a.shape} (transposed: {transpose_a}) and {b.shape} (transposed: {transpose_b}): "
            "expected equal leading dimensions and inner sizes."
        )
    return _MatMul.apply(a, b, transpose_a, transpose_b)
