"""Process groups of this rank: tensor, pipeline, data, context and expert parallel, under Megatron's names.

`initialize_model_parallel` computes every group from `layout.ranks`; a communication group is created the first time
that one of its members asks for it. Source: Megatron core, `parallel_state.py` (0.12).
"""

from mindspeed_ms.core import comm
from mindspeed_ms.core.parallel_grid import (  # noqa: F401  (some are public through this module)
    ParallelGrid,
    check_virtual_pipeline,
    get_coordinates,
    get_group,
    get_group_ranks,
    get_world_layout,
    grid,
    group_rank,
    group_size,
    is_initialized,
    override,
    set_grid,
)
from mindspeed_ms.layout.ranks import DEFAULT_ORDER, WorldLayout, checked_hierarchy


def initialize_model_parallel(
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    virtual_pipeline_model_parallel_size=None,
    pipeline_model_parallel_split_rank=None,
    context_parallel_size=1,
    expert_model_parallel_size=1,
    order=DEFAULT_ORDER,
    communicator_config_path=None,
    expert_tensor_parallel_size=None,
    hierarchical_context_parallel_sizes=None,
    ulysses_degree_in_cp=None,
    **kwargs,
):
    """Create the parallel grid of the world. Every rank calls it once; it starts communication if nothing did before.

    Args:
        tensor_model_parallel_size (int): ranks that share each tensor.
        pipeline_model_parallel_size (int): stages that the layers are spread over.
        virtual_pipeline_model_parallel_size (Optional[int]): chunks of layers per stage (interleaved schedule).
        pipeline_model_parallel_split_rank (None): stages of an encoder-decoder; refused, there is no such model here.
        context_parallel_size (int): ranks that share each sequence.
        expert_model_parallel_size (int): ranks that share the experts of a layer.
        order (str): axes of the rank grid, leftmost fastest.
        communicator_config_path (None): NCCL settings; refused, no backend here reads them.
        expert_tensor_parallel_size (Optional[int]): ranks that share each expert's tensors; default as dense layers.
        hierarchical_context_parallel_sizes (Optional[list[int]]): sizes of nested groups inside the context-parallel
            group, innermost first; their product must be `context_parallel_size`.
        ulysses_degree_in_cp (Optional[int]): size of the ulysses groups inside the context-parallel group; the ring
            groups join the rest. Default: `context_parallel_size`.

    Raises:
        RuntimeError: model parallelism is in the wrong state, the world size does not fit, virtual
            stages without a pipeline, an impossible order or hierarchy.
        ValueError: an argument that cannot take effect here, or an unknown one.
    """
    if not comm.is_initialized():
        comm.init()  # a script may have started MindSpore's own alone, as Megatron's do torch's
    _refuse(kwargs, pipeline_model_parallel_split_rank, communicator_config_path)
    layout = WorldLayout(
        comm.get_world_size(),
        tp=tensor_model_parallel_size,
        pp=pipeline_model_parallel_size,
        cp=context_parallel_size,
        ep=expert_model_parallel_size,
        expert_tp=expert_tensor_parallel_size,
        order=order,
        ulysses_degree=ulysses_degree_in_cp,
    )
    initialize_from_layout(layout, virtual_pipeline_model_parallel_size, hierarchical_context_parallel_sizes)


def initialize_from_layout(layout, virtual_pipeline_model_parallel_size=None, hierarchical_context_parallel_sizes=None):
    """`initialize_model_parallel` for a `layout.ranks.WorldLayout`, such as that of a configuration.

    Raises:
        RuntimeError: as `initialize_model_parallel`.
    """
    if is_initialized():
        raise RuntimeError("model parallelism is already initialised: call destroy_model_parallel() first.")
    check_virtual_pipeline(virtual_pipeline_model_parallel_size, layout.pp)
    sizes = checked_hierarchy(hierarchical_context_parallel_sizes, layout.cp)
    set_grid(ParallelGrid(layout, comm.get_rank(), virtual_pipeline_model_parallel_size, sizes))


def _refuse(kwargs, split_rank, communicator_config_path):
    if kwargs:
        raise ValueError(f"initialize_model_parallel does not know {sorted(kwargs)}: remove them.")
    if split_rank is not None:
        raise ValueError(
            f"pipeline_model_parallel_split_rank {split_rank} splits an encoder-decoder model, but only decoder models "
            "exist here: leave it None."
        )
    if communicator_config_path is not None:
        raise ValueError(
            f"communicator_config_path '{communicator_config_path}' configures NCCL, which no backend here uses: leave it None."
        )


def model_parallel_is_initialized():
    """Whether `initialize_model_parallel` was called."""
    return is_initialized()


def destroy_model_parallel():
    """Remove the grid; communication goes on until `comm.destroy()`."""
    set_grid(None)


# groups of a world that ended are of no use: the grid goes with it
comm.at_destroy(destroy_model_parallel)


