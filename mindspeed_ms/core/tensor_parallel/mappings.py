"""Mappings between tensor-parallel regions: collectives on activations, forward and backward.

| function | forward | backward |
|---|---|---|
| copy_to_tensor_model_parallel_region | identity | all-reduce |
| reduce_from_tensor_model_parallel_region | all-reduce | identity |
| scatter_to_tensor_model_parallel_region | own part of the last dimension | gather |
| gather_from_tensor_model_parallel_region | gather the last dimension | own part |
| scatter_to_sequence_parallel_region | own part of the first dimension | gather |
| gather_from_sequence_parallel_region | gather the first dimension | reduce-scatter (or own part) |
| reduce_scatter_to_sequence_parallel_region | reduce-scatter the first dimension | gather |
| all_gather_last_dim_from_tensor_parallel_region | gather the last dimension | reduce-scatter |
| reduce_scatter_last_dim_to_tensor_parallel_region | reduce-scatter the last dimension | gather |
| all_to_all, all_to_all_sp2hp, all_to_all_hp2sp | exchange | exchange back |
| reduce_from_context_parallel_region | all-reduce over the context-parallel group | identity |

Each takes an optional `group` (default: the tensor-parallel group) and is free of cost in a group of one.
Source: Megatron core, `tensor_parallel/mappings.py`. The same as Cells, under upstream's class names, in
`mapping_cells.py`.
"""

from mindspore import mint

from mindspeed_ms import ops
from mindspeed_ms.core import parallel_state, storage
from mindspeed_ms.core.autograd import Function
from mindspeed_ms.core.tensor_parallel.utils import divide


def _tensor_group(group):
    return parallel_state.get_tensor_model_parallel_group() if group is None else group


# ---- parts and joins, outside the tape ---------------------------------------------------------------------------


def _unchanged(tensor, group):
    return tensor


def _all_reduce(tensor, group):
    return group.all_reduce(tensor)


def _exchange(tensor, group, output_split_sizes, input_split_sizes):
    return group.all_to_all(tensor, output_split_sizes, input_split_sizes)


def _exchange_back(tensor, group, output_split_sizes, input_split_sizes):
    return group.all_to_all(tensor, input_split_sizes, output_split_sizes)


def _split_along_first_dim(tensor, group, split_sizes=None):
    """This rank's part of `[sum(n), ...]`; `split_sizes` lists each rank's n when they differ."""
    if split_sizes is not None:
        return mint.narrow(tensor, 0, sum(split_sizes[: group.rank]), split_sizes[group.rank]).contiguous()
    size = divide(tensor.shape[0], group.size, "the first dimension of the tensor", f"the size of group {group.name}")
    return mint.narrow(tensor, 0, group.rank * size, size).contiguous()


def _split_along_last_dim(tensor, group):
    size = divide(tensor.shape[-1], group.size, "the last dimension of the tensor", f"the size of group {group.name}")
    return mint.narrow(tensor, -1, group.rank * size, size).contiguous()


def _stack_to_last_dim(stacked, shape, count):
    """`[count * n, ..., k]`, the ranks' parts stacked, to `[n, ..., count * k]`."""
    dimensions = len(shape)
    stacked = stacked.reshape((count, *tuple(shape)))
    order = (*tuple(range(1, dimensions)), 0, dimensions)
    return mint.permute(stacked, order).reshape((*tuple(shape[:-1]), count * shape[-1]))


def _last_dim_to_stack(tensor, count):
    """`[n, ..., count * k]` to `[count * n, ..., k]`: inverse of `_stack_to_last_dim`."""
    shape = tuple(tensor.shape)
    part = divide(shape[-1], count, "the last dimension of the tensor", "the size of the group")
    dimensions = len(shape)
    split = tensor.reshape((*shape[:-1], count, part))
    order = (dimensions - 1, *tuple(range(dimensions - 1)), dimensions)
    return mint.permute(split, order).reshape((count * shape[0], *shape[1:-1], part))


def _gather_along_last_dim(tensor, group):
    return _stack_to_last_dim(group.all_gather(tensor), tensor.shape, group.size)


def _reduce_scatter_along_last_dim(tensor, group):
    return group.reduce_scatter(_last_dim_to_stack(tensor, group.size))


