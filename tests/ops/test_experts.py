"""Operators of a mixture of experts against float64 references: grouped products, order of tokens, choices of the router."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindspeed_ms import ops
from mindspeed_ms.core import autograd, storage
from tests.ops.harness import TOLERANCE, assert_close, check, tensor, values

DTYPES = ("float32", "float16", "bfloat16")
COUNTS = ((3, 0, 7, 1), (0, 0, 11, 0), (5, 6, 0, 0))


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def _product(x, weight, counts):
    parts = np.split(x, np.cumsum(counts)[:-1])
    return np.concatenate([part @ matrix for part, matrix in zip(parts, weight)])


def _weight_gradient(g, x, counts):
    places = np.cumsum(counts)[:-1]
    return np.stack([left.T @ right for left, right in zip(np.split(x, places), np.split(g, places))])


def _grouped(dtype):
    for counts in COUNTS:
        arrays = [_normal(sum(counts), 5), _normal(len(counts), 5, 6, seed=1)]
        check(lambda x, w, c=counts: ops.grouped_linear(x, w, c), lambda x, w, c=counts: _product(x, w, c), arrays, dtype)


def _wide(dtype):
    """Tiles of columns on several threads, experts with many rows and with few, more rows and elements than panels have."""
    for counts in ((40, 2, 0, 90), (0, 130, 0, 2), (3, 0, 490, 7)):
        arrays = [_normal(sum(counts), 260), _normal(4, 260, 530, seed=1)]
        check(
            lambda x, w, c=counts: ops.grouped_linear(x, w, c),
            lambda x, w, c=counts: _product(x, w, c),
            arrays,
            dtype,
            gradients=lambda x, w, g, c=counts: (_product(g, w.swapaxes(1, 2), c), _weight_gradient(g, x, c)),
        )


def _raw_grouped(dtype):
    for counts in (*COUNTS, (0, 0, 0, 0)):
        rows, shape = sum(counts), (4, 5, 6)
        x, w, g = (
            tensor(_normal(rows, 5), dtype),
            tensor(_normal(*shape, seed=1), dtype),
            tensor(_normal(rows, 6, seed=2), dtype),
        )
        tolerance, exact = TOLERANCE[dtype], _weight_gradient(values(g), values(x), counts)
        input_grad = _product(values(g), values(w).swapaxes(1, 2), counts)
        assert_close(
            values(ops.grouped_linear_forward(x, w, counts)), _product(values(x), values(w), counts), tolerance, "forward"
        )
        assert_close(values(ops.grouped_linear_input_grad(g, w, counts)), input_grad, tolerance, "input grad")
        assert_close(values(ops.grouped_linear_weight_grad(g, x, counts)), exact, tolerance, "weight grad")
        for kind in {"float32", dtype}:
            main_grad = storage.FlatBuffer(130, kind).slice(5, 125, shape)
            storage.write(main_grad, tensor(np.ones(shape), kind))
            assert ops.grouped_linear_weight_grad(g, x, counts, main_grad) is main_grad
            assert_close(values(main_grad), 1 + exact, TOLERANCE[kind], "accumulated weight grad")
            ops.grouped_linear_weight_grad(g, x, counts, main_grad, overwrite=True)
            assert_close(values(main_grad), exact, TOLERANCE[kind], "overwritten weight grad")


def _grouped_refusals(dtype):
    x, weight = tensor(_normal(4, 5), dtype), tensor(_normal(2, 5, 6), dtype)
    for counts in ((1, 2), (1, 1, 2), (5, -1)):
        with pytest.raises(ValueError, match="expected a count of rows for each expert"):
            ops.grouped_linear(x, weight, counts)
    with pytest.raises(ValueError, match=r"expected \[rows, in\] and \[experts, in, out\]"):
        ops.grouped_linear(tensor(_normal(4, 6), dtype), weight, (2, 2))


ORDER = np.array([2, 0, 2, 3, 0, 2, 5], np.int32)


def _permutations(dtype):
    order, hot = Tensor(ORDER), np.eye(6)[ORDER]
    check(lambda x: ops.permute(x, order), lambda x: x[ORDER], [_normal(6, 9)], dtype)
    check(lambda x: ops.unpermute(x, order, 6), lambda x: hot.T @ x, [_normal(7, 9)], dtype)
    check(
        lambda x, p: ops.unpermute(x, order, 6, p),
        lambda x, p: hot.T @ (x * p[:, None]),
        [_normal(7, 9), _normal(7, seed=1)],
        dtype,
    )
    none = Tensor(np.zeros(0, np.int32))
    check(lambda x: ops.permute(x, none), lambda x: x[:0], [_normal(6, 3)], dtype)
    check(
        lambda x, p: ops.unpermute(x, none, 4, p), lambda x, p: np.zeros((4, 3)) * x.sum(), [_normal(0, 3), _normal(0)], dtype
    )
    with pytest.raises(ValueError, match="expected \\(7,\\) for both"):
        ops.unpermute(tensor(_normal(7, 9), dtype), order, 6, tensor(_normal(6), dtype))


def _float32_probs(dtype):
    """Probabilities keep their own dtype; the sum is rounded once."""
    x, probs = (autograd.set_requires_grad(t) for t in (tensor(_normal(7, 9), dtype), tensor(_normal(7, seed=1))))
    output = ops.unpermute(x, Tensor(ORDER), 6, probs)
    grads = autograd.grad(output, [x, probs], tensor(_normal(6, 9, seed=2), dtype))
    assert output.dtype == x.dtype == grads[0].dtype and grads[1].dtype == ms.float32
    g = values(tensor(_normal(6, 9, seed=2), dtype))[ORDER]
    assert_close(values(grads[1]), (g * values(x)).sum(-1), 2e-6, "gradient of the probabilities")


def _orders(dtype):
    chosen = np.random.default_rng(3).random((9, 4)) < 0.4
    chosen[:, 2] = False
    expert, token = np.nonzero(chosen.T)
    for routing_map in (Tensor(chosen), Tensor(3 * chosen.astype(np.int32))):
        order, counts = ops.expert_order(routing_map)
        assert np.array_equal(order.asnumpy(), token) and order.dtype == ms.int32
        assert counts.tolist() == chosen.sum(0).tolist()
    check(lambda p: ops.permute_probs(p, order, counts), lambda p: p[token, expert], [_normal(9, 4)], dtype)
    order, counts = ops.expert_order(Tensor(np.zeros((9, 4), bool)))
    assert order.shape == (0,) and counts.tolist() == [0] * 4


def _choices(dtype):
    x = np.random.default_rng(5).permutation(7 * 40).reshape(7, 40) / 64.0  # differences larger than any rounding
    for k in (1, 3, 16, 17, 40):
        expected = np.argsort(-values(tensor(x, dtype)), axis=1, kind="stable")[:, :k]
        picked = ops.top_k(tensor(x, dtype), k)[1]
        assert np.array_equal(picked.asnumpy(), expected) and picked.dtype == ms.int32
        check(lambda x, k=k: ops.top_k(x, k)[0], lambda x, e=expected: np.take_along_axis(x, e, 1), [x[:, :]], dtype)
    ties = tensor(np.zeros((2, 3, 20)), dtype)
    for k in (2, 18):
        assert (ops.top_k(ties, k)[1].asnumpy() == np.arange(k)).all(), "the lower index comes first"
    chosen = np.array([[2, 0], [1, 3], [3, 2]], np.int32)
    check(lambda x: ops.gather_columns(x, Tensor(chosen)), lambda x: np.take_along_axis(x, chosen, 1), [_normal(3, 4)], dtype)
    hot = np.eye(4)[chosen]
    check(
        lambda v: ops.scatter_columns(v, Tensor(chosen), 4), lambda v: np.einsum("tk,tke->te", v, hot), [_normal(3, 2)], dtype
    )
    for k in (0, 41):
        with pytest.raises(ValueError, match="expected 1 to 40"):
            ops.top_k(tensor(x, dtype), k)


def _not_a_number(dtype):
    """Elements that are not numbers take a place, never one outside the row."""
    row = np.full((1, 6), np.nan)
    row[0, 4] = 1.0
    for k in (2, 6):
        indices = ops.top_k(tensor(row, dtype), k)[1].asnumpy()
        assert len(set(indices[0].tolist())) == k and indices.min() >= 0 and indices.max() < 6


def _scores(dtype):
    def softmax(x):
        exponentials = np.exp(x - x.max(-1, keepdims=True))
        return exponentials / exponentials.sum(-1, keepdims=True)

    x = 4 * _normal(5, 2, 7)
    check(ops.softmax, softmax, [x], dtype)
    check(ops.sigmoid, lambda x: 1 / (1 + np.exp(-x)), [x], dtype)
    check(ops.log_sum_exp, lambda x: np.log(np.exp(x).sum(-1)), [x], dtype)
    far = tensor(np.array([[-200.0, 200.0]]), dtype)
    assert values(ops.sigmoid(far)).tolist() == [[0, 1]] == values(ops.softmax(far)).tolist()
    assert values(ops.log_sum_exp(far)).tolist() == [200]


def _sums_in_double(dtype):
    """Terms that cancel leave what float32 sums lose; the result and the gradients are rounded once."""
    x, weight = 1000 * _normal(3, 2, 40), _normal(5, 40, seed=1)
    x[..., 1::2], weight[:, 1::2] = -x[..., ::2] + 0.01, weight[:, ::2]
    if dtype == "float32":
        check(ops.linear_summed_in_double, lambda x, w: x @ w.T, [_normal(3, 2, 7), _normal(5, 7, seed=1)])
    tensors = [autograd.set_requires_grad(tensor(array, dtype)) for array in (x, weight)]
    output = ops.linear_summed_in_double(*tensors)
    exact = values(tensors[0]) @ values(tensors[1]).T
    assert output.dtype == ms.float32
    np.testing.assert_array_equal(output.asnumpy(), exact.astype(np.float32))
    g = values(output)
    for grad, source, expected in zip(
        autograd.grad(output, tensors, output),
        tensors,
        (g @ values(tensors[1]), g.reshape(-1, 5).T @ values(tensors[0]).reshape(-1, 40)),
    ):
        np.testing.assert_array_equal(values(grad), values(tensor(expected, dtype)))
        assert grad.dtype == source.dtype


CASES = (
    _sums_in_double,
    _grouped,
    _wide,
    _raw_grouped,
    _grouped_refusals,
    _permutations,
    _float32_probs,
    _orders,
    _choices,
    _not_a_number,
    _scores,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[1:])
def test_values_and_gradients(world, case, dtype):
    world(1)(case, dtype)
