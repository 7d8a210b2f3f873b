"""Process groups: ranks of each group for any order string, by Megatron core's rules (0.12).

The order names the axes of the rank grid, leftmost fastest: with "tp-cp-ep-dp-pp" neighbouring ranks share a
tensor-parallel group. Dense layers live on the grid (tp, cp, dp, pp), experts on a second grid over the same ranks
(expert tensor parallel, ep, expert-dp, pp).
"""

from dataclasses import dataclass, replace
from itertools import product
from math import lcm, prod

from mindspeed_ms.layout.errors import LayoutError
from mindspeed_ms.layout.sequence import ulysses_degree

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
AXES = ("tp", "pp", "dp", "ep", "cp")
DENSE_KINDS = ("tp", "pp", "dp", "cp", "dp-cp", "tp-pp", "tp-dp", "tp-cp", "tp-dp-cp")
# kind of group -> token on the expert grid
EXPERT_KINDS = {"ep": "ep", "expert-tp": "tp", "expert-dp": "dp", "tp-ep": "tp-ep", "tp-ep-pp": "tp-ep-pp"}
# the same groups for a world whose experts are spread like its dense layers
_DENSE_STAND_IN = {"ep": "", "expert-tp": "tp", "expert-dp": "dp-cp", "tp-ep": "tp", "tp-ep-pp": "tp-pp"}
DERIVED_KINDS = ("embedding", "position-embedding", "ulysses", "ring")
ALL_KINDS = DENSE_KINDS + tuple(EXPERT_KINDS) + DERIVED_KINDS


def _checked_order(order, sizes):
    """`order` as a list of all five axes; missing axes of size 1 are appended."""
    if not isinstance(order, str) or not order:
        raise LayoutError(f"order must be a string such as '{DEFAULT_ORDER}', but got {order!r}.")
    names = order.lower().split("-")
    unknown = [name for name in names if name not in AXES]
    if unknown:
        raise LayoutError(f"order '{order}' names {unknown}, but only {list(AXES)} exist.")
    if len(set(names)) != len(names):
        raise LayoutError(f"order '{order}' names an axis twice.")
    for name in AXES:
        if name not in names:
            if sizes[name] != 1:
                raise LayoutError(f"order '{order}' lacks '{name}', whose size is {sizes[name]}; add '{name}' to it.")
            names.append(name)
    return names


