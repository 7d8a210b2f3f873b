"""Groups, ranks and errors of the parallel grid."""

import pytest


def _raises(kind, text, function, *arguments, **keywords):
    with pytest.raises(kind, match=text):
        function(*arguments, **keywords)


def grid_of_four():
    """tp2 x pp2 with two virtual chunks."""
    from mindspeed_ms.core import comm
    from mindspeed_ms.core import parallel_state as state

    _raises(RuntimeError, "not initialised", state.get_tensor_model_parallel_rank)
    assert not state.model_parallel_is_initialized()
    state.initialize_model_parallel(2, 2, 2)
    rank = comm.get_rank()
    assert state.model_parallel_is_initialized()
    assert list(state.get_tensor_model_parallel_group().ranks) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert list(state.get_pipeline_model_parallel_group().ranks) == [rank % 2, rank % 2 + 2]
    assert state.get_tensor_model_parallel_rank() == rank % 2
    assert state.get_pipeline_model_parallel_rank() == rank // 2
    assert state.get_tensor_model_parallel_src_rank() == rank // 2 * 2
    assert state.get_model_parallel_group().size == 4 and state.get_model_parallel_src_rank() == 0
    assert state.get_data_parallel_world_size() == state.get_context_parallel_world_size() == 1
    assert state.get_context_parallel_rank() == state.get_expert_model_parallel_rank() == 0
    assert state.get_tensor_and_data_parallel_group(True).size == 2
    assert state.get_pipeline_model_parallel_next_rank() == (rank + 2) % 4
    assert state.get_pipeline_model_parallel_prev_rank() == (rank + 2) % 4
    _check_stages(state, rank)
    _raises(RuntimeError, "already initialised", state.initialize_model_parallel)
    state.set_tensor_model_parallel_rank(7)
    assert state.get_tensor_model_parallel_rank() == 7
    total = state.get_embedding_group().all_gather_object(rank)
    state.destroy_model_parallel()
    assert not state.model_parallel_is_initialized()
    return total


def _check_stages(state, rank):
    assert state.get_virtual_pipeline_model_parallel_rank() == 0
    assert state.get_virtual_pipeline_model_parallel_world_size() == 2
    assert state.is_pipeline_first_stage() == (rank < 2)
    assert not state.is_pipeline_last_stage()
    assert state.is_rank_in_embedding_group() == (rank < 2)
    assert state.is_pipeline_last_stage(ignore_virtual=True) == (rank >= 2)
    state.set_virtual_pipeline_model_parallel_rank(1)
    assert state.is_pipeline_last_stage() == (rank >= 2)
    assert not state.is_pipeline_first_stage()
    assert state.is_rank_in_embedding_group() == (rank >= 2)
    assert state.is_rank_in_embedding_group(ignore_virtual=True)
    assert state.is_rank_in_position_embedding_group() == (rank < 2)
    if rank >= 2:
        _raises(RuntimeError, "no position-embedding group", state.get_position_embedding_group)


