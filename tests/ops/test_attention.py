"""Softmax, plain and blockwise attention against float64 references."""

import numpy as np
import pytest
from mindspore import Tensor

from mindspeed_ms import ops
from mindspeed_ms.core import autograd
from tests.ops import references
from tests.ops.harness import assert_close, check, tensor, values

DTYPES = ("float32", "float16", "bfloat16")


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def _softmax(dtype):
    scores = 2 * _normal(2, 3, 5, 7)
    mask = np.random.default_rng(3).random((2, 1, 5, 7)) < 0.3
    mask[1, 0, 2] = True  # a query that sees nothing
    cases = (
        (None, False, None, None, (-99, 99)),
        (mask, False, None, None, (-99, 99)),
        (None, True, None, None, (-99, 2)),
        (mask[:1], True, 3, 1, (-3, 1)),
        (mask[0, 0], False, 1, None, (-1, 99)),
    )
    for blocked, causal, before, after, (lower, upper) in cases:
        hidden = references.band(5, 7, lower, upper)
        hidden = hidden if blocked is None else hidden | blocked

        def operator(s, blocked=blocked, causal=causal, before=before, after=after):
            return ops.scaled_masked_softmax(s, None if blocked is None else Tensor(blocked), 0.5, causal, before, after)

        check(operator, lambda s, hidden=hidden: references.softmax(0.5 * s, hidden), [scores], dtype)


def _compare_attention(operator, blocked, arrays, dtype="float32", scale=None, keep=None):
    scale = arrays[0].shape[3] ** -0.5 if scale is None else scale
    check(
        operator,
        lambda q, k, v: references.attention(q, k, v, blocked, scale, keep),
        arrays,
        dtype,
        2.0,
        lambda q, k, v, g: references.attention_gradients(q, k, v, blocked, scale, g, keep),
    )


def _core(dtype):
    q, k, v = _normal(5, 2, 4, 8), _normal(7, 2, 2, 8, seed=1), _normal(7, 2, 2, 8, seed=2)
    mask = np.random.default_rng(3).random((2, 1, 5, 7)) < 0.3
    everything = references.band(5, 7, -99, 99)
    keep = np.random.default_rng(4).random((2, 4, 5, 7)) < 0.8
    _compare_attention(ops.core_attention, everything, [q, k, v], dtype)
    _compare_attention(
        lambda q, k, v: ops.core_attention(q, k, v, causal=True, scale=0.2, softmax_scale=3.0),
        references.band(5, 7, -99, 2),
        [q, k, v],
        dtype,
        0.6,
    )
    _compare_attention(
        lambda q, k, v: ops.core_attention(q, k, v, Tensor(mask), pre_tokens=2, next_tokens=3),
        mask | references.band(5, 7, -2, 3),
        [q, k, v],
        dtype,
    )
    _compare_attention(
        lambda q, k, v: ops.core_attention(q, k, v, dropout_p=0.2, dropout_mask=Tensor(keep)),
        everything,
        [q, k, v],
        dtype,
        None,
        keep / 0.8,
    )


def _flash(dtype):
    q, k, v = _normal(5, 2, 4, 8), _normal(7, 2, 2, 8, seed=1), _normal(7, 2, 2, 8, seed=2)
    mask = np.random.default_rng(3).random((2, 1, 5, 7)) < 0.3
    everything = references.band(5, 7, -99, 99)
    cases = (
        ({}, everything),
        ({"mask": mask, "pre_tokens": 2, "next_tokens": 1}, mask | references.band(5, 7, -2, 1)),
        ({"pre_tokens": 2, "next_tokens": 1}, everything),  # without a mask, mode 0 ignores the band
        ({"mask": mask, "sparse_mode": 1, "pre_tokens": 0}, mask),
        ({"sparse_mode": 2}, references.band(5, 7, -99, 0)),
        ({"sparse_mode": 3}, references.band(5, 7, -99, 2)),
        ({"sparse_mode": 4, "pre_tokens": 3, "next_tokens": 1, "mask": mask}, references.band(5, 7, -1, 3)),
    )
    for options, blocked in cases:

        def operator(q, k, v, options=options):
            options = {**options, "mask": Tensor(options["mask"])} if "mask" in options else options
            return ops.flash_attention(q, k, v, **options)

        _compare_attention(operator, blocked, [q, k, v], dtype)


