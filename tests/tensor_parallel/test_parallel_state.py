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


def test_grid_of_four(world):
    assert world(4)(grid_of_four) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_errors_and_hierarchy(world):
    assert world(4)(errors_and_hierarchy) == [0, 1, 2, 3]


def test_expert_groups(world):
    assert world(4)(expert_groups) == [0, 1, 0, 1]
