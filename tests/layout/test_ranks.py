"""Rank groups against groups listed by hand and against an independent enumeration."""

import itertools
import math

import pytest

from mindspeed_ms.layout.ranks import ALL_KINDS, Coordinates, LayoutError, RankGenerator, WorldLayout, all_groups, coordinates

ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "cp-tp-dp-ep-pp", "pp-dp-ep-cp-tp")


def _enumerate(world, sizes, order, inside):
    """Ranks grouped by equal coordinates on the axes outside `inside`; ranks are numbered in reading order."""
    names = [name for name in order.split("-") if name in sizes]
    grid = itertools.product(*(range(sizes[name]) for name in reversed(names)))
    groups = {}
    for rank, place in enumerate(grid):
        place = dict(zip(reversed(names), place, strict=True))
        groups.setdefault(tuple(place[name] for name in names if name not in inside), []).append(rank)
    assert sum(map(len, groups.values())) == world
    return sorted(groups.values())


def _layouts():
    """About a hundred layouts of worlds up to 1024."""
    for world, tp, pp, cp, ep, expert_tp in itertools.product(
        (1, 2, 6, 8, 12, 16, 48, 64, 128, 1024), (1, 2, 8), (1, 3, 4), (1, 2, 4), (1, 2, 4), (None, 1, 4)
    ):
        experts = tp if expert_tp is None else expert_tp
        if world % math.lcm(tp * pp * cp, experts * ep * pp) == 0:
            yield world, tp, pp, cp, ep, expert_tp


