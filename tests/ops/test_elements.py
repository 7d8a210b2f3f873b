"""Casts, sums and joins: the bits of MindSpore's operators, which they stand for, and their gradients."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint
from mindspore import ops as mindspore_ops

from mindspeed_ms import ops
from mindspeed_ms.core import autograd, storage


def _same_bits():
    values = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32) * 100
    values[0] = [np.inf, -np.inf, 1e-42, 65520.0]
    sources = [Tensor(values), Tensor(values).astype(ms.float16), Tensor(values[1:]).astype(ms.bfloat16), Tensor(values > 0)]
    for source in [*sources, Tensor(np.arange(6, dtype=np.int32)), Tensor(values)[:, 1:3], Tensor(2.5, ms.float32)]:
        for dtype in (ms.float32, ms.float16, ms.bfloat16):
            found, expected = ops.cast(source, dtype), source.astype(dtype)
            assert found.dtype == dtype and found.shape == expected.shape
            np.testing.assert_array_equal(storage.read_array(found), storage.read_array(expected))
            buffer = storage.FlatBuffer(source.size, dtype)
            if source.dtype in (ms.float32, ms.float16, ms.bfloat16):
                storage.write(buffer.tensor, source)
                np.testing.assert_array_equal(storage.read_array(buffer.tensor), storage.read_array(expected).reshape(-1))
    for shape in ((16, 1), (1, 16), (64, 4), (300,), (5, 3, 7), ()):
        numbers = Tensor(np.random.default_rng(1).uniform(0, 5, shape).astype(np.float32))
        assert float(ops.total(numbers).asnumpy()) == float(numbers.sum().asnumpy()) and ops.total(numbers).shape == ()
    np.testing.assert_array_equal(ops.is_zero(Tensor([0.0, 2.0, -0.0])).asnumpy(), [1, 0, 1])
    parts = [autograd.set_requires_grad(Tensor(values[:, :2])), autograd.set_requires_grad(Tensor(values[:, 1:]))]
    joined = ops.cat(parts, 1)
    np.testing.assert_array_equal(joined.asnumpy(), mint.cat(parts, 1).asnumpy())
    for part, gradient in zip((slice(0, 2), slice(2, 5)), autograd.grad(joined, parts, joined), strict=True):
        np.testing.assert_array_equal(gradient.asnumpy(), joined.asnumpy()[:, part])
    own, shared = (autograd.set_requires_grad(Tensor(values[1:].reshape(shape))) for shape in ((5, 1, 2, 2), (5, 1, 1, 4)))
    joined = ops.cat_shared(own, shared)
    gradients = autograd.grad(joined, [own, shared], joined)
    for head in range(2):
        np.testing.assert_array_equal(joined.asnumpy()[:, :, head, 2:], shared.asnumpy()[:, :, 0])
    np.testing.assert_array_equal(joined.asnumpy()[..., :2], own.asnumpy())
    np.testing.assert_array_equal(gradients[0].asnumpy(), own.asnumpy())
    np.testing.assert_array_equal(gradients[1].asnumpy(), 2 * shared.asnumpy())
    x = autograd.set_requires_grad(Tensor(values[1:]))
    (gradient,) = autograd.grad(ops.total(ops.cast(ops.cast(x, ms.bfloat16), ms.float32)), x, Tensor(3.0, ms.float32))
    np.testing.assert_array_equal(gradient.asnumpy(), np.full((5, 4), 3, np.float32))


def _sum_with_a_bias(shape, dtype):
    random = np.random.default_rng(2)
    x, bias, gradient = (
        Tensor(random.normal(size=size).astype(np.float32)).astype(dtype) for size in (shape, shape[-1:], shape)
    )
    x, bias = autograd.set_requires_grad(x), autograd.set_requires_grad(bias)
    found = ops.add_bias(x, bias)
    gradients = autograd.grad(found, (x, bias), gradient)
    return [storage.read_array(array) for array in (x, bias, gradient, found, *gradients)]


def _biases():
    for shape in ((16, 2, 8), (300, 1, 8), (1, 16, 8), (16, 8), (8,)):
        for dtype in (ms.float32, ms.float16):
            x, bias, gradient, found, x_grad, bias_grad = _sum_with_a_bias(shape, dtype)
            total = Tensor(x) + autograd.set_requires_grad(Tensor(bias))
            np.testing.assert_array_equal(found, total.asnumpy())
            np.testing.assert_array_equal(x_grad, gradient)
        # MindSpore's sum of float16 is that of float32, and bfloat16 it cannot sum
        x, bias, gradient, _, _, bias_grad = _sum_with_a_bias(shape, ms.float32)
        parameter = autograd.set_requires_grad(Tensor(bias))
        (expected,) = autograd.grad(Tensor(x) * 1.0 + parameter, parameter, Tensor(gradient))
        np.testing.assert_array_equal(bias_grad, expected.asnumpy())
    assert _sum_with_a_bias((16, 2, 8), ms.bfloat16)[5].shape == (8,)


def test_bias_has_the_bits_of_mindspores_sum(world):
    world(1)(_biases)


def _products():
    random = np.random.default_rng(3)
    for batch in ((), (3,)):
        for transpose_a, transpose_b in ((False, False), (False, True), (True, False), (True, True)):
            primitive = (mindspore_ops.BatchMatMul if batch else mindspore_ops.MatMul)(transpose_a, transpose_b)
            a, b = (
                Tensor(random.normal(size=(*batch, *(shape[::-1] if flipped else shape))).astype(np.float32))
                for shape, flipped in (((16, 40), transpose_a), ((40, 24), transpose_b))
            )
            np.testing.assert_array_equal(ops.matmul(a, b, transpose_a, transpose_b).asnumpy(), primitive(a, b).asnumpy())


def test_products_have_the_bits_of_mindspores_primitives(world):
    world(1)(_products)


def test_bits_of_mindspores_operators(world):
    world(1)(_same_bits)


def _row_sums_and_log_sigmoid():
    values = np.random.default_rng(3).normal(size=(3, 50)).astype(np.float32)
    x = autograd.set_requires_grad(Tensor(values))
    sums = ops.row_sums(x)
    np.testing.assert_array_equal(sums.asnumpy(), values.sum(1, dtype=np.float64).astype(np.float32))
    (gradient,) = autograd.grad(sums, x, Tensor(np.array([1.0, 2.0, -3.0], np.float32)))
    np.testing.assert_array_equal(gradient.asnumpy(), np.repeat([[1.0], [2.0], [-3.0]], 50, 1))
    far = np.array([-1e4, -2.0, 0.0, 2.0, 1e4], np.float32)
    x = autograd.set_requires_grad(Tensor(far))
    found = ops.log_sigmoid(x)
    np.testing.assert_allclose(found.asnumpy(), -np.logaddexp(0, -far.astype(np.float64)), rtol=1e-6)
    (gradient,) = autograd.grad(found, x, Tensor(np.ones(5, np.float32)))
    np.testing.assert_allclose(gradient.asnumpy(), np.exp(-np.logaddexp(0, far.astype(np.float64))), rtol=1e-6, atol=1e-12)


def test_row_sums_and_log_sigmoid(world):
    world(1)(_row_sums_and_log_sigmoid)