def _pad_first_dim(tensor, length):
    missing = length - tensor.shape[0]
    if missing == 0:
        return tensor
    padding = storage.zeros((missing, *tensor.shape[1:]), tensor.dtype)
    return ops.cat((tensor, padding), dim=0)


def _gather_along_first_dim(tensor, group, split_sizes=None):
    """All-gather `[n, ...]` to `[sum(n), ...]`; `split_sizes` lists each rank's n when they differ."""
    if split_sizes is None:
        return group.all_gather(tensor)
    _check_splits(split_sizes, group)
    longest = max(split_sizes)
    gathered = group.all_gather(_pad_first_dim(tensor, longest))
    parts = [mint.narrow(gathered, 0, index * longest, size) for index, size in enumerate(split_sizes)]
    return ops.cat(parts, dim=0)


def _reduce_scatter_along_first_dim(tensor, group, split_sizes=None):
    """Reduce-scatter `[sum(n), ...]` to `[n, ...]`; `split_sizes` lists each rank's n when they differ."""
    if split_sizes is None:
        divide(tensor.shape[0], group.size, "the first dimension of the tensor", f"the size of group {group.name}")
        return group.reduce_scatter(tensor)
    _check_splits(split_sizes, group)
    longest, offset, parts = max(split_sizes), 0, []
    for size in split_sizes:
        parts.append(_pad_first_dim(mint.narrow(tensor, 0, offset, size), longest))
        offset += size
    scattered = group.reduce_scatter(ops.cat(parts, dim=0))
    return mint.narrow(scattered, 0, 0, split_sizes[group.rank]).contiguous()


def _check_splits(split_sizes, group):
    if len(split_sizes) != group.size:
        raise ValueError(f"split sizes {list(split_sizes)} must list one size for each of the {group.size} ranks.")


# ---- differentiable forms ----------------------------------------------------------------------------------------


def _region(map_forward, map_backward):
    """Differentiable function of two maps of (tensor, group, *sizes), one for each direction.

    Returns:
        Callable: takes tensor, group (None: the tensor-parallel group) and sizes; does nothing in a group of one.
    """

    class Region(Function):
        @staticmethod
        def forward(ctx, input_, group, *sizes):
            ctx.group, ctx.sizes = group, sizes
            return map_forward(input_, group, *sizes)

        @staticmethod
        def backward(ctx, grad_output):
            return map_backward(grad_output, ctx.group, *ctx.sizes), None, *(None for _ in ctx.sizes)

    def apply(input_, group, *sizes):
        group = _tensor_group(group)
        return input_ if group.size == 1 else Region.apply(input_, group, *sizes)

    return apply


_copy = _region(_unchanged, _all_reduce)
_reduce = _region(_all_reduce, _unchanged)
_scatter_last = _region(_split_along_last_dim, _gather_along_last_dim)
_gather_last = _region(_gather_along_last_dim, _split_along_last_dim)
_gather_last_of_parts = _region(_gather_along_last_dim, _reduce_scatter_along_last_dim)
_reduce_scatter_last = _region(_reduce_scatter_along_last_dim, _gather_along_last_dim)
_scatter_first = _region(_split_along_first_dim, _gather_along_first_dim)
_gather_first = _region(_gather_along_first_dim, _split_along_first_dim)
_gather_first_of_parts = _region(_gather_along_first_dim, _reduce_scatter_along_first_dim)
_reduce_scatter_first = _region(_reduce_scatter_along_first_dim, _gather_along_first_dim)
_all_to_all = _region(_exchange, _exchange_back)


# ---- public functions --------------------------------------------------------------------------------------------


def copy_to_tensor_model_parallel_region(input_, group=None):
    """Enter a tensor-parallel region: the same tensor forward, all-reduced gradients backward."""
    return _copy(input_, group)


def reduce_from_tensor_model_parallel_region(input_, group=None):
    """Leave a tensor-parallel region: the sum over the ranks forward, the same gradient backward."""
    return _reduce(input_, group)


def scatter_to_tensor_model_parallel_region(input_, group=None):
    """`[..., n]` to the rank's own `[..., n / tp]`. ValueError when n is not divisible."""
    return _scatter_last(input_, group)


def gather_from_tensor_model_parallel_region(input_, group=None):
    """`[..., n / tp]` to `[..., n]`; backward each rank keeps its own part of the gradient."""
    return _gather_last(input_, group)


