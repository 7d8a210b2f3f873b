"""Sizes at which kernels are cut into pieces for several threads and memory comes from the pool."""

import threading

import numpy as np
import pytest
from mindspore import Tensor

from mindspeed_ms import ops
from mindspeed_ms.core import autograd
from mindspeed_ms.ops.cpu import threads
from mindspeed_ms.ops.cpu.compiler import kernel
from tests.ops import references
from tests.ops.harness import TOLERANCE, assert_close, tensor, values


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def _with_threads(number, function):
    threads._threads = number
    try:
        return function()
    finally:
        threads._threads = 0


def _run(function, arrays):
    leaves = [autograd.set_requires_grad(tensor(a)) for a in arrays]
    output = function(*leaves)
    grads = autograd.grad(output, leaves, tensor(_normal(*output.shape, seed=77)))
    return [values(t) for t in (output, *grads)]


def _cases():
    x, hidden = _normal(400, 2, 384), _normal(384, seed=1)
    ids = Tensor(np.random.default_rng(0).integers(0, 1000, (600, 2)))
    return {
        "rms_norm": (ops.rms_norm, [x, hidden]),
        "layer_norm": (ops.layer_norm, [x, hidden, hidden]),
        "bias_activation": (lambda x, b: ops.bias_activation(x, b, "gelu_tanh"), [x, hidden]),
        "swiglu": (ops.swiglu, [x]),
        "embedding_lookup": (lambda w: ops.embedding_lookup(w, ids), [_normal(1000, 300)]),
        "core_attention": (
            lambda q, k, v: ops.core_attention(q, k, v, causal=True),
            [_normal(250, 2, 4, 32, seed=s) for s in range(3)],
        ),
        "residual_add": (ops.residual_add, [x, x]),
    }


def _same_with_any_number_of_threads():
    for name, (function, arrays) in _cases().items():
        one, three = (_with_threads(n, lambda f=function, a=arrays: _run(f, a)) for n in (1, 3))
        for left, right in zip(one, three, strict=True):
            assert (left == right).all(), f"{name} depends on the number of threads"


def test_results_do_not_depend_on_the_number_of_threads(world):
    world(1)(_same_with_any_number_of_threads)


def _accurate():
    x, weight = _normal(400, 2, 384), _normal(384, seed=1)
    output, x_grad, weight_grad = _with_threads(2, lambda: _run(ops.rms_norm, [x, weight]))
    x, weight, g = values(tensor(x)), values(tensor(weight)), values(tensor(_normal(*x.shape, seed=77)))
    assert_close(output, references.rms_norm(x, weight), 1e-6, "output")
    inverse = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    assert_close(weight_grad, (g * x * inverse).sum((0, 1)), 1e-6, "weight gradient")
    expected = inverse * (g * weight - x * inverse**2 * (g * weight * x).mean(-1, keepdims=True))
    assert_close(x_grad, expected, 1e-6, "input gradient")
    arrays = [_normal(250, 2, 4, 32, seed=s) for s in range(3)]
    output, *grads = _with_threads(2, lambda: _run(lambda q, k, v: ops.core_attention(q, k, v, causal=True), arrays))
    exact, hidden = [values(tensor(a)) for a in arrays], references.band(250, 250, -999, 0)
    assert_close(output, references.attention(*exact, hidden, 32**-0.5), 1e-6, "attention")
    expected = references.attention_gradients(*exact, hidden, 32**-0.5, values(tensor(_normal(*output.shape, seed=77))))
    for grad, right in zip(grads, expected, strict=True):
        assert_close(grad, right, 2e-6, "attention gradient")


def test_large_results_are_accurate(world):
    world(1)(_accurate)


@kernel
def _count(start, stop, counts, bad):
    for i in range(start, stop):
        counts[i] += 1
        if i == bad:
            raise ValueError("piece failed")


