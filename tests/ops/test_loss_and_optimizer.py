"""Cross entropy pieces, optimizer steps and gradient handling against float64 references."""

import numpy as np
import pytest
from mindspore import Tensor

from mindspeed_ms import ops
from mindspeed_ms.core import storage
from tests.ops.harness import assert_close, tensor, values


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def _cross_entropy(dtype, smoothing):
    size, parts = 12, ((0, 5), (5, 12))
    logits = tensor(4 * _normal(3, 2, size), dtype)
    target = np.array([[0, 4], [5, 11], [7, 2]])
    weight = _normal(3, 2, seed=1)
    exact = values(logits)
    shards = [tensor(exact[..., a:b], dtype) for a, b in parts]
    maximum = Tensor(np.maximum(*(values(ops.cross_entropy_local_max(shard)) for shard in shards)).astype(np.float32))
    assert_close(values(maximum), exact.max(-1), 0.0, "maximum")
    sums = [
        ops.cross_entropy_local_sums(shard, maximum, Tensor(target), a, b, smoothing)
        for shard, (a, b) in zip(shards, parts, strict=True)
    ]
    shifted = exact - exact.max(-1, keepdims=True)
    sum_exp = sum(values(s[0]) for s in sums)
    assert_close(sum_exp, np.exp(shifted).sum(-1), 1e-6, "sum of exponentials")
    assert_close(
        sum(values(s[1]) for s in sums), np.take_along_axis(shifted, target[..., None], -1)[..., 0], 1e-6, "target logit"
    )
    if smoothing:
        assert_close(sum(values(s[2]) for s in sums), shifted.sum(-1), 1e-6, "sum of logits")
    else:
        assert sums[0][2] is None
    softmax = np.exp(shifted) / np.exp(shifted).sum(-1, keepdims=True)
    spread = smoothing * size / (size - 1)
    expected = (softmax - (1 - spread) * np.eye(size)[target] - spread / size) * weight[..., None]
    total = Tensor(sum_exp.astype(np.float32))
    target_logit = tensor(sum(values(s[1]) for s in sums))
    logit_sum = tensor(sum(values(s[2]) for s in sums)) if smoothing else None
    loss = values(ops.cross_entropy_loss(total, target_logit, logit_sum, smoothing, size))
    log_softmax = np.log(softmax)
    target_loss = -np.take_along_axis(log_softmax, target[..., None], -1)[..., 0]
    assert_close(loss, (1 - spread) * target_loss - spread * log_softmax.mean(-1), 1e-6, "loss")
    tolerance = {"float32": 2e-6, "float16": 1.5e-3, "bfloat16": 1e-2}[dtype]
    for in_place in (False, True):
        grads = [
            ops.cross_entropy_gradient(shard, maximum, total, Tensor(target), a, b, tensor(weight), smoothing, size, in_place)
            for shard, (a, b) in zip(shards, parts, strict=True)
        ]
        assert grads[0].dtype == logits.dtype
        assert_close(np.concatenate([values(g) for g in grads], -1), expected, tolerance, "gradient")
    with pytest.raises(ValueError, match="logits over 5 ids"):
        ops.cross_entropy_local_sums(shards[0], maximum, Tensor(target), 0, 6)


@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
@pytest.mark.parametrize("smoothing", (0.0, 0.1))
def test_cross_entropy_over_a_split_vocabulary(world, dtype, smoothing):
    world(1)(_cross_entropy, dtype, smoothing)


def _adamw(size):
    names = ("parameter", "exp_avg", "exp_avg_sq")
    buffer = storage.FlatBuffer(3 * size + 2, "float32")
    states = [buffer.slice(1 + k * size, 1 + (k + 1) * size) for k in range(3)]
    start = _normal(size)
    storage.write(states[0], tensor(start))
    exact = [values(s) for s in states]
    for step in (1, 2, 3):
        grad = tensor(_normal(size, seed=step))
        ops.adamw_step(
            *states, grad, learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step, grad_scale=0.5
        )
        p, m, v = exact
        g = values(grad) * 0.5
        p = p * (1 - 1e-2 * 0.1)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        p = p - 1e-2 / (1 - 0.9**step) * m / (np.sqrt(v) / np.sqrt(1 - 0.95**step) + 1e-8)
        exact = [p, m, v]
    for name, state, right in zip(names, states, exact, strict=True):
        assert_close(values(state), right, 1e-6, name)
    edges = values(buffer.tensor)[[0, -1]]
    assert (edges == 0).all(), "a step wrote outside its slices"
    with pytest.raises(ValueError, match="steps count from 1"):
        ops.adamw_step(*states, grad, learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=0)
    with pytest.raises(ValueError, match="elements"):
        ops.adamw_step(
            *states, tensor(np.zeros(3)), learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1
        )


@pytest.mark.parametrize("size", (5, 700001))
def test_adamw(world, size):
    world(1)(_adamw, size)


def _sgd():
    parameter, momentum = storage.FlatBuffer(50, "float32").tensor, storage.FlatBuffer(50, "float32").tensor
    storage.write(parameter, tensor(_normal(50)))
    p, m = values(parameter), None
    for step in range(3):
        grad = tensor(_normal(50, seed=step + 1))
        ops.sgd_step(parameter, momentum, grad, learning_rate=0.1, momentum=0.9, weight_decay=0.01, first_step=step == 0)
        g = values(grad) + 0.01 * p
        m = g if m is None else 0.9 * m + g
        p = p - 0.1 * m
    assert_close(values(parameter), p, 1e-6, "with momentum")
    ops.sgd_step(parameter, None, grad, learning_rate=0.1, grad_scale=2.0)
    assert_close(values(parameter), p - 0.2 * values(grad), 1e-6, "plain")


def test_sgd(world):
    world(1)(_sgd)


def _flat_operations():
    rng = np.random.default_rng(0)
    array = rng.normal(size=300001).astype(np.float32)
    array[::7] = 0
    for dtype in ("float32", "float16", "bfloat16"):
        flat = storage.FlatBuffer(array.size, dtype).tensor
        storage.write(flat, tensor(array, dtype))
        exact = values(flat)
        total = (exact**2).sum()
        assert abs(ops.sum_of_squares(flat) - total) < 1e-12 * total
        assert ops.count_zeros(flat) == int((exact == 0).sum())
        ops.scale_in_place(flat, 0.25)
        assert_close(values(flat), exact * 0.25, 1e-7, "scaled")
        ops.add_into(flat, tensor(array))
        rounding = {"float32": 1e-7, "float16": 5e-4, "bfloat16": 4e-3}[dtype]
        assert_close(values(flat), exact * 0.25 + array, rounding, "sum")


def test_flat_operations(world):
    world(1)(_flat_operations)
