"""Context parallelism: each rank holds a part of every sequence. Cutting of batches; ring, Ulysses and hybrid attention."""

from mindspeed_ms.core.context_parallel.attention import context_parallel_attention
from mindspeed_ms.core.context_parallel.cutting import (
    current_cut,
    cut_along,
    get_batch_on_this_cp_rank,
    local_position_ids,
    marked_like,
    whole_along,
)
from mindspeed_ms.core.context_parallel.visible_keys import VisibleKeys

__all__ = [
    "VisibleKeys",
    "context_parallel_attention",
    "current_cut",
    "cut_along",
    "get_batch_on_this_cp_rank",
    "local_position_ids",
    "marked_like",
    "whole_along",
]