def errors_and_hierarchy():
    """Every refusal, then nested context-parallel groups."""
    from mindspeed_ms.core import comm
    from mindspeed_ms.core import parallel_state as state

    start = state.initialize_model_parallel
    _raises(RuntimeError, "multiple of 3", start, 3)
    _raises(RuntimeError, "at least 2", start, virtual_pipeline_model_parallel_size=2)
    _raises(RuntimeError, "order", start, order="")
    _raises(RuntimeError, "twice", start, order="tp-tp-pp")
    _raises(RuntimeError, "multiply to 2", start, context_parallel_size=4, hierarchical_context_parallel_sizes=[2, 1])
    _raises(ValueError, "split_rank", start, pipeline_model_parallel_split_rank=1)
    _raises(ValueError, "NCCL", start, communicator_config_path="nccl.yaml")
    _raises(ValueError, "zero_shard", start, zero_shard=2)
    start(context_parallel_size=4, hierarchical_context_parallel_sizes=[2, 2], ulysses_degree_in_cp=2)
    rank = comm.get_rank()
    inner, outer = state.get_hierarchical_context_parallel_groups()
    assert list(inner.ranks) == [rank // 2 * 2, rank // 2 * 2 + 1] and list(outer.ranks) == [rank % 2, rank % 2 + 2]
    assert state.get_ulysses_group().ranks == inner.ranks and state.get_ring_group().ranks == outer.ranks
    assert state.get_context_parallel_global_ranks() == [0, 1, 2, 3]
    assert state.get_data_parallel_world_size() == 1 and state.get_data_parallel_world_size(True) == 4
    return state.get_context_parallel_rank()


def expert_groups():
    """ep2 with expert tensor parallelism 1 on tp2."""
    from mindspeed_ms.core import comm
    from mindspeed_ms.core import parallel_state as state

    state.initialize_model_parallel(2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    rank = comm.get_rank()
    assert state.get_expert_tensor_parallel_world_size() == 1
    assert list(state.get_expert_model_parallel_group().ranks) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert list(state.get_expert_data_parallel_group().ranks) == [rank % 2, rank % 2 + 2]
    assert state.get_expert_tensor_and_model_parallel_world_size() == 2
    return state.get_expert_model_parallel_rank()


def every_getter():
    """Size and rank of every kind of group for one rank of a large grid, against Megatron's order tp-cp-ep-dp-pp."""
    from mindspeed_ms.core import parallel_state as state
    from mindspeed_ms.layout.ranks import WorldLayout

    # tp 2, cp 3, dp 10, pp 7; experts: tp 4, ep 5, dp 3
    pp, dp, cp, tp = 5, 7, 2, 1
    rank = ((pp * 10 + dp) * 3 + cp) * 2 + tp
    expert_tp, ep, expert_dp = rank % 4, rank // 4 % 5, rank // 20 % 3
    state.set_grid(state.ParallelGrid(WorldLayout(420, tp=2, cp=3, pp=7, ep=5, expert_tp=4), rank, None, None))
    expected = {
        "tensor_model_parallel": (2, tp),
        "pipeline_model_parallel": (7, pp),
        "context_parallel": (3, cp),
        "ulysses": (3, cp),
        "ring": (1, 0),
        "data_parallel": (10, dp),
        "model_parallel": (14, pp * 2 + tp),
        "tensor_and_data_parallel": (20, dp * 2 + tp),
        "tensor_and_context_parallel": (6, cp * 2 + tp),
        "expert_model_parallel": (5, ep),
        "expert_tensor_parallel": (4, expert_tp),
        "expert_data_parallel": (3, expert_dp),
        "expert_tensor_and_model_parallel": (20, ep * 4 + expert_tp),
    }
    for name, (size, place) in expected.items():
        found = getattr(state, f"get_{name}_world_size")(), getattr(state, f"get_{name}_rank")()
        assert found == (size, place), (name, found)
    with_context = {"data_parallel": (30, dp * 3 + cp), "tensor_and_data_parallel": (60, (dp * 3 + cp) * 2 + tp)}
    for name, (size, place) in with_context.items():
        found = getattr(state, f"get_{name}_world_size")(True), getattr(state, f"get_{name}_rank")(True)
        assert found == (size, place), (name, found)
    stage = 60  # ranks of one stage
    assert state.get_pipeline_model_parallel_next_rank() == rank + stage
    assert state.get_pipeline_model_parallel_prev_rank() == rank - stage
    assert (state.get_pipeline_model_parallel_first_rank(), state.get_pipeline_model_parallel_last_rank()) == (
        rank - pp * stage,
        rank + stage,
    )
    assert state.get_data_parallel_src_rank() == rank - dp * 6
    assert state.get_data_parallel_src_rank(with_context_parallel=True) == pp * stage + tp
    for name in ("tensor_model_parallel", "pipeline_model_parallel", "expert_model_parallel", "expert_tensor_parallel"):
        for what in ("world_size", "rank"):
            getattr(state, f"set_{name}_{what}")(99)
            changed = [other for other in expected if getattr(state, f"get_{other}_{what}")() == 99]
            assert changed == [name], (name, what, changed)
            getattr(state, f"set_{name}_{what}")(None)


def test_every_getter_is_of_its_own_group(world):
    world(1)(every_getter)


def test_grid_of_four(world):
    assert world(4)(grid_of_four) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_errors_and_hierarchy(world):
    assert world(4)(errors_and_hierarchy) == [0, 1, 2, 3]


def test_expert_groups(world):
    assert world(4)(expert_groups) == [0, 1, 0, 1]