LAYOUTS = list(_layouts())
SOME_LAYOUTS = LAYOUTS[:: max(1, len(LAYOUTS) // 120)] + [layout for layout in LAYOUTS if layout[0] == 1024][::40]


@pytest.mark.parametrize("order", ORDERS)
def test_groups_equal_an_independent_enumeration(order):
    compared = 0
    for world, tp, pp, cp, ep, expert_tp in SOME_LAYOUTS:
        experts = tp if expert_tp is None else expert_tp
        dense = {"tp": tp, "pp": pp, "cp": cp, "dp": world // (tp * pp * cp)}
        expert = {"tp": experts, "pp": pp, "ep": ep, "dp": world // (experts * pp * ep)}
        stages_agree = _enumerate(world, dense, order, ["pp"]) == _enumerate(world, expert, order, ["pp"])
        if not stages_agree and (ep > 1 or experts != tp):
            with pytest.raises(LayoutError, match="pipeline stages"):
                WorldLayout(world, tp, pp, cp, ep, expert_tp, order)
            continue
        layout = WorldLayout(world, tp, pp, cp, ep, expert_tp, order)
        for kind in ("tp", "pp", "dp", "cp", "dp-cp", "tp-pp", "tp-dp", "tp-cp", "tp-dp-cp"):
            assert sorted(layout.groups(kind)) == _enumerate(world, dense, order, kind.split("-")), (kind, layout)
        if stages_agree:
            tokens = {"ep": "ep", "expert-tp": "tp", "expert-dp": "dp", "tp-ep": "tp-ep", "tp-ep-pp": "tp-ep-pp"}
            for kind, token in tokens.items():
                assert sorted(layout.groups(kind)) == _enumerate(world, expert, order, token.split("-")), kind
        compared += 1
    assert compared > 20


@pytest.mark.parametrize("layout", SOME_LAYOUTS[::4])
def test_every_rank_finds_its_group(layout):
    world = layout[0]
    built = WorldLayout(*layout)
    for rank in range(0, world, max(1, world // 16)):
        place = built.coordinates(rank)
        assert place.rank == rank
        for kind, index in {"tp": place.tp, "pp": place.pp, "cp": place.cp, "dp": place.dp, "ep": place.ep}.items():
            group = built.group_of(kind, rank)
            assert group[index] == rank
            assert group in built.groups(kind)
        assert built.group_of("expert-tp", rank)[place.expert_tp] == rank
        assert built.group_of("expert-dp", rank)[place.expert_dp] == rank
        assert built.dense.rank_at(tp=place.tp, pp=place.pp, cp=place.cp, dp=place.dp) == rank


def test_all_groups_cover_each_rank_once():
    groups = all_groups(32, tp=2, pp=4, cp=2, ep=2)
    assert set(groups) == set(ALL_KINDS)
    for kind, lists in groups.items():
        ranks = sorted(rank for group in lists for rank in group)
        if "embedding" in kind:
            assert len(set(ranks)) == len(ranks) < 32
        else:
            assert ranks == list(range(32)), kind


def test_listed_groups_with_context_parallelism():
    groups = all_groups(16, tp=2, pp=2, cp=2)
    assert groups["tp"][:3] == [[0, 1], [2, 3], [4, 5]]
    assert groups["cp"][:4] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups["dp"][:4] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups["pp"][:2] == [[0, 8], [1, 9]]
    assert groups["dp-cp"][0] == [0, 2, 4, 6]
    assert groups["tp-pp"][0] == [0, 1, 8, 9]
    assert groups["tp-dp-cp"] == [list(range(8)), list(range(8, 16))]
    assert groups["embedding"][0] == [0, 8]
    assert groups["position-embedding"][:2] == [[0], [1]]


def test_listed_groups_with_experts():
    layout = WorldLayout(16, tp=2, pp=2, ep=2)
    assert layout.group_of("ep", 0) == [0, 2]
    assert layout.group_of("dp", 0) == [0, 2, 4, 6]
    assert layout.group_of("expert-dp", 0) == [0, 4]
    assert layout.group_of("tp-ep", 0) == [0, 1, 2, 3]
    assert layout.group_of("tp-ep-pp", 0) == [0, 1, 2, 3, 8, 9, 10, 11]


def test_expert_tensor_parallel_of_its_own():
    layout = WorldLayout(8, tp=4, ep=4, expert_tp=1)
    assert layout.groups("tp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layout.groups("ep") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layout.groups("expert-dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.groups("expert-tp") == [[rank] for rank in range(8)]


def test_embedding_groups_leave_middle_stages_out():
    layout = WorldLayout(8, tp=2, pp=4)
    assert layout.groups("embedding") == [[0, 6], [1, 7]]
    assert layout.groups("position-embedding") == [[0], [1]]
    assert layout.group_of("embedding", 2) is None
    assert WorldLayout(2, tp=2).groups("embedding") == [[0], [1]]


def test_ulysses_is_contiguous_and_ring_strided():
    layout = WorldLayout(8, cp=8, ulysses_degree=2)
    assert layout.groups("ulysses") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("ring") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    with_tp = WorldLayout(8, tp=2, cp=4, ulysses_degree=2)
    assert with_tp.groups("ulysses") == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert with_tp.groups("ring") == [[0, 4], [2, 6], [1, 5], [3, 7]]
    with pytest.raises(LayoutError, match="ulysses_degree_in_cp 3 must divide context_parallel_size 8"):
        WorldLayout(8, cp=8, ulysses_degree=3)


def test_stages_that_differ_fall_back_without_experts():
    layout = WorldLayout(8, tp=2, pp=2, cp=2, order="tp-cp-pp-dp")
    assert layout.groups("expert-dp") == layout.groups("dp-cp")
    assert layout.groups("ep") == [[rank] for rank in range(8)]
    place = layout.coordinates(7)
    assert layout.group_of("expert-dp", 7)[place.expert_dp] == 7


def test_world_size_errors_name_the_multiple():
    with pytest.raises(LayoutError, match=r"world size 8 .*size 8 x pipeline.* 4 .*needs a multiple of 32"):
        WorldLayout(8, tp=8, pp=4)
    with pytest.raises(RuntimeError, match=r"expert_model_parallel_size 3 .*needs a multiple of 12"):
        WorldLayout(8, tp=4, ep=3, expert_tp=1)
    with pytest.raises(ValueError, match="tp must be a positive integer, but got 0"):
        WorldLayout(8, tp=0)


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ("", "must be a string"),
        (None, "must be a string"),
        ("tp-tp-dp", "names an axis twice"),
        ("tp-xp-dp", r"names \['xp'\]"),
        ("tp-dp", "lacks 'pp', whose size is 2"),
    ],
)
def test_order_errors(order, text):
    with pytest.raises(LayoutError, match=text):
        RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=1, order=order)


def test_generator_errors_and_offset():
    with pytest.raises(LayoutError, match="both ep 2 and cp 2"):
        RankGenerator(tp=1, ep=2, dp=1, pp=1, cp=2)
    shifted = RankGenerator(tp=2, ep=1, dp=2, pp=1, cp=1, rank_offset=10)
    assert shifted.get_ranks("tp") == [[10, 11], [12, 13]]
    assert shifted.group_of("dp", 13) == [11, 13]
    with pytest.raises(LayoutError, match=r"rank 9 is outside the world of ranks 10..13"):
        shifted.coordinates(9)
    with pytest.raises(LayoutError, match="coordinate tp=2 is outside"):
        shifted.rank_at(tp=2)
    with pytest.raises(LayoutError, match="'vp'"):
        shifted.get_ranks("vp")
    with pytest.raises(LayoutError, match="group 'zz' is unknown"):
        WorldLayout(2).groups("zz")


def test_coordinates():
    assert coordinates(13, 16, tp=2, pp=2, cp=2) == Coordinates(rank=13, tp=1, pp=1, dp=1, cp=0, ep=0, expert_tp=1, expert_dp=2)
    assert Coordinates(tp=1).moved(pp=2) == Coordinates(tp=1, pp=2)