# ---- group, size and rank of every kind of group ------------------------------------------------------------------


def _getters(name, kind, members):
    """`get_NAME_group`, `get_NAME_world_size` and `get_NAME_rank` of the groups of `kind` (see `layout.ranks.ALL_KINDS`).

    Args:
        name (str): as in the functions' names.
        kind (str): kind of group.
        members (str): the ranks of a group, for the docstrings.
    """

    def group(check_initialized=True):
        return get_group(kind, check_initialized)

    def world_size():
        return group_size(kind)

    def rank():
        return group_rank(kind)

    return _documented(name, members, group, world_size, rank)


def _getters_with_context(name, kind, members):
    """`_getters` for groups that may be joined with context parallelism: functions take `with_context_parallel=False`."""
    kinds = {False: kind, True: f"{kind}-cp"}

    def group(with_context_parallel=False):
        return get_group(kinds[bool(with_context_parallel)])

    def world_size(with_context_parallel=False):
        return group_size(kinds[bool(with_context_parallel)])

    def rank(with_context_parallel=False):
        return group_rank(kinds[bool(with_context_parallel)])

    return _documented(name, members, group, world_size, rank)


def _setters(name, kind):
    """`set_NAME_world_size` and `set_NAME_rank` of the groups of `kind`."""

    def world_size(world_size):
        override(kind, "size", world_size)

    def rank(rank):
        override(kind, "rank", rank)

    for function in (world_size, rank):
        function.__doc__ = f"Override what `get_{name}_{function.__name__}` returns (tools and tests); None ends the override."
        function.__qualname__ = function.__name__ = f"set_{name}_{function.__name__}"
    return world_size, rank


def _documented(name, members, *functions):
    texts = {"group": "Group of {}.", "world_size": "Number of {}.", "rank": "Rank of this process among {}."}
    for function in functions:
        function.__doc__ = texts[function.__name__].format(members)
        function.__qualname__ = function.__name__ = f"get_{name}_{function.__name__}"
    return functions


get_tensor_model_parallel_group, get_tensor_model_parallel_world_size, get_tensor_model_parallel_rank = _getters(
    "tensor_model_parallel", "tp", "the ranks that share each tensor"
)
get_pipeline_model_parallel_group, get_pipeline_model_parallel_world_size, get_pipeline_model_parallel_rank = _getters(
    "pipeline_model_parallel", "pp", "the stages of this rank's pipeline"
)
get_data_parallel_group, get_data_parallel_world_size, get_data_parallel_rank = _getters_with_context(
    "data_parallel", "dp", "the ranks that hold the same parameters"
)
get_context_parallel_group, get_context_parallel_world_size, get_context_parallel_rank = _getters(
    "context_parallel", "cp", "the ranks that share each sequence"
)
get_ulysses_group, get_ulysses_world_size, get_ulysses_rank = _getters(
    "ulysses", "ulysses", "the context-parallel ranks that exchange heads for sequence"
)
get_ring_group, get_ring_world_size, get_ring_rank = _getters(
    "ring", "ring", "the context-parallel ranks that pass keys and values around (ring attention)"
)
get_model_parallel_group, get_model_parallel_world_size, get_model_parallel_rank = _getters(
    "model_parallel", "tp-pp", "the ranks that hold one copy of the model"
)
get_tensor_and_data_parallel_group, get_tensor_and_data_parallel_world_size, get_tensor_and_data_parallel_rank = (
    _getters_with_context("tensor_and_data_parallel", "tp-dp", "the ranks over tensor and data parallelism")
)
(get_tensor_and_context_parallel_group, get_tensor_and_context_parallel_world_size, get_tensor_and_context_parallel_rank) = (
    _getters("tensor_and_context_parallel", "tp-cp", "the ranks over tensor and context parallelism")
)
get_expert_model_parallel_group, get_expert_model_parallel_world_size, get_expert_model_parallel_rank = _getters(
    "expert_model_parallel", "ep", "the ranks that share the experts of a layer"
)
get_expert_tensor_parallel_group, get_expert_tensor_parallel_world_size, get_expert_tensor_parallel_rank = _getters(
    "expert_tensor_parallel", "expert-tp", "the ranks that share each expert's tensors"
)
get_expert_data_parallel_group, get_expert_data_parallel_world_size, get_expert_data_parallel_rank = _getters(
    "expert_data_parallel", "expert-dp", "the ranks that hold the same experts"
)
(
    get_expert_tensor_and_model_parallel_group,
    get_expert_tensor_and_model_parallel_world_size,
    get_expert_tensor_and_model_parallel_rank,
) = _getters("expert_tensor_and_model_parallel", "tp-ep", "the ranks over expert tensor and expert parallelism")
get_expert_tensor_model_pipeline_parallel_group, _, _ = _getters(
    "expert_tensor_model_pipeline_parallel", "tp-ep-pp", "the ranks over expert tensor, expert and pipeline parallelism"
)