def scatter_to_sequence_parallel_region(input_, group=None):
    """`[s, ...]` to the rank's own `[s / tp, ...]`. ValueError when s is not divisible."""
    return _scatter_first(input_, group)


def gather_from_sequence_parallel_region(
    input_, tensor_parallel_output_grad=True, group=None, output_split_sizes=None, use_global_buffer=False
):
    """`[s / tp, ...]` to `[s, ...]`.

    Args:
        input_ (Tensor): this rank's part.
        tensor_parallel_output_grad (bool): True when the gathered tensor goes into tensor-parallel computation, whose
            gradients differ per rank and are reduce-scattered; False when every rank computes the same with it, then
            each keeps its part of the gradient.
        group (Optional[ProcessGroup]): default the tensor-parallel group.
        output_split_sizes (Optional[list[int]]): first dimension of each rank's part when they differ.
        use_global_buffer (bool): accepted for Megatron's signature; no effect, MindSpore manages memory.
    """
    # The same computation on every rank gives every rank the same gradient: summing would count it size times.
    gather = _gather_first_of_parts if tensor_parallel_output_grad else _gather_first
    return gather(input_, group, output_split_sizes)


def reduce_scatter_to_sequence_parallel_region(input_, group=None, input_split_sizes=None, use_global_buffer=False):
    """`[s, ...]`, partial sums, to the part `[s / tp, ...]` of the whole sum; `input_split_sizes` for uneven parts."""
    return _reduce_scatter_first(input_, group, input_split_sizes)


def all_gather_last_dim_from_tensor_parallel_region(input_, group=None):
    """`[..., n / tp]` to `[..., n]`; gradients are reduce-scattered."""
    return _gather_last_of_parts(input_, group)


def reduce_scatter_last_dim_to_tensor_parallel_region(input_, group=None):
    """`[..., n]`, partial sums, to the rank's part `[..., n / tp]` of the whole sum."""
    return _reduce_scatter_last(input_, group)


def all_to_all(group, input_, output_split_sizes=None, input_split_sizes=None):
    """Exchange blocks of the first dimension within `group`.

    Args:
        group (ProcessGroup): who exchanges.
        input_ (Tensor): `[sum(input_split_sizes), ...]`; equal blocks when no sizes are given.
        output_split_sizes (Optional[list[int]]): rows that come from each rank.
        input_split_sizes (Optional[list[int]]): rows that go to each rank.
    """
    return _all_to_all(input_, group, output_split_sizes, input_split_sizes)


def all_to_all_even(group, input_, split_dim, concat_dim):
    """All-to-all of equal parts: cut `input_` along `split_dim`, join the received parts along `concat_dim`."""
    if group.size == 1:
        return input_
    size = divide(input_.shape[split_dim], group.size, f"axis {split_dim} of the tensor", "the size of the group")
    parts = [mint.narrow(input_, split_dim, index * size, size) for index in range(group.size)]
    exchanged = all_to_all(group, ops.cat(parts, dim=0))
    length = parts[0].shape[0]
    if concat_dim == 0:
        return exchanged
    arrived = [mint.narrow(exchanged, 0, index * length, length) for index in range(group.size)]
    return ops.cat(arrived, dim=concat_dim)


def all_to_all_sp2hp(input_, group=None):
    """Sequence parallel to hidden parallel: `[tokens / tp, h]` to `[tokens, h / tp]` (leading axes are flattened)."""
    group = _tensor_group(group)
    flat = input_.reshape((-1, input_.shape[-1]))
    if group.size == 1:
        return flat
    return all_to_all(group, _last_dim_to_stack(flat, group.size))


def all_to_all_hp2sp(input_, group=None):
    """Hidden parallel to sequence parallel: `[tokens, h / tp]` to `[tokens / tp, h]` (leading axes are flattened)."""
    group = _tensor_group(group)
    flat = input_.reshape((-1, input_.shape[-1]))
    if group.size == 1:
        return flat
    divide(flat.shape[0], group.size, "the number of tokens", "tensor_model_parallel_size")
    exchanged = all_to_all(group, flat)
    return _stack_to_last_dim(exchanged, (flat.shape[0] // group.size, flat.shape[1]), group.size)


def reduce_from_context_parallel_region(input_):
    """Sum over the context-parallel group forward, identity backward (each rank contributed its own part)."""
    return _reduce(input_, parallel_state.get_context_parallel_group())
