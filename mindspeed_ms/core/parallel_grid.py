"""Grid of parallel ranks: coordinates of this rank and its process groups.

State behind `parallel_state`; the groups themselves are computed in `layout.ranks`.
"""

from mindspeed_ms.core import comm
from mindspeed_ms.layout.errors import LayoutError
from mindspeed_ms.layout.ranks import hierarchical_groups

_HIERARCHICAL = "hierarchical-"
_grid = None


class ParallelGrid:
    """Layout of the world, coordinates of this rank, and its process groups created so far."""

    def __init__(self, layout, rank, virtual_pipeline_size, hierarchical_sizes):
        self.layout = layout
        self.rank = rank
        self.coordinates = layout.coordinates(rank)
        self.virtual_pipeline_size = virtual_pipeline_size
        self.virtual_pipeline_rank = None if virtual_pipeline_size is None else 0
        self.hierarchical_sizes = hierarchical_sizes
        self.overrides = {}  # what Megatron's set_*_rank / set_*_world_size functions replaced
        self._ranks = {}
        self._groups = {}

    def ranks(self, kind):
        """Global ranks of this rank's group of `kind`; None if it is in none."""
        if kind not in self._ranks:
            if kind.startswith(_HIERARCHICAL):
                self._ranks[kind] = self._hierarchical_ranks(int(kind[len(_HIERARCHICAL) :]))
            else:
                self._ranks[kind] = self.layout.group_of(kind, self.rank)
        return self._ranks[kind]

    def _hierarchical_ranks(self, level):
        """Ranks of this rank's group of one hierarchical level inside the context-parallel group."""
        groups = hierarchical_groups(self.ranks("cp"), self.hierarchical_sizes, level)
        return next(group for group in groups if self.rank in group)

    def group(self, kind):
        """Process group of `kind` of this rank, created at the first call."""
        if kind not in self._groups:
            ranks = self.ranks(kind)
            if ranks is None:
                raise RuntimeError(
                    f"rank {self.rank} is in no {kind} group: only the first and last pipeline stages are. "
                    "Ask is_rank_in_embedding_group() first."
                )
            name = f"{kind}-{'-'.join(map(str, ranks))}"
            self._groups[kind] = comm.new_group(ranks, name)
        return self._groups[kind]

    def hierarchical_groups(self):
        """Groups of each hierarchical level, innermost first."""
        return [self.group(f"{_HIERARCHICAL}{level}") for level in range(len(self.hierarchical_sizes))]


def check_virtual_pipeline(virtual_size, pipeline_size):
    """Raise LayoutError for virtual stages without a pipeline."""
    if virtual_size is None:
        return
    if not isinstance(virtual_size, int) or virtual_size < 1:
        raise LayoutError(f"virtual_pipeline_model_parallel_size must be a positive integer, but got {virtual_size!r}.")
    if pipeline_size < 2:
        raise LayoutError(
            f"virtual_pipeline_model_parallel_size {virtual_size} needs pipeline_model_parallel_size of at least 2, "
            f"but got {pipeline_size}."
        )


def set_grid(new_grid):
    """Install a grid, or None."""
    global _grid
    _grid = new_grid


def is_initialized():
    """Whether a grid is installed."""
    return _grid is not None


def grid():
    """This process's ParallelGrid. RuntimeError before initialize_model_parallel()."""
    if _grid is None:
        raise RuntimeError(
            "model parallelism is not initialised: call mindspeed_ms.training.utils.set_parallel_context("
            "all_config.parallel_config), or initialize_model_parallel() after mindspeed_ms.core.comm.init()."
        )
    return _grid


def get_world_layout():
    """The `layout.ranks.WorldLayout` of this world: every group of every rank."""
    return grid().layout


def get_coordinates():
    """The `layout.ranks.Coordinates` of this rank."""
    return grid().coordinates


def get_group(kind, check_initialized=True):
    """Process group of this rank of a kind of `layout.ranks.ALL_KINDS`; without a grid RuntimeError or None."""
    return grid().group(kind) if check_initialized or is_initialized() else None


def get_group_ranks(kind):
    """Global ranks of this rank's group of `kind`; None if it is in none. Creates no group."""
    return grid().ranks(kind)


def group_size(kind):
    """Size of this rank's group of `kind`."""
    state = grid()
    replaced = state.overrides.get((kind, "size"))
    return len(state.ranks(kind)) if replaced is None else replaced


def group_rank(kind):
    """Rank of this process within its group of `kind`."""
    state = grid()
    replaced = state.overrides.get((kind, "rank"))
    return state.ranks(kind).index(state.rank) if replaced is None else replaced


def override(kind, what, value):
    """Replace the "size" or "rank" of a kind of group; None restores it."""
    grid().overrides[(kind, what)] = value