set_tensor_model_parallel_world_size, set_tensor_model_parallel_rank = _setters("tensor_model_parallel", "tp")
set_pipeline_model_parallel_world_size, set_pipeline_model_parallel_rank = _setters("pipeline_model_parallel", "pp")
_, set_data_parallel_rank = _setters("data_parallel", "dp")
set_expert_model_parallel_world_size, set_expert_model_parallel_rank = _setters("expert_model_parallel", "ep")
set_expert_tensor_parallel_world_size, set_expert_tensor_parallel_rank = _setters("expert_tensor_parallel", "expert-tp")

# Megatron's older names
get_data_modulo_expert_parallel_group = get_expert_data_parallel_group
get_tensor_and_expert_parallel_group = get_expert_tensor_and_model_parallel_group
get_tensor_and_expert_parallel_world_size = get_expert_tensor_and_model_parallel_world_size


# ---- global ranks of single members -------------------------------------------------------------------------------


def get_tensor_model_parallel_src_rank():
    """Global rank of the first member of the tensor-parallel group."""
    return get_group_ranks("tp")[0]


def get_model_parallel_src_rank():
    """Global rank of the first member of the model-parallel group."""
    return get_group_ranks("tp-pp")[0]


def get_data_parallel_src_rank(with_context_parallel=False):
    """Global rank of the first member of the data-parallel group."""
    return get_group_ranks("dp-cp" if with_context_parallel else "dp")[0]


def get_context_parallel_global_ranks(check_initialized=True):
    """Global ranks of the context-parallel group."""
    return list(get_group_ranks("cp"))


def get_pipeline_model_parallel_first_rank():
    """Global rank of the first stage of this pipeline."""
    return get_group_ranks("pp")[0]


def get_pipeline_model_parallel_last_rank():
    """Global rank of the last stage of this pipeline."""
    return get_group_ranks("pp")[-1]


def get_pipeline_model_parallel_next_rank():
    """Global rank of the next stage, the first after the last."""
    ranks = get_group_ranks("pp")
    return ranks[(get_pipeline_model_parallel_rank() + 1) % len(ranks)]


def get_pipeline_model_parallel_prev_rank():
    """Global rank of the previous stage, the last before the first."""
    ranks = get_group_ranks("pp")
    return ranks[(get_pipeline_model_parallel_rank() - 1) % len(ranks)]


def get_hierarchical_context_parallel_groups(check_initialized=True):
    """Groups of each level of `hierarchical_context_parallel_sizes`, innermost first. RuntimeError without levels."""
    state = grid()
    if not state.hierarchical_sizes:
        raise RuntimeError("hierarchical_context_parallel_sizes was not given to initialize_model_parallel().")
    return state.hierarchical_groups()


# ---- pipeline stages ----------------------------------------------------------------------------------------------


def get_virtual_pipeline_model_parallel_rank():
    """Virtual pipeline rank: number of the chunk that is being built or run; None without virtual stages."""
    return grid().virtual_pipeline_rank


def set_virtual_pipeline_model_parallel_rank(rank):
    """Set the virtual pipeline rank, the number of the chunk that is being built or run."""
    grid().virtual_pipeline_rank = rank


def get_virtual_pipeline_model_parallel_world_size():
    """Number of chunks per stage; None without virtual stages."""
    return grid().virtual_pipeline_size


def set_virtual_pipeline_model_parallel_world_size(world_size):
    """Set the number of chunks per stage."""
    grid().virtual_pipeline_size = world_size


def is_pipeline_first_stage(ignore_virtual=False):
    """Whether this stage (and, unless ignored, the current chunk) holds the start of the model."""
    chunks = get_virtual_pipeline_model_parallel_world_size()
    if not ignore_virtual and chunks is not None and get_virtual_pipeline_model_parallel_rank() != 0:
        return False
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual=False):
    """Whether this stage (and, unless ignored, the current chunk) holds the end of the model."""
    chunks = get_virtual_pipeline_model_parallel_world_size()
    if not ignore_virtual and chunks is not None and get_virtual_pipeline_model_parallel_rank() != chunks - 1:
        return False
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def get_embedding_group():
    """Group of the first and last stage of this pipeline, which share tied word embeddings."""
    return get_group("embedding")


def get_position_embedding_group():
    """Group of the stages that hold position embeddings, which is the first stage."""
    return get_group("position-embedding")


def is_rank_in_embedding_group(ignore_virtual=False):
    """Whether this stage (and, unless ignored, the current chunk) holds a copy of the word embeddings."""
    ranks, rank = get_group_ranks("embedding"), grid().rank
    if ranks is None:
        return False
    if ignore_virtual:
        return True
    if rank == ranks[0] and is_pipeline_first_stage():
        return True
    return rank == ranks[-1] and is_pipeline_last_stage()


def is_rank_in_position_embedding_group():
    """Whether this stage holds position embeddings."""
    return get_group_ranks("position-embedding") is not None