class RankGenerator:
    """Groups of one rank grid. Source: Megatron core's RankGenerator.

    Args:
        tp, ep, dp, pp, cp (int): sizes of the axes. `ep` and `cp` are never both above 1: experts have their own grid.
        order (str): axes from the fastest to the slowest, joined by "-".
        rank_offset (int): added to every rank.

    Raises:
        LayoutError: a size below 1, ep and cp both above 1, or an order that is empty, unknown, doubled or incomplete.
    """

    def __init__(self, tp, ep, dp, pp, cp, order=DEFAULT_ORDER, rank_offset=0):
        self.sizes = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp}
        for name, size in self.sizes.items():
            if not isinstance(size, int) or size < 1:
                raise LayoutError(f"the size of '{name}' must be a positive integer, but got {size!r}.")
        if ep > 1 and cp > 1:
            raise LayoutError(f"one rank grid cannot have both ep {ep} and cp {cp}; experts have their own grid.")
        self.order = _checked_order(order, self.sizes)
        self.rank_offset = rank_offset
        self.world_size = tp * ep * dp * pp * cp
        self.strides = {}
        stride = 1
        for name in self.order:
            self.strides[name] = stride
            stride *= self.sizes[name]

    def _token_axes(self, token):
        names = token.split("-") if token else []
        for name in names:
            if name not in AXES:
                raise LayoutError(f"group '{token}' names '{name}', but only {list(AXES)} exist.")
        return names

    def _positions(self, names):
        """Ranks (without offset) spanned by the axes `names`, in order: leftmost axis of the order fastest."""
        axes = [name for name in self.order if name in names]
        spans = [range(0, self.sizes[name] * self.strides[name], self.strides[name]) for name in reversed(axes)]
        return [sum(steps) for steps in product(*spans)]

    def get_ranks(self, token):
        """All groups that span the axes of `token` ("tp", "dp-cp", ...): list of lists of ranks."""
        inside = self._token_axes(token)
        members = self._positions(inside)
        bases = self._positions([name for name in AXES if name not in inside])
        return [[self.rank_offset + base + member for member in members] for base in bases]

    def group_of(self, token, rank):
        """Group of `token` with `rank` in it, without listing the other groups."""
        inside = self._token_axes(token)
        own = self.coordinates(rank)
        base = rank - sum(own[name] * self.strides[name] for name in inside)
        return [base + member for member in self._positions(inside)]

    def coordinates(self, rank):
        """`{"tp": .., "pp": .., "dp": .., "ep": .., "cp": ..}` of `rank`. LayoutError when it is outside the grid."""
        position = rank - self.rank_offset
        if not 0 <= position < self.world_size:
            last = self.rank_offset + self.world_size - 1
            raise LayoutError(f"rank {rank} is outside the world of ranks {self.rank_offset}..{last}.")
        return {name: position // self.strides[name] % self.sizes[name] for name in AXES}

    def rank_at(self, **coordinates):
        """The rank at the given coordinates; axes not named are 0."""
        for name, index in coordinates.items():
            if name not in AXES or not 0 <= index < self.sizes[name]:
                raise LayoutError(f"coordinate {name}={index} is outside the grid {self.sizes}.")
        return self.rank_offset + sum(index * self.strides[name] for name, index in coordinates.items())


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of a rank in the grid; `expert_tp`, `ep`, `expert_dp` are those in the expert grid."""

    rank: int = 0
    tp: int = 0
    pp: int = 0
    dp: int = 0
    cp: int = 0
    ep: int = 0
    expert_tp: int = 0
    expert_dp: int = 0

    def moved(self, **changes):
        """Copy with some coordinates changed."""
        return replace(self, **changes)


def world_unit(tp, pp, cp, ep=1, expert_tp=None):
    """Number that divides every valid world size: tp * pp * cp and, for experts, expert tp * ep * pp."""
    return lcm(tp * pp * cp, (expert_tp or tp) * ep * pp)


def world_unit_of(parallel):
    """`world_unit` of a ParallelDescription."""
    return world_unit(
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
        parallel.expert_model_parallel_size,
        parallel.expert_tensor_parallel_size,
    )


def model_parallel_size(parallel):
    """tp * pp * cp of a ParallelDescription or ModelParallelConfig: ranks with the same samples."""
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size


def checked_hierarchy(sizes, context_parallel_size):
    """`sizes` of the levels of context parallelism as a tuple; LayoutError unless they multiply to its size."""
    sizes = tuple(sizes or ())
    if sizes and (prod(sizes) != context_parallel_size or min(sizes) < 1):
        raise LayoutError(
            f"hierarchical_context_parallel_sizes {list(sizes)} multiply to {prod(sizes)}, but context_parallel_size is "
            f"{context_parallel_size}."
        )
    return sizes


def hierarchical_groups(parent, sizes, level):
    """Groups of one level inside the group `parent`; level 0 joins neighbours, later ones strided ranks."""
    stride, size = prod(sizes[:level]), sizes[level]
    firsts = [place for place in range(len(parent)) if place // stride % size == 0]
    return [[parent[first + step * stride] for step in range(size)] for first in firsts]


class WorldLayout:
    """Rank layout of a world: every group of every rank.

    Args:
        world_size (int): number of ranks.
        tp, pp, cp, ep (int): tensor, pipeline, context and expert parallel sizes.
        expert_tp (Optional[int]): tensor parallel size of the experts; None is `tp`.
        order (str): axes from the fastest to the slowest.
        ulysses_degree (Optional[int]): size of the ulysses groups inside a context-parallel group; None is `cp`
            (all ulysses), 1 is all ring.
        rank_offset (int): first rank.

    Attributes:
        dp, expert_dp (int): data parallel sizes, the remaining factor of the world size.

    Raises:
        LayoutError: a world size that the sizes do not divide, an impossible order, or a ulysses degree that does not
            divide `cp`.
    """

    def __init__(
        self, world_size, tp=1, pp=1, cp=1, ep=1, expert_tp=None, order=DEFAULT_ORDER, ulysses_degree=None, rank_offset=0
    ):
        self.world_size, self.rank_offset = world_size, rank_offset
        self.tp, self.pp, self.cp, self.ep = tp, pp, cp, ep
        self.expert_tp = tp if expert_tp is None else expert_tp
        self._check_sizes()
        self.dp = world_size // (tp * pp * cp)
        self.expert_dp = world_size // (self.expert_tp * ep * pp)
        self.ulysses_degree = cp if ulysses_degree is None else ulysses_degree
        if self.ulysses_degree < 1 or cp % self.ulysses_degree:
            raise LayoutError(f"ulysses_degree_in_cp {ulysses_degree} must divide context_parallel_size {cp}.")
        self.dense = self._dense_grid(order)
        self.order = "-".join(self.dense.order)
        self.expert = self._expert_grid(order)

    @classmethod
    def from_description(cls, parallel, world_size):
        """WorldLayout of a ParallelDescription on `world_size` ranks."""
        return cls(
            world_size,
            tp=parallel.tensor_model_parallel_size,
            pp=parallel.pipeline_model_parallel_size,
            cp=parallel.context_parallel_size,
            ep=parallel.expert_model_parallel_size,
            expert_tp=parallel.expert_tensor_parallel_size,
            order=parallel.order,
            ulysses_degree=ulysses_degree(parallel),
        )

    def sizes(self):
        """Parallel sizes and order of this layout, by the names of the arguments."""
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.expert_tp,
            "ulysses_degree_in_cp": self.ulysses_degree,
            "order": self.order,
        }

    def _check_sizes(self):
        named = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep, "expert_tp": self.expert_tp}
        for name, size in {"world_size": self.world_size, **named}.items():
            if not isinstance(size, int) or size < 1:
                raise LayoutError(f"{name} must be a positive integer, but got {size!r}.")
        multiple = world_unit(**named)
        if self.world_size % multiple == 0:
            return
        sizes = (
            f"tensor_model_parallel_size {self.tp} x pipeline_model_parallel_size {self.pp} x context_parallel_size {self.cp}"
        )
        if self.expert_tp * self.ep != self.tp:
            sizes += (
                f", expert_tensor_parallel_size {self.expert_tp} x expert_model_parallel_size {self.ep} x "
                f"pipeline_model_parallel_size {self.pp}"
            )
        raise LayoutError(f"world size {self.world_size} does not fit {sizes}: it needs a multiple of {multiple}.")

    def _dense_grid(self, order):
        # ep has no place on the dense grid: an order without it is complete
        return RankGenerator(self.tp, 1, self.dp, self.pp, self.cp, order, self.rank_offset)

    def _expert_grid(self, order):
        """Expert grid; None when experts use the dense grid.

        Stages must be the same on both grids. Where they are not, a world without expert parallelism falls back to
        the dense grid and any other is refused.
        """
        grid = RankGenerator(self.expert_tp, self.ep, self.expert_dp, self.pp, 1, order, self.rank_offset)
        if grid.get_ranks("pp") == self.dense.get_ranks("pp"):
            return grid
        if self.ep == 1 and self.expert_tp == self.tp:
            return None
        raise LayoutError(
            f"order '{order}' gives experts other pipeline stages than dense layers: put 'pp' last, or make the data "
            f"parallel sizes equal (dense {self.dp}, experts {self.expert_dp})."
        )

    def _grid_and_token(self, kind):
        if kind in DENSE_KINDS:
            return self.dense, kind
        if self.expert is not None:
            return self.expert, EXPERT_KINDS[kind]
        return self.dense, _DENSE_STAND_IN[kind]

    def groups(self, kind):
        """All groups of `kind` (one of ALL_KINDS): list of lists of ranks."""
        self._check_kind(kind)
        if kind in DERIVED_KINDS:
            parents = self.dense.get_ranks("pp" if "embedding" in kind else "cp")
            return [group for parent in parents for group in self._derived(kind, parent)]
        grid, token = self._grid_and_token(kind)
        return grid.get_ranks(token)

    def group_of(self, kind, rank):
        """Group of `kind` with `rank` in it; None if there is none (embedding groups of middle stages)."""
        self._check_kind(kind)
        if kind in DERIVED_KINDS:
            parent = self.dense.group_of("pp" if "embedding" in kind else "cp", rank)
            return next((group for group in self._derived(kind, parent) if rank in group), None)
        grid, token = self._grid_and_token(kind)
        return grid.group_of(token, rank)

    @staticmethod
    def _check_kind(kind):
        if kind not in ALL_KINDS:
            raise LayoutError(f"group '{kind}' is unknown, choose one of {list(ALL_KINDS)}.")

    def _derived(self, kind, parent):
        """Groups of a derived `kind`: inside one pp group (embedding kinds) or one cp group (ulysses, ring)."""
        if kind == "embedding":
            return [parent if len(parent) == 1 else [parent[0], parent[-1]]]
        if kind == "position-embedding":
            return [parent[:1]]
        degree = self.ulysses_degree
        return hierarchical_groups(parent, (degree, len(parent) // degree), 0 if kind == "ulysses" else 1)

    def all_groups(self):
        """Groups of every kind: `{kind: [[ranks], ...]}`."""
        return {kind: self.groups(kind) for kind in ALL_KINDS}

    def coordinates(self, rank):
        """`Coordinates` of `rank`."""
        dense = self.dense.coordinates(rank)
        if self.expert is None:
            expert = {"tp": dense["tp"], "ep": 0, "dp": self.group_of("expert-dp", rank).index(rank)}
        else:
            expert = self.expert.coordinates(rank)
        return Coordinates(
            rank=rank,
            tp=dense["tp"],
            pp=dense["pp"],
            dp=dense["dp"],
            cp=dense["cp"],
            ep=expert["ep"],
            expert_tp=expert["tp"],
            expert_dp=expert["dp"],
        )


def all_groups(world_size, **sizes):
    """Groups of every kind of a world: `{kind: [[ranks], ...]}`; `sizes` as in `WorldLayout`."""
    return WorldLayout(world_size, **sizes).all_groups()


def coordinates(rank, world_size, **sizes):
    """`Coordinates` of `rank` in a world; `sizes` as in `WorldLayout`."""
    return WorldLayout(world_size, **sizes).coordinates(rank)
