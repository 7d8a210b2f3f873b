"""Gradient reductions after a step's last backward: data parallel, sequence parallel, tied embeddings, division by tokens.

Source: Megatron core, `finalize_model_grads.py`, in the same order: data-parallel reduction, sums over tensor-parallel
ranks that saw different tokens, tied embeddings, division by the number of tokens. Parameters are chosen by their
attributes, never by name.
"""

import numpy as np

from mindspeed_ms.core import parallel_state, storage
from mindspeed_ms.core.expert_parallel.balance import update_expert_biases
from mindspeed_ms.core.tensor_parallel.cell import description_of


def finalize_model_grads(model, num_tokens=None):
    """Complete the reduced gradients in every `main_grad`.

    Args:
        model (list[ShardedModel]): this rank's model chunks.
        num_tokens (Optional[float]): with `calculate_per_token_loss`, the tokens that this rank's gradients are summed
            over; all gradients are divided by the number in the whole global batch.
    """
    for chunk in model:
        chunk.finish_grad_sync()
    _allreduce_sequence_parallel_grads(model)
    _allreduce_embedding_grads(model)
    _update_expert_biases(model)
    if num_tokens is not None:
        total = _total_tokens(num_tokens)
        if total > 0:
            for chunk in model:
                chunk.scale_gradients(1.0 / total)


def _trainable_parameters(model):
    for chunk in model:
        yield from chunk.trainable_parameters()


def _allreduce_sequence_parallel_grads(model):
    """All-reduce over the tensor-parallel group the gradients that each rank computed from its part of the sequence; those of
    experts over the expert-tensor group."""
    groups = {False: parallel_state.get_tensor_model_parallel_group(), True: parallel_state.get_expert_tensor_parallel_group()}
    described = [(param, description_of(param)) for param in _trainable_parameters(model)]
    for expert, group in groups.items():
        if group.size > 1:
            grads = [param.main_grad for param, about in described if about.sequence_parallel and about.expert == expert]
            _allreduce_coalesced(grads, group)


def _allreduce_embedding_grads(model):
    """All-reduce the gradients of a tied embedding's copies on the first and last pipeline stage."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return
    if not parallel_state.is_rank_in_embedding_group(ignore_virtual=True):
        return
    group = parallel_state.get_embedding_group()
    if group.size > 1:
        for param in _trainable_parameters(model):
            # where gradients are sharded, both stages hold the same piece, maybe none
            if description_of(param).shared and param.main_grad.size:
                group.all_reduce_in_place(param.main_grad, op="sum")


def _update_expert_biases(model):
    """Move the routers' expert biases by the tokens that the experts got in this step."""
    routers = [router for chunk in model for router in chunk.routers_with_bias()]
    if routers:
        update_expert_biases(routers, routers[0].moe.moe_router_bias_update_rate)


def _allreduce_coalesced(grads, group):
    """All-reduce tensors with one collective per dtype."""
    by_dtype = {}
    for grad in grads:
        if grad.size:  # where gradients are sharded, this rank may hold nothing of one
            by_dtype.setdefault(grad.dtype, []).append(grad)
    for dtype, same in by_dtype.items():
        flat = storage.FlatBuffer(sum(grad.size for grad in same), dtype)
        slices, start = [], 0
        for grad in same:
            slices.append(flat.slice(start, start + grad.size))
            start += grad.size
            storage.write(slices[-1], grad)
        group.all_reduce_in_place(flat.tensor, op="sum")
        for grad, part in zip(same, slices):
            storage.write(grad, part)


def _total_tokens(num_tokens):
    """Number of tokens of the global batch: counted by the last stage only; context-parallel ranks hold parts of a sequence."""
    counted = num_tokens if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else 0.0
    total = np.array([counted], np.float64)
    for group in (
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_pipeline_model_parallel_group(),
    ):
        if group.size > 1:
            total = group.all_gather(total).sum(keepdims=True)
    return float(total[0])
