"""Linear, matmul, embedding, normalisations, activations, rotary, qkv split, dropout against float64 references."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindspeed_ms import ops
from mindspeed_ms.core import autograd, storage
from tests.ops import references
from tests.ops.harness import assert_close, check, tensor, values

DTYPES = ("float32", "float16", "bfloat16")


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def _linear(dtype):
    x, w, b = _normal(3, 2, 5), _normal(4, 5, seed=1), _normal(4, seed=2)
    check(ops.linear, lambda x, w, b: x @ w.T + b, [x, w, b], dtype)
    check(ops.linear, lambda x, w: x @ w.T, [x, w], dtype)


def _matmul(dtype):
    for transpose_a in (False, True):
        for transpose_b in (False, True):
            for leading in ((), (2,), (2, 3)):
                a = _normal(*leading, *((4, 3) if transpose_a else (3, 4)))
                b = _normal(*leading, *((5, 4) if transpose_b else (4, 5)), seed=1)

                def reference(a, b, transpose_a=transpose_a, transpose_b=transpose_b):
                    return (a.swapaxes(-1, -2) if transpose_a else a) @ (b.swapaxes(-1, -2) if transpose_b else b)

                check(lambda a, b, ta=transpose_a, tb=transpose_b: ops.matmul(a, b, ta, tb), reference, [a, b], dtype)


def _raw_linear(dtype):
    x, w, dy = (tensor(_normal(6, 2, 5), dtype), tensor(_normal(4, 5, seed=1), dtype), tensor(_normal(6, 2, 4, seed=2), dtype))
    tolerance = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.2e-2}[dtype]
    flat = values(dy).reshape(-1, 4), values(x).reshape(-1, 5)
    assert_close(values(ops.linear_forward(x, w)), values(x) @ values(w).T, tolerance, "forward")
    assert_close(values(ops.linear_input_grad(dy, w)), values(dy) @ values(w), tolerance, "input grad")
    assert_close(values(ops.linear_weight_grad(dy, x)), flat[0].T @ flat[1], tolerance, "weight grad")
    assert_close(values(ops.bias_grad(dy)), flat[0].sum(0), tolerance, "bias grad")
    total = values(dy) + values(x) @ values(w).T
    assert_close(values(ops.add_linear(tensor(values(dy), dtype), x, w)), total, tolerance, "added product")
    assert_close(values(ops.linear_input_grad(dy, w, any_order=True)), values(dy) @ values(w), tolerance, "in any order")
    total = values(x) + values(dy) @ values(w)
    assert_close(values(ops.add_linear_input_grad(tensor(values(x), dtype), dy, w)), total, tolerance, "added input grad")
    assert_close(values(ops.narrow_weight_grad(dy, x)), flat[0].T @ flat[1], tolerance, "narrow weight grad")
    turned = ops.narrow_weight_grad(dy, x, transposed=True)
    assert_close(values(turned), flat[1].T @ flat[0], tolerance, "narrow weight grad, transposed")
    assert_close(values(ops.scaled(x, 0.3)), 0.3 * values(x), tolerance, "scaled")
    main_grad = storage.FlatBuffer(30, "float32").slice(5, 25, (4, 5))
    for times in (1, 2):
        assert ops.linear_weight_grad(dy, x, main_grad) is main_grad
        assert_close(values(main_grad), times * flat[0].T @ flat[1], 2e-6, "accumulated weight grad")
    ops.linear_weight_grad(dy, x, main_grad, overwrite=True)
    assert_close(values(main_grad), flat[0].T @ flat[1], 2e-6, "overwritten weight grad")


def _low_rank(dtype):
    """More tokens and columns than a thread or a panel takes."""
    x, w, dy = (tensor(_normal(*shape, seed=1), dtype) for shape in ((70, 2, 3), (150, 3), (70, 2, 150)))
    tolerance = {"float32": 5e-6, "float16": 2e-3, "bfloat16": 1.2e-2}[dtype]
    total = values(dy) + values(x) @ values(w).T
    assert_close(values(ops.add_linear(tensor(values(dy), dtype), x, w)), total, tolerance, "added product")
    total = values(x) + values(dy) @ values(w)
    assert_close(values(ops.add_linear_input_grad(tensor(values(x), dtype), dy, w)), total, tolerance, "added input grad")
    total = values(x).reshape(140, 3).T @ values(dy).reshape(140, 150)
    assert_close(values(ops.narrow_weight_grad(x, dy)), total, tolerance, "narrow weight grad")


def _views(_):
    base = tensor(_normal(4, 3, 6))
    view = base[1:3]
    turned = base.transpose(1, 0, 2)
    w = tensor(_normal(5, 6, seed=1))
    assert_close(values(ops.linear(view, w)), values(base)[1:3] @ values(w).T, 2e-6, "slice")
    assert_close(values(ops.linear(turned, w)), values(base).swapaxes(0, 1) @ values(w).T, 2e-6, "transposed")
    assert_close(values(ops.silu(turned)), references.activation("silu")(values(base).swapaxes(0, 1)), 2e-6, "silu of a view")


def _embedding(dtype):
    ids = np.array([[3, 4, 9, 4], [0, 5, 6, 4]])

    def reference(w):
        held = (ids >= 3) & (ids < 7)
        return np.where(held[..., None], w[np.clip(ids - 3, 0, 3)], 0.0)

    check(lambda w: ops.embedding_lookup(w, Tensor(ids, ms.int32), 3, 7, 10), reference, [_normal(4, 5)], dtype)
    weight = tensor(_normal(4, 5), dtype)
    for bad in (10, -1):
        with pytest.raises(ValueError, match=f"token id {bad} .* outside the vocabulary of 10"):
            ops.embedding_lookup(weight, Tensor(np.array([0, bad]), ms.int64), 3, 7, 10)


def _norms(dtype):
    x, gamma, beta = 3 * _normal(3, 2, 8) + 1, 1 + 0.1 * _normal(8, seed=1), _normal(8, seed=2)
    check(lambda x, g, b: ops.layer_norm(x, g, b, 1e-5), references.layer_norm, [x, gamma, beta], dtype)
    check(lambda x, g: ops.rms_norm(x, g, 1e-6), references.rms_norm, [x, gamma], dtype)

    residual, bias, weight = (tensor(array, dtype) for array in (_normal(3, 2, 8, seed=3), beta, gamma))
    with autograd.no_grad():
        for shift in (None, bias):
            total, normed = ops.add_rms_norm(tensor(x, dtype), shift, residual, weight, 1e-6)
            expected = ops.bias_dropout_add(tensor(x, dtype), shift, residual)
            assert_close(values(total), values(expected), 1e-6, "sum")
            tolerance = 1e-6 if dtype == "float32" else 2e-2  # the norm is of the sum before it is rounded
            assert_close(values(normed), values(ops.rms_norm(expected, weight, 1e-6)), tolerance, "norm of the sum")


def _activations(dtype):
    for name in ops.ACTIVATION_NAMES:
        x, bias = 2 * _normal(3, 2, 8), _normal(8, seed=1)
        reference = references.activation(name)
        check(lambda x, b, n=name: ops.bias_activation(x, b, n), lambda x, b, f=reference: f(x + b), [x, bias], dtype)
        check(lambda x, n=name: ops.bias_activation(x, None, n), reference, [x], dtype)
    wide = 4 * x
    clamped = references.clamped_swiglu
    check(
        lambda x, b: ops.bias_activation(x, b, "clamped_swiglu", limit=1.5, alpha=1.25),
        lambda x, b: clamped(x + b, 1.5, 1.25),
        [wide, bias],
        dtype,
    )


def _rotary(dtype):
    for rot, angle_batch, interleaved in ((8, 1, False), (4, 2, False), (8, 2, True), (6, 1, True)):
        angles = _normal(5, angle_batch, 1, rot, seed=1)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        check(
            lambda t, c=cos, s=sin, i=interleaved: ops.apply_rotary(t, Tensor(c), Tensor(s), i),
            lambda t, c=cos, s=sin, i=interleaved: references.rotary(t, c.astype(float), s.astype(float), i),
            [_normal(5, 2, 3, 8)],
            dtype,
        )


def _split(dtype):
    def reference(mixed):
        parts = mixed.reshape(3, 2, 2, 5, 4)
        return parts[:, :, :, :3].reshape(3, 2, 6, 4), parts[:, :, :, 3], parts[:, :, :, 4]

    check(lambda m: ops.split_query_key_value(m, 2, 3, 4), reference, [_normal(3, 2, 40)], dtype)
    for rot, angle_batch, interleaved in ((4, 1, False), (2, 2, True)):
        angles = _normal(3, angle_batch, 1, rot, seed=1)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

        def rotated(mixed, c=cos, s=sin, i=interleaved):
            query, key, value = reference(mixed)
            tables = c.astype(float), s.astype(float), i
            return references.rotary(query, *tables), references.rotary(key, *tables), value

        tables = Tensor(cos), Tensor(sin), interleaved
        check(lambda m, t=tables: ops.split_query_key_value(m, 2, 3, 4, t), rotated, [_normal(3, 2, 40)], dtype)


def _split_and_rotation_in_one(_):
    mixed, angles = tensor(_normal(3, 2, 80)), _normal(3, 1, 1, 6, seed=1)
    for interleaved in (False, True):
        tables = Tensor(np.cos(angles).astype(np.float32)), Tensor(np.sin(angles).astype(np.float32)), interleaved
        query, key, value = ops.split_query_key_value(mixed, 2, 3, 8)
        apart = ops.apply_rotary(query, *tables), ops.apply_rotary(key, *tables), value
        for one, other in zip(ops.split_query_key_value(mixed, 2, 3, 8, tables), apart):
            assert (one.asnumpy() == other.asnumpy()).all()


def _dropouts(dtype):
    keep = np.random.default_rng(5).random((3, 2, 8)) < 0.7
    mask = Tensor(keep)
    x, bias, residual = _normal(3, 2, 8), _normal(8, seed=1), _normal(3, 2, 8, seed=2)
    scaled = keep / 0.7
    check(lambda x: ops.dropout(x, 0.3, mask), lambda x: x * scaled, [x], dtype)
    check(
        lambda x, b, r: ops.bias_dropout_add(x, b, r, 0.3, mask),
        lambda x, b, r: r + (x + b) * scaled,
        [x, bias, residual],
        dtype,
    )
    check(lambda x, b, r: ops.bias_dropout_add(x, b, r), lambda x, b, r: r + x + b, [x, bias, residual], dtype)
    check(lambda x, r: ops.bias_dropout_add(x, None, r, 0.3, mask), lambda x, r: r + x * scaled, [x, residual], dtype)
    check(ops.residual_add, lambda x, r: x + r, [x, residual], dtype)
    with pytest.raises(ValueError, match="without a keep mask"):
        ops.dropout(tensor(x, dtype), 0.3, None)


def _float32_residual(dtype):
    x, residual = tensor(_normal(3, 4), dtype), tensor(_normal(3, 4, seed=1))
    leaf = autograd.set_requires_grad(x)
    output = ops.residual_add(leaf, residual)
    assert output.dtype == ms.float32
    (grad,) = autograd.grad(output, leaf, tensor(np.ones((3, 4))))
    assert grad.dtype == x.dtype
    assert_close(values(output), values(x) + values(residual), 1e-6, "sum")


CASES = (
    _linear,
    _matmul,
    _raw_linear,
    _low_rank,
    _embedding,
    _norms,
    _activations,
    _rotary,
    _split,
    _dropouts,
    _float32_residual,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[1:])
def test_values_and_gradients(world, case, dtype):
    world(1)(case, dtype)


def test_split_and_rotation_in_one_give_the_same_bits(world):
    world(1)(_split_and_rotation_in_one, None)


def test_views_are_read_with_their_strides(world):
    world(1)(_views, None)
