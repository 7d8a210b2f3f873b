"""Getters of the groups that join several axes, and of the experts' groups; public through `parallel_state`."""

from mindspeed_ms.core.parallel_grid import get_group, get_group_ranks, group_rank, group_size, override

__all__ = [
    "get_data_modulo_expert_parallel_group",
    "get_expert_data_parallel_group",
    "get_expert_data_parallel_rank",
    "get_expert_data_parallel_world_size",
    "get_expert_model_parallel_group",
    "get_expert_model_parallel_rank",
    "get_expert_model_parallel_world_size",
    "get_expert_tensor_and_model_parallel_group",
    "get_expert_tensor_and_model_parallel_rank",
    "get_expert_tensor_and_model_parallel_world_size",
    "get_expert_tensor_model_pipeline_parallel_group",
    "get_expert_tensor_parallel_group",
    "get_expert_tensor_parallel_rank",
    "get_expert_tensor_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_src_rank",
    "get_model_parallel_world_size",
    "get_ring_group",
    "get_ring_rank",
    "get_ring_world_size",
    "get_tensor_and_context_parallel_group",
    "get_tensor_and_context_parallel_rank",
    "get_tensor_and_context_parallel_world_size",
    "get_tensor_and_data_parallel_group",
    "get_tensor_and_data_parallel_rank",
    "get_tensor_and_data_parallel_world_size",
    "get_tensor_and_expert_parallel_group",
    "get_tensor_and_expert_parallel_world_size",
    "get_ulysses_group",
    "get_ulysses_rank",
    "get_ulysses_world_size",
    "set_expert_model_parallel_rank",
    "set_expert_model_parallel_world_size",
    "set_expert_tensor_parallel_rank",
    "set_expert_tensor_parallel_world_size",
]


def _tensor_and_data(with_context_parallel):
    return "tp-dp-cp" if with_context_parallel else "tp-dp"


def get_model_parallel_group():
    """Group of the ranks that hold one copy of the model (tensor x pipeline)."""
    return get_group("tp-pp")


def get_model_parallel_world_size():
    """Number of ranks that hold one copy of the model."""
    return group_size("tp-pp")


def get_model_parallel_rank():
    """Rank among those that hold one copy of the model."""
    return group_rank("tp-pp")


def get_model_parallel_src_rank():
    """Global rank of the first member of the model-parallel group."""
    return get_group_ranks("tp-pp")[0]


def get_tensor_and_data_parallel_group(with_context_parallel=False):
    """Group over tensor and data parallelism (and context parallelism, if asked)."""
    return get_group(_tensor_and_data(with_context_parallel))


def get_tensor_and_data_parallel_world_size(with_context_parallel=False):
    """Size of the tensor-and-data-parallel group."""
    return group_size(_tensor_and_data(with_context_parallel))


def get_tensor_and_data_parallel_rank(with_context_parallel=False):
    """Rank in the tensor-and-data-parallel group."""
    return group_rank(_tensor_and_data(with_context_parallel))


def get_tensor_and_context_parallel_group():
    """Group over tensor and context parallelism."""
    return get_group("tp-cp")


def get_tensor_and_context_parallel_world_size():
    """Size of the tensor-and-context-parallel group."""
    return group_size("tp-cp")


def get_tensor_and_context_parallel_rank():
    """Rank in the tensor-and-context-parallel group."""
    return group_rank("tp-cp")


def get_ulysses_group():
    """Part of the context-parallel group that exchanges heads for sequence."""
    return get_group("ulysses")


def get_ulysses_world_size():
    """Size of the ulysses group."""
    return group_size("ulysses")


def get_ulysses_rank():
    """Rank in the ulysses group."""
    return group_rank("ulysses")


def get_ring_group():
    """Part of the context-parallel group that passes keys and values around."""
    return get_group("ring")


def get_ring_world_size():
    """Size of the ring group."""
    return group_size("ring")


def get_ring_rank():
    """Rank in the ring group."""
    return group_rank("ring")


def get_expert_model_parallel_group(check_initialized=True):
    """Group of the ranks that share the experts of a layer."""
    return get_group("ep", check_initialized)


def get_expert_model_parallel_world_size():
    """Size of the expert-parallel group."""
    return group_size("ep")


def get_expert_model_parallel_rank():
    """Rank in the expert-parallel group."""
    return group_rank("ep")


def set_expert_model_parallel_world_size(world_size):
    """Pretend another size (tools and tests); None ends it."""
    override("ep", "size", world_size)


def set_expert_model_parallel_rank(rank):
    """Pretend another rank (tools and tests); None ends it."""
    override("ep", "rank", rank)


def get_expert_tensor_parallel_group(check_initialized=True):
    """This rank's communicator of the group that shares each expert's tensors."""
    return get_group("expert-tp", check_initialized)


def get_expert_tensor_parallel_world_size():
    """Size of the group that shares each expert's tensors."""
    return group_size("expert-tp")


def get_expert_tensor_parallel_rank():
    """Rank in the group that shares each expert's tensors."""
    return group_rank("expert-tp")


def set_expert_tensor_parallel_world_size(world_size):
    """Pretend another size (tools and tests); None ends it."""
    override("expert-tp", "size", world_size)


def set_expert_tensor_parallel_rank(rank):
    """Pretend another rank (tools and tests); None ends it."""
    override("expert-tp", "rank", rank)


def get_expert_tensor_and_model_parallel_group(check_initialized=True):
    """This rank's communicator of the group over expert tensor and expert parallelism."""
    return get_group("tp-ep", check_initialized)


def get_expert_tensor_and_model_parallel_world_size():
    """Size of the group over expert tensor and expert parallelism."""
    return group_size("tp-ep")


def get_expert_tensor_and_model_parallel_rank():
    """Rank in the group over expert tensor and expert parallelism."""
    return group_rank("tp-ep")


def get_expert_data_parallel_group():
    """This rank's communicator of the group that holds the same experts."""
    return get_group("expert-dp")


def get_expert_data_parallel_world_size():
    """Size of the group that holds the same experts."""
    return group_size("expert-dp")


def get_expert_data_parallel_rank():
    """Rank in the group that holds the same experts."""
    return group_rank("expert-dp")


def get_expert_tensor_model_pipeline_parallel_group():
    """Group over expert tensor, expert and pipeline parallelism."""
    return get_group("tp-ep-pp")


def get_data_modulo_expert_parallel_group():
    """Older name of the expert-data-parallel group."""
    return get_group("expert-dp")


def get_tensor_and_expert_parallel_group():
    """Older name of the expert tensor and expert parallel group."""
    return get_group("tp-ep")


def get_tensor_and_expert_parallel_world_size():
    """Older name of the expert tensor and expert parallel size."""
    return group_size("tp-ep")