def _wide_values_and_sinks(dtype):
    """Values of another width than keys (wider and narrower), and a score of each head without a value."""
    sinks = np.array([3.0, -1.0, 0.5, 9.0])
    keep = np.random.default_rng(4).random((2, 4, 5, 7)) < 0.8
    blocked = references.band(5, 7, -99, -1)  # the first query sees nothing
    for width in (12, 4):
        arrays = _normal(5, 2, 4, 8), _normal(7, 2, 2, 8, seed=1), _normal(7, 2, 2, width, seed=2)
        _compare_attention(lambda q, k, v: ops.core_attention(q, k, v, next_tokens=-1), blocked, arrays, dtype)
        check(
            lambda q, k, v, s: ops.core_attention(
                q, k, v, next_tokens=-1, dropout_p=0.2, dropout_mask=Tensor(keep), softmax_scale=2.0, scale=0.2, sinks=s
            ),
            lambda q, k, v, s: references.attention(q, k, v, blocked, 0.4, keep / 0.8, s),
            [*arrays, sinks],
            dtype,
            2.0,
            lambda q, k, v, s, g: references.attention_gradients(q, k, v, blocked, 0.4, g, keep / 0.8, s),
        )
        check(
            lambda q, k, v, s: ops.flash_attention(q, k, v, sparse_mode=4, pre_tokens=1, next_tokens=0, sinks=s),
            lambda q, k, v, s: references.attention(q, k, v, references.band(5, 7, 1, 2), 8**-0.5, None, s),
            [*arrays, sinks],
            dtype,
            2.0,
            lambda q, k, v, s, g: references.attention_gradients(q, k, v, references.band(5, 7, 1, 2), 8**-0.5, g, None, s),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", (_softmax, _core, _flash, _wide_values_and_sinks), ids=lambda case: case.__name__[1:])
def test_values_and_gradients(world, case, dtype):
    world(1)(case, dtype)


def _many_blocks(queries, keys, groups, lower, upper, options):
    q, k, v = _normal(queries, 1, 4, 16), _normal(keys, 1, groups, 16, seed=1), _normal(keys, 1, groups, 16, seed=2)
    q = 3 * q  # a spread of scores that makes the running maximum move
    _compare_attention(
        lambda q, k, v: ops.flash_attention(q, k, v, **options), references.band(queries, keys, lower, upper), [q, k, v]
    )


@pytest.mark.parametrize(
    ("queries", "keys", "groups", "lower", "upper", "options"),
    (
        (200, 1100, 2, -9999, 9999, {}),
        (333, 333, 4, -9999, 0, {"sparse_mode": 2}),
        (150, 1300, 1, -9999, 1150, {"sparse_mode": 3}),
        (700, 700, 4, -40, 25, {"sparse_mode": 4, "pre_tokens": 40, "next_tokens": 25}),
        (130, 70, 2, -9999, -60, {"sparse_mode": 3}),  # the first queries see nothing
    ),
)
def test_flash_attention_over_many_blocks(world, queries, keys, groups, lower, upper, options):
    world(1)(_many_blocks, queries, keys, groups, lower, upper, options)


def _seeded_dropout():
    q, k, v = (tensor(_normal(96, 2, 2, 8, seed=seed)) for seed in (0, 1, 2))
    leaf = autograd.set_requires_grad(v)
    ones = tensor(np.ones((96, 2, 2, 8)))
    # with values all one the output is the kept share of each query's probabilities
    share = values(ops.flash_attention(q, k, ones, keep_prob=0.75, dropout_seed=11))
    again = values(ops.flash_attention(q, k, ones, keep_prob=0.75, dropout_seed=11))
    other = values(ops.flash_attention(q, k, ones, keep_prob=0.75, dropout_seed=12))
    assert (share == again).all() and (share != other).any()
    assert abs(share.mean() - 1) < 0.03 and share.std() > 0.01
    # the backward must drop what the forward dropped: the output is linear in the values
    g = _normal(96, 2, 16, seed=3)
    output = ops.flash_attention(q, k, leaf, keep_prob=0.75, dropout_seed=11)
    (grad,) = autograd.grad(output, leaf, tensor(g))
    assert_close(
        np.array((values(output) * values(tensor(g))).sum()), np.array((values(grad) * values(v)).sum()), 1e-5, "<o,g>"
    )
    # and its gradient in q is that of a fixed pattern: compare with a difference quotient
    q_leaf = autograd.set_requires_grad(tensor(values(q)))
    direction = _normal(96, 2, 2, 8, seed=4)
    output = ops.flash_attention(q_leaf, k, v, keep_prob=0.75, dropout_seed=11)
    (grad,) = autograd.grad(output, q_leaf, tensor(g))
    step = 3e-3
    sides = [
        values(ops.flash_attention(tensor(values(q) + sign * step * direction), k, v, keep_prob=0.75, dropout_seed=11))
        for sign in (1, -1)
    ]
    quotient = ((sides[0] - sides[1]) * g).sum() / (2 * step)
    assert_close(np.array((values(grad) * direction).sum()), np.array(quotient), 2e-3, "directional derivative")


def test_seeded_dropout_is_repeated_in_the_backward(world):
    world(1)(_seeded_dropout)


def _errors():
    q = tensor(_normal(4, 1, 3, 8))
    two = tensor(_normal(4, 1, 2, 8))
    mask = Tensor(np.zeros((4, 3), np.bool_))
    attempts = (
        (lambda: ops.core_attention(q, two, two), "multiple of the groups"),
        (lambda: ops.core_attention(q, q, two), "expected"),
        (lambda: ops.core_attention(q, q, q, sinks=tensor(_normal(2))), "one for each of 3 query heads"),
        (lambda: ops.core_attention(q, q, q, mask), "a mask of shape"),
        (lambda: ops.core_attention(q, q, q, dropout_p=0.1), "dropout_mask None"),
        (lambda: ops.flash_attention(q, q, q, input_layout="TND"), "input_layout='TND'"),
        (lambda: ops.flash_attention(q, q, q, sparse_mode=5), "sparse_mode=5"),
        (lambda: ops.flash_attention(q, q, q, sparse_mode=1), "without a mask"),
        (lambda: ops.flash_attention(q, q, q, keep_prob=0.5), "without dropout_seed"),
        (lambda: ops.apply_rotary(q, two, two), "apply_rotary"),
        (lambda: ops.split_query_key_value(tensor(_normal(2, 1, 9)), 1, 1, 4), "expected"),
    )
    for attempt, text in attempts:
        with pytest.raises(ValueError, match=text):
            attempt()


def test_bad_arguments_are_named(world):
    world(1)(_errors)
