"""Splitting and joining is the identity in every layout; flat ranges compose with tensor-parallel shards."""

import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_ms.layout.sharding import FlatSlice, Initializer, ParameterSharding, join, uncovered


@st.composite
def layouts(draw):
    """The shards of one parameter over a group, and a global array of its shape."""
    count = draw(st.sampled_from([1, 2, 3, 4]))
    dimensions = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 4)) for _ in range(dimensions)]
    kind = draw(st.sampled_from(["replicated", "contiguous", "gated", "free"]))
    axis = draw(st.integers(0, dimensions - 1))
    if kind == "replicated":
        shards = [ParameterSharding.replicated(shape)] * count
    elif kind == "contiguous":
        shape[axis] *= count
        shards = [ParameterSharding.contiguous(shape, axis, index, count) for index in range(count)]
    elif kind == "gated":
        shape[axis] *= 2 * count
        shards = [ParameterSharding.gated(shape, axis, index, count) for index in range(count)]
    else:
        shape[axis] = draw(st.integers(count, 9))
        owners = draw(st.permutations(list(range(count)) + [0] * (shape[axis] - count)))
        ranges = [[(at, at + 1) for at, owner in enumerate(owners) if owner == index] for index in range(count)]
        shards = [ParameterSharding(shape, axis, draw(st.permutations(part))) for part in ranges]
    return shards, np.arange(prod(shape)).reshape(shape)


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_split_and_join_is_the_identity(layout):
    shards, array = layout
    pieces = [(shard, shard.split(array)) for shard in shards]
    for shard, piece in pieces:
        assert piece.shape == shard.local_shape
        assert piece.size == shard.numel
    np.testing.assert_array_equal(join(reversed(pieces)), array)
    np.testing.assert_array_equal(join(pieces, np.zeros_like(array)), array)
    assert uncovered(shards) == []


@settings(max_examples=200, deadline=None)
@given(layouts(), st.data())
def test_flat_slices_compose_with_shards(layout, data):
    shards, array = layout
    pieces = []
    for shard in shards:
        cuts = data.draw(st.lists(st.integers(0, shard.numel), max_size=3))
        edges = [0, *sorted(cuts), shard.numel]
        for start, stop in itertools.pairwise(edges):
            flat = FlatSlice(shard, start, stop)
            held = flat.split(array)
            assert held.shape == flat.local_shape
            by_ranges = [array.reshape(-1)[low:high] for low, high in flat.flat_ranges()]
            np.testing.assert_array_equal(np.concatenate([array.reshape(-1)[:0], *by_ranges]), held)
            pieces.append((flat, held))
    np.testing.assert_array_equal(join(data.draw(st.permutations(pieces))), array)


def test_one_layout_becomes_another():
    array = np.random.default_rng(0).normal(size=(12, 5))
    two = [ParameterSharding.gated(array.shape, 0, index, 2) for index in range(2)]
    three = [ParameterSharding.gated(array.shape, 0, index, 3) for index in range(3)]
    whole = join([(shard, shard.split(array)) for shard in two])
    back = join([(shard, shard.split(whole)) for shard in three])
    np.testing.assert_array_equal(back, array)


def test_gated_holds_gate_then_up():
    shard = ParameterSharding.gated((8, 3), 0, 1, 2)
    assert shard.ranges == ((2, 4), (6, 8))
    assert shard.local_shape == (4, 3)
    assert shard.flat_ranges() == [(6, 12), (18, 24)]
    assert shard.flat_ranges(4, 8) == [(10, 12), (18, 20)]
    assert ParameterSharding.gated((8, 3)).is_whole
    assert ParameterSharding.gated((8, 3)) == ParameterSharding.contiguous((8, 3), 0, 0, 1)


def test_columns_give_one_range_per_row():
    shard = ParameterSharding.contiguous((3, 4), 1, 1, 2)
    assert shard.flat_ranges() == [(2, 4), (6, 8), (10, 12)]
    assert shard.flat_ranges(1, 4) == [(3, 4), (6, 8)]
    assert shard.flat_ranges(2, 2) == []
    assert ParameterSharding.contiguous((3, 4), -1, 1, 2) == shard


def test_split_of_one_range_is_a_view():
    array = np.zeros((4, 4))
    assert np.shares_memory(ParameterSharding.contiguous((4, 4), 0, 1, 2).split(array), array)


def test_missing_pieces_are_named():
    shard = ParameterSharding.contiguous((4, 2), 0, 0, 2)
    with pytest.raises(ValueError, match=r"no piece holds elements \(4, 8\)"):
        join([(shard, np.zeros((2, 2)))])
    first = ParameterSharding.contiguous((4, 2), 0, 1, 2)
    assert uncovered([first]) == [(0, 4)]
    with pytest.raises(ValueError, match="at least one piece"):
        join([])
    with pytest.raises(ValueError, match="different parameters"):
        join([(shard, np.zeros((2, 2))), (ParameterSharding.replicated((1,)), np.zeros(1))])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ParameterSharding.contiguous((5, 2), 0, 0, 2), "axis 0 of size 5 cannot be cut into 2"),
        (lambda: ParameterSharding.contiguous((4, 2), 0, 2, 2), r"shard index 2 must be in \[0, 2\)"),
        (lambda: ParameterSharding.gated((5, 2)), "cannot hold gate and up"),
        (lambda: ParameterSharding((4,), 1, ((0, 1),)), "axis 1 is outside"),
        (lambda: ParameterSharding((4,), 0, ()), "at least one range"),
        (lambda: ParameterSharding((4,), 0, ((0, 5),)), "outside axis 0 of size 4"),
        (lambda: ParameterSharding((4,), 0, ((0, 2), (1, 3))), "overlap"),
        (lambda: ParameterSharding((4,), None, ((0, 2),)), "need an axis"),
        (lambda: ParameterSharding.replicated((4,)).flat_ranges(0, 5), "leaves the local tensor of 4"),
        (lambda: FlatSlice(ParameterSharding.replicated((4,)), 3, 2), "leaves the local tensor"),
        (lambda: ParameterSharding.replicated((4,)).split(np.zeros(3)), r"shape \(3,\), but \(4,\) is needed"),
        (lambda: FlatSlice(ParameterSharding.replicated((2, 2)), 0, 1).place(np.zeros((2, 2)).T, np.zeros(1)),
         "C-contiguous"),
    ],
)  # fmt: skip
def test_errors(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_initializer():
    assert Initializer.constant(0) == Initializer.zeros()
    assert Initializer.constant(1.0) == Initializer.ones()
    assert Initializer.constant(0.5) == Initializer("constant", 0.5)
    assert Initializer.normal(0.02).value == 0.02
    with pytest.raises(ValueError, match="kind 'uniform' is unknown"):
        Initializer("uniform")
    with pytest.raises(ValueError, match="standard deviation >= 0"):
        Initializer.normal(-1)
