"""Attention to parts of the keys: merged parts and their gradients against float64 references."""

import itertools

import numpy as np
import pytest
from mindspore import Tensor

from mindspeed_ms import ops
from tests.ops import references
from tests.ops.harness import TOLERANCE, assert_close, tensor, values

QUERIES, KEYS, WIDTH = 150, 1300, 24


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def _visible(kind, queries=QUERIES, keys=KEYS):
    """First visible key and the one after the last, int32 [1 or 2, queries]."""
    places = np.arange(queries, dtype=np.int32)
    if kind == "all":
        first, stop = np.zeros_like(places), np.full_like(places, keys)
    elif kind == "causal":
        first, stop = np.zeros_like(places), np.minimum(places * (keys // queries) + 1, keys)
    elif kind == "window":
        first, stop = np.maximum(0, places * 8 - 700), np.minimum(places * 8 + 40, keys)
    else:  # documents, and queries that see nothing
        first = np.stack([places // 50 * 400, np.zeros_like(places)])
        stop = np.stack([places // 50 * 400 + 380, np.where(places % 7, 90, 0)])
        return first.astype(np.int32), np.maximum(first, stop).astype(np.int32)
    return first[None].astype(np.int32), stop[None].astype(np.int32)


def _hidden(first, stop, keys):
    columns = np.arange(keys)
    return ((columns < first[..., None]) | (columns >= stop[..., None]))[:, None]


def _in_parts(kind, dtype, bounds, with_mask):
    """One call for each part of the keys, in an order that mixes them, equals attention over all keys."""
    arrays = [3 * _normal(QUERIES, 2, 4, 16), _normal(KEYS, 2, 2, 16, seed=1), _normal(KEYS, 2, 2, WIDTH, seed=2)]
    q, k, v = tensors = [tensor(array, dtype) for array in arrays]
    exact = [values(t) for t in tensors]
    first, stop = _visible(kind)
    mask = np.random.default_rng(3).random((2, 1, QUERIES, KEYS)) < 0.3 if with_mask else None
    hidden = _hidden(first, stop, KEYS) if mask is None else _hidden(first, stop, KEYS) | mask
    output_grad = tensor(_normal(QUERIES, 2, 4, WIDTH, seed=5), dtype)
    parts, result, grads = list(itertools.pairwise(bounds))[::-1], None, None

    def part(start, end):
        places = (np.clip(a - start, 0, end - start).astype(np.int32) for a in (first, stop))
        return k[start:end], v[start:end], *places, None if mask is None else Tensor(mask[..., start:end].copy()), 0.25

    for start, end in parts:
        result = ops.attention_with_statistics(q, *part(start, end), before=result)
    key_grad, value_grad, query_grad = np.zeros_like(exact[1]), np.zeros_like(exact[2]), None
    for start, end in parts:
        keys, vals, *rest = part(start, end)
        shape = [np.zeros(t.shape, np.float32) for t in (keys, vals)]
        before = None if query_grad is None else (query_grad, *(tensor(a) for a in shape))
        grads = ops.attention_with_statistics_gradient(output_grad, q, keys, vals, *result, *rest, before=before)
        query_grad, key_grad[start:end], value_grad[start:end] = grads[0], values(grads[1]), values(grads[2])
    expected = references.attention(*exact, hidden, 0.25).reshape(QUERIES, 2, 4, WIDTH)
    exact_grads = references.attention_gradients(*exact, hidden, 0.25, values(output_grad))
    tolerance = 2 * TOLERANCE["float32"]
    assert_close(values(result[0]), expected, tolerance, "output")
    for name, grad, right in zip("qkv", (values(query_grad), key_grad, value_grad), exact_grads):
        assert_close(grad, right, 3 * tolerance, f"gradient of {name}")


CASES = (
    ("all", "float32", (0, KEYS), False),
    ("causal", "float32", (0, 500, 501, KEYS), False),
    ("window", "float32", (0, 640, KEYS), False),
    ("documents", "float32", (0, 400, 900, KEYS), True),
    ("causal", "float16", (0, 700, KEYS), True),
    ("documents", "bfloat16", (0, 700, KEYS), False),
)


@pytest.mark.parametrize(("kind", "dtype", "bounds", "with_mask"), CASES)
def test_parts_are_the_whole(world, kind, dtype, bounds, with_mask):
    world(1)(_in_parts, kind, dtype, bounds, with_mask)


def _far_apart():
    """Scores of the parts that differ by more than float32 can exponentiate, in both orders."""
    q, k, v = arrays = [_normal(20, 1, 2, 16, seed=seed) for seed in range(3)]
    k[10:] = 900 * np.abs(k[10:])
    q[:] = np.abs(q)
    expected = references.attention(*arrays, np.zeros((20, 20), bool), 0.25).reshape(v.shape)
    largest = np.einsum("ibnd,jbnd->bnij", q, k).max(axis=-1) * 0.25
    places = np.zeros((1, 20), np.int32)
    for parts in ((slice(0, 10), slice(10, 20)), (slice(10, 20), slice(0, 10))):
        result = None
        for part in parts:
            result = ops.attention_with_statistics(
                tensor(q), tensor(k[part]), tensor(v[part]), places, places + 10, scale=0.25, before=result
            )
        assert_close(values(result[0]), expected, 4 * TOLERANCE["float32"], "output")
        assert_close(values(result[1]), largest, 4 * TOLERANCE["float32"], "maximum")


def test_scores_may_be_far_apart(world):
    world(1)(_far_apart)


def _hidden_values_do_not_matter():
    """Bit-equal when what is hidden changes: nothing of it enters any sum."""
    q, k, v = (tensor(_normal(90, 1, 2, 16, seed=seed)) for seed in range(3))
    first, stop = _visible("causal", 90, 90)
    first = np.where(np.arange(90) >= 40, 40, first).astype(np.int32)
    other = [tensor(np.concatenate([9 * values(t)[:40], values(t)[40:]])) for t in (k, v)]
    one, two = (ops.attention_with_statistics(q, *kv, first, stop)[0].asnumpy() for kv in ((k, v), other))
    assert (one[40:] == two[40:]).all() and (one[:40] != two[:40]).any()


def test_hidden_values_do_not_matter(world):
    world(1)(_hidden_values_do_not_matter)


def _errors():
    q, two = tensor(_normal(4, 1, 3, 8)), tensor(_normal(4, 1, 2, 8))
    places = np.zeros((1, 4), np.int32)
    for arguments, text in (
        ((q, two, two, places, places), "n a multiple of groups"),
        ((q, q, q, places[:, :3], places), "first_keys"),
        ((q, q, q, places, places.astype(np.int64)), "stop_keys .* of int64"),
        ((q, q, q, places, places + 5), "places from 0 to 4"),
        ((q, q, q, places, places, Tensor(np.zeros((4, 3), np.bool_))), "a mask of shape"),
    ):
        with pytest.raises(ValueError, match=text):
            ops.attention_with_statistics(*arguments)


def test_bad_arguments_are_named(world):
    world(1)(_errors)
