"""`ops.cached_attention` against plain attention in numpy: starts, lengths, padding, rings, grouped heads, dtypes."""

import numpy as np
import pytest

from mindspeed_ms import ops
from mindspeed_ms.core import storage
from tests.ops import references
from tests.ops.harness import TOLERANCE, assert_close, tensor, values

HEADS, GROUPS, SIZE, SLOTS = 6, 2, 8, 5


def sequences(length, dtype, slots=SLOTS):
    """Query, key and value Tensors [length, slots, ...] of whole sequences and their exact values."""
    random = np.random.default_rng(length)
    found = [tensor(random.normal(size=(length, slots, count, SIZE)), dtype) for count in (HEADS, GROUPS, GROUPS)]
    return found, [values(one) for one in found]


def caches(capacity, dtype):
    """Keys and values full of numbers that no query may see."""
    found = [storage.zeros((SLOTS, GROUPS, capacity, SIZE), dtype) for _ in range(2)]
    for cache in found:
        storage.write(cache, tensor(np.full(cache.shape, 1e4), dtype))
    return found


def run(steps, length, capacity, window, dtype, value_width=None, sinks=None):
    """Feed rows (slot, start, count) of each step and compare the output with attention over whole sequences."""
    (query, key, value), exact = sequences(length, dtype)
    lower = 1 - window if window else 1 - length
    if value_width:
        exact[2] = exact[1][..., :value_width]
    exact_sinks = None if sinks is None else np.array(sinks)
    expected = references.attention(*exact, references.band(length, length, lower, 0), SIZE**-0.5, None, exact_sinks)
    held = caches(capacity, dtype)
    extra = {"value_width": value_width, "sinks": None if sinks is None else tensor(exact_sinks, dtype)}
    for rows in steps:
        longest = max(count for _, _, count in rows)
        batches = []
        for whole in (query, key, value):
            array = np.full((longest, len(rows), *whole.shape[2:]), 1e3)
            for index, (slot, start, count) in enumerate(rows):
                array[:count, index] = values(whole)[start : start + count, slot]
            batches.append(tensor(array, dtype))
        indices = [np.array(column, np.int32) for column in zip(*rows)]
        if value_width:
            batches[2] = held[1] = None
        output = ops.cached_attention(*batches, *held, *indices, window=window, **extra)
        assert output.dtype == query.dtype
        found = values(output)
        assert np.isfinite(found).all()
        for index, (slot, start, count) in enumerate(rows):
            right = expected[start : start + count, slot]
            assert_close(found[:count, index], right, 4 * TOLERANCE[dtype], f"{rows[index]}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_of_different_starts_and_lengths(world, dtype):
    steps = [[(3, 0, 4), (0, 0, 2)], [(0, 2, 1), (3, 4, 1), (1, 0, 1)], [(4, 0, 9), (0, 3, 6), (2, 0, 0)], [(4, 9, 1)]]
    steps += [[(0, 9, 2), (3, 5, 7)], [(0, 11, 1)]]  # padding that would wrap around to the first places
    world(1)(run, steps, 12, 12, None, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_that_begin_their_keys_and_sinks(world, dtype):
    steps = [[(3, 0, 4), (0, 0, 2)], [(0, 2, 1), (3, 4, 1), (1, 0, 1)], [(0, 3, 6), (2, 0, 0)]]
    world(1)(run, steps, 12, 12, None, dtype, 5, [0.5, -2.0, 3.0, 0.0, 9.0, 1.0])


def test_rings_of_windows_keep_what_is_seen(world):
    prompt, rest = [[(1, 0, 4), (2, 0, 3)]], [[(1, p, 1), (2, p - 1, 1)] for p in range(4, 14)]
    chunks = [[(1, 14, 4), (2, 13, 2)], [(1, 18, 1), (2, 15, 4)]]
    for window in (1, 3, 5):
        world(1)(run, prompt + rest + chunks, 24, window - 1 + 4, window, "float32")


def test_more_rows_and_keys_than_a_block(world):
    world(1)(run, [[(0, 0, 600), (1, 0, 70)], [(0, 600, 130)], [(1, 70, 1), (0, 730, 1)]], 740, 740, None, "float32")
    world(1)(run, [[(0, 0, 300)], [(0, 300, 200)], [(0, 500, 1)]], 520, 610, 400, "bfloat16")


def refused():
    """Messages for arguments that do not fit."""
    (query, key, value), _ = sequences(2, "float32", slots=1)
    keys, held = caches(4, "float32")
    one = np.ones(1, np.int32)
    messages = []
    for arguments in (
        (query, key, value, keys, held, 5 * one, one, one),
        (query, key, value, keys, held, one, 3 * one, 2 * one),
        (query, key, value, keys, held, one, one, 3 * one),
        (query, key, value, keys, held, one, -one, one),
        (query, key, value, *caches(4, "float16"), one, one, one),
        (query, key, value, keys, storage.zeros((SLOTS, GROUPS, 3, SIZE), "float32"), one, one, one),
        (query, key, value, keys, held, np.ones(2, np.int32), one, one),
        (query, key, None, keys, None, one, one, one),
        (query, key, value, keys, held, one, one, one, None, None, None, 4),
    ):
        with pytest.raises(ValueError) as caught:
            ops.cached_attention(*arguments)
        messages.append(str(caught.value))
    return messages


def test_arguments_that_do_not_fit_are_refused(world):
    (messages,) = world(1)(refused)
    words = (
        "slot 5",
        "position 3 on",
        "3 of 2 tokens",
        "position -1",
        "expected one dtype",
        "twice [slots",
        "2 slots, 1 starts",
        "expected value_width",
        "expected no values beside it",
    )
    for message, word in zip(messages, words, strict=True):
        assert word in message and "cached_attention" in message
