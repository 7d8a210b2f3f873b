"""Cells of the tensor-parallel mappings, under upstream's names."""

from mindspore import mint, nn

from mindspeed_ms.core.tensor_parallel import mappings


class _Mapping(nn.Cell):
    """Base of mapping cells: applies one function; with `need_to_swapaxes` the input is `[b, s, ...]`."""

    function = None

    def __init__(self, need_to_swapaxes=False):
        super().__init__()
        self.need_to_swapaxes = need_to_swapaxes

    def construct(self, input_):
        """Apply the mapping."""
        if not self.need_to_swapaxes:
            return self._apply(input_)
        return mint.transpose(self._apply(mint.transpose(input_, 0, 1).contiguous()), 0, 1).contiguous()

    def _apply(self, input_):
        return type(self).function(input_)


class CopyToModelParallelRegion(_Mapping):
    """`mappings.copy_to_tensor_model_parallel_region`."""

    function = staticmethod(mappings.copy_to_tensor_model_parallel_region)


class ReduceFromModelParallelRegion(_Mapping):
    """`mappings.reduce_from_tensor_model_parallel_region`."""

    function = staticmethod(mappings.reduce_from_tensor_model_parallel_region)


class ScatterToModelParallelRegion(_Mapping):
    """`mappings.scatter_to_tensor_model_parallel_region`."""

    function = staticmethod(mappings.scatter_to_tensor_model_parallel_region)


class GatherFromModelParallelRegion(_Mapping):
    """`mappings.gather_from_tensor_model_parallel_region`."""

    function = staticmethod(mappings.gather_from_tensor_model_parallel_region)


class ScatterToSequenceParallelRegion(_Mapping):
    """`mappings.scatter_to_sequence_parallel_region`."""

    function = staticmethod(mappings.scatter_to_sequence_parallel_region)


class GatherFromSequenceParallelRegion(_Mapping):
    """`mappings.gather_from_sequence_parallel_region`."""

    def __init__(self, need_to_swapaxes=False, tensor_parallel_output_grad=True):
        super().__init__(need_to_swapaxes)
        self.tensor_parallel_output_grad = tensor_parallel_output_grad

    def _apply(self, input_):
        return mappings.gather_from_sequence_parallel_region(input_, self.tensor_parallel_output_grad)


class ReduceScatterToSequenceParallelRegion(_Mapping):
    """`mappings.reduce_scatter_to_sequence_parallel_region`."""

    function = staticmethod(mappings.reduce_scatter_to_sequence_parallel_region)


class AllGatherFromTensorParallelRegion(_Mapping):
    """`mappings.all_gather_last_dim_from_tensor_parallel_region`."""

    function = staticmethod(mappings.all_gather_last_dim_from_tensor_parallel_region)


class ReduceScatterToTensorParallelRegion(_Mapping):
    """`mappings.reduce_scatter_last_dim_to_tensor_parallel_region`."""

    function = staticmethod(mappings.reduce_scatter_last_dim_to_tensor_parallel_region)


class ReduceFromContextParallelRegion(_Mapping):
    """`mappings.reduce_from_context_parallel_region`."""

    function = staticmethod(mappings.reduce_from_context_parallel_region)


class AllToAllSP2HP(_Mapping):
    """`mappings.all_to_all_sp2hp`."""

    function = staticmethod(mappings.all_to_all_sp2hp)


class AllToAllHP2SP(_Mapping):
    """`mappings.all_to_all_hp2sp`."""

    function = staticmethod(mappings.all_to_all_hp2sp)


class AllToAll(nn.Cell):
    """`mappings.all_to_all` with fixed splits.

    Args:
        group (ProcessGroup): who exchanges.
        output_splits, input_splits (Optional[list[int]]): rows from and to each rank; None for equal parts.
    """

    def __init__(self, group, output_splits=None, input_splits=None):
        super().__init__()
        self.group, self.output_splits, self.input_splits = group, output_splits, input_splits

    def construct(self, input_):
        """`[sum(input_splits), ...]` to `[sum(output_splits), ...]`."""
        return mappings.all_to_all(self.group, input_, self.output_splits, self.input_splits)


class AllToAllEven(nn.Cell):
    """All-to-all of equal parts: cut along `split_dim` over the group, join the received parts along `concat_dim`.

    Args:
        group (ProcessGroup): who exchanges.
        split_count (int): number of parts; the size of the group.
        split_dim, concat_dim (int): axes.
    """

    def __init__(self, group, split_count, split_dim, concat_dim):
        super().__init__()
        if split_count != group.size:
            raise ValueError(f"AllToAllEven: split_count {split_count} must be the size of its group, {group.size}.")
        self.group, self.split_dim, self.concat_dim = group, split_dim, concat_dim

    def construct(self, input_):
        """Exchange the parts of the input."""
        return mappings.all_to_all_even(self.group, input_, self.split_dim, self.concat_dim)