def _pieces():
    for number in (1, 2, 5):
        for total in (0, 1, 7, 1000):
            counts = np.zeros(total + 1, np.int64)
            _with_threads(number, lambda t=total, c=counts: [threads.run(_count, t, 10**9, c, -1) for _ in range(20)])
            assert (counts[:total] == 20).all() and counts[total] == 0, f"{total} pieces on {number} threads"
        with pytest.raises(RuntimeError, match="a piece of the kernel _count failed"):
            _with_threads(number, lambda: threads.run(_count, 1000, 10**9, np.zeros(1000, np.int64), 613))


def test_every_piece_runs_once_and_failures_are_raised(world):
    world(1)(_pieces)


def _two_starters():
    """Threads that start jobs at the same time: one has the helpers, the other works alone."""
    counts = np.zeros((2, 4000), np.int64)

    def start(row):
        for _ in range(300):
            threads.run(_count, 3999, 10**9, counts[row], -1)

    def both():
        starters = [threading.Thread(target=start, args=(row,)) for row in range(2)]
        for starter in starters:
            starter.start()
        for starter in starters:
            starter.join()

    _with_threads(3, both)
    assert (counts[:, :3999] == 300).all()


def test_two_threads_start_jobs_at_the_same_time(world):
    world(1)(_two_starters)


def _falling_asleep():
    """A helper that says it sleeps looks at the board once more: a job begun before anybody saw that is not missed."""
    from unittest import mock

    helper, looked = threads._Helper(0), []
    helper.wake.release(3)

    def look(board, rounds):
        looked.append((helper.is_asleep, rounds))
        if len(looked) == 3:
            raise InterruptedError

    with mock.patch.object(threads.jobs, "help_until_idle", look), pytest.raises(InterruptedError):
        helper.run()
    assert [is_asleep for is_asleep, _ in looked[:2]] == [False, True] and 0 < looked[1][1] < looked[0][1]


def test_helpers_miss_no_job_while_they_fall_asleep(world):
    world(1)(_falling_asleep)


def _beginnings():
    from mindspeed_ms.ops.cpu import arrays

    places = [arrays.empty(shape).__array_interface__["data"][0] for shape in [(64, 576)] * 5 + [40_001] * 5]
    assert all(place % 64 == 0 for place in places)
    assert arrays.empty((3, 5, 7)).shape == (3, 5, 7) and arrays.empty((300, 5, 7)).shape == (300, 5, 7)


def test_large_arrays_begin_at_a_cache_line(world):
    world(1)(_beginnings)


def _few_tokens():
    for inputs, outputs in ((70, 13), (16, 6), (5, 1), (576, 40)):
        weight, bias = _normal(outputs, inputs), _normal(outputs, seed=3)
        for dtype in ("float32", "bfloat16"):
            w, b = tensor(weight, dtype), tensor(bias, dtype)
            for tokens in (1, 3, 4, 9, 64):
                x = tensor(_normal(tokens, inputs, seed=tokens), dtype)
                y = values(ops.linear_forward(x, w, b))
                expected = values(x).astype(np.float64) @ values(w).astype(np.float64).T + values(b)
                assert_close(y, expected, TOLERANCE[dtype], f"{tokens} tokens, {inputs} to {outputs}")
                last = tensor(values(x)[-1:], dtype)
                assert (values(ops.linear_forward(last, w, b))[0] == y[-1]).all(), "a token depends on those beside it"


def test_few_tokens_are_exact_and_each_as_alone(world):
    world(1)(_few_tokens)


def _deep_products():
    from mindspeed_ms.ops.cpu import linear

    weight, g = _normal(4096, 300), _normal(5, 4096, seed=1)
    w, dy, product, calls = tensor(weight), tensor(g), linear._product, []
    linear._product = lambda *arguments: calls.append(arguments) or product(*arguments)
    try:
        for any_order, count in ((True, 0), (False, 1)):
            found = values(ops.linear_input_grad(dy, w, any_order))
            assert_close(found, values(dy).astype(np.float64) @ values(w).astype(np.float64), 1e-5, "deep input grad")
            assert len(calls) == count
    finally:
        linear._product = product


def test_deep_input_gradients_in_any_order_are_by_blas(world):
    world(1)(_deep_products)
