"""Low-rank adapters (LoRA) of parallel linears: ColumnParallelLoRA, RowParallelLoRA, and `add_adapters` to a built model.

Source: upstream's classes; scale and dropout as in PEFT: `linear(x) + scale * (dropout(x) A^T) B^T`.
"""

from contextlib import contextmanager
from dataclasses import replace

from mindspeed_ms import ops
from mindspeed_ms.core.autograd import Function
from mindspeed_ms.core.device import dtype_name
from mindspeed_ms.core.rng import get_rng_tracker
from mindspeed_ms.core.tensor_parallel.cell import ParallelCell, deferred_initialization, description_of, set_description
from mindspeed_ms.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from mindspeed_ms.core.tensor_parallel.linear import cast, linear_with_grad_accumulation_and_async_allreduce
from mindspeed_ms.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from mindspeed_ms.layout.adapters import Adapter, adapters_of, is_trained_beside
from mindspeed_ms.layout.describers.lora import describe_lora
from mindspeed_ms.layout.layer_parameters import LayerPart


class AddLowRank(Function):
    """Autograd Function `output + scale * low B^T`: the second product of an adapter and its addition.

    Under sequence parallelism of a column-parallel linear `low` is `[s / tp, b, r]`, gathered here; its gradient is
    reduce-scattered, or without it (`reduces`) all-reduced: both are only `r` wide. The sum takes the memory of `output`.
    """

    @staticmethod
    def forward(ctx, output, low, weight, scale, compute_dtype, reduces, sequence_parallel, group):
        """`[..., out]` and `[..., r]` with B `[out, r]` to `[..., out]`."""
        total = ops.scaled(cast(low, compute_dtype), scale)
        if sequence_parallel:
            total = group.all_gather(total)
        ctx.save_for_backward(total)
        ctx.weight, ctx.scale, ctx.low_dtype, ctx.compute_dtype = weight, scale, low.dtype, compute_dtype
        ctx.reduces, ctx.sequence_parallel, ctx.group = reduces, sequence_parallel, group
        return ops.add_linear(output, total, cast(weight, compute_dtype))

    @staticmethod
    def backward(ctx, grad_output):
        """Gradients of output, low and B."""
        (total,) = ctx.saved_tensors
        weight, reducing, grad_low, grad_weight = ctx.weight, None, None, None
        if ctx.needs_input_grad[1]:
            grad_low = ops.scaled(ops.linear_input_grad(grad_output, cast(weight, ctx.compute_dtype)), ctx.scale)
            if ctx.sequence_parallel:
                reducing = ctx.group.reduce_scatter(grad_low, async_op=True)
            elif ctx.reduces:
                reducing = ctx.group.all_reduce(grad_low, async_op=True)
        if ctx.needs_input_grad[2]:
            grad_weight = cast(ops.linear_weight_grad(grad_output, total), weight.dtype)
        if reducing is not None:
            grad_low = reducing.wait()
        return grad_output, cast(grad_low, ctx.low_dtype), grad_weight, None, None, None, None, None


class _LoRA(ParallelCell):
    """Adapter of a parallel linear: its parameters `lora_a`, `lora_b`, and what the two classes share.

    Attribute `is_active`: False computes the base alone, such as a reference model.
    """

    is_active = True

    def _create_adapter(self, adapter):
        """Give a built linear its adapter."""
        if not self.transpose_b:
            raise ValueError(f"{self._label} needs a weight [out, in]: leave transpose_b True.")
        if self.weight is None or self.is_expert:
            raise ValueError(f"{self._label} needs a weight of its own, and no expert's.")
        self.scale, self.lora_dropout = adapter.scale, adapter.dropout
        part = LayerPart(self.rank, self.world_size, dtype_name(self.param_dtype), self.sequence_parallel)
        self.create_parameters(describe_lora(description_of(self.weight), part, adapter))

    def _product_with_a(self, input_, differs_between_ranks):
        """`dropout(x) A^T`: `[..., in]` to `[..., r]`."""
        if self.training and self.lora_dropout > 0.0:
            tracker, shape, keep = get_rng_tracker(), tuple(input_.shape), 1.0 - self.lora_dropout
            if differs_between_ranks:
                with tracker.fork() as state:
                    mask = state.keep_mask(shape, keep)
            else:
                mask = tracker.current.keep_mask(shape, keep)
            input_ = ops.dropout(input_, self.lora_dropout, mask)
        return linear_with_grad_accumulation_and_async_allreduce(
            input_, self.lora_a, None, self.fuse_accumulation, False, False, compute_dtype=self.compute_dtype, group=self.group
        )

    def _add(self, output, low, reduces, sequence_parallel):
        is_parallel = self.world_size > 1
        flags = reduces and is_parallel, sequence_parallel and is_parallel
        return AddLowRank.apply(output, low, self.lora_b, self.scale, self.compute_dtype, *flags, self.group)


class ColumnParallelLoRA(_LoRA, ColumnParallelLinear):
    """ColumnParallelLinear with a low-rank adapter: A `[r, in]` is on every rank, B `[out / tp, r]` cut like the weight.

    Args: as `ColumnParallelLinear`, and
        lora_rank (int), lora_alpha (float), lora_dropout (float): see `layout.Adapter`; scale alpha / rank.

    Raises:
        ValueError: as `ColumnParallelLinear`; an expert, a weight that comes with each call or is `[in, out]`,
            `disable_grad_reduce`.
    """

    def __init__(self, *sizes, lora_rank=8, lora_alpha=32, lora_dropout=0.0, **arguments):
        super().__init__(*sizes, **arguments)
        self._create_adapter(Adapter("lora", (), lora_rank, lora_alpha, lora_dropout))

    def _create_adapter(self, adapter):
        if self.disable_grad_reduce:
            raise ValueError("ColumnParallelLoRA reduces the gradient of its input: leave disable_grad_reduce False.")
        super()._create_adapter(adapter)

    def construct(self, input_, weight=None):
        """See `ColumnParallelLinear`."""
        if not self.is_active:
            return super().construct(input_, weight)
        gathers, self.gather_output = self.gather_output, False
        try:
            output, bias = super().construct(input_, weight)
        finally:
            self.gather_output = gathers
        low = self._product_with_a(input_, self.sequence_parallel)
        output = self._add(output, low, not self.sequence_parallel, self.sequence_parallel)
        return gather_from_tensor_model_parallel_region(output, self.group) if gathers else output, bias


class RowParallelLoRA(_LoRA, RowParallelLinear):
    """RowParallelLinear with a low-rank adapter: A `[r, in / tp]` is cut like the weight, B `[out, r]` on every rank.

    Args: as `RowParallelLinear`, and those of `ColumnParallelLoRA`.

    Raises:
        ValueError: as `RowParallelLinear`; an expert, a weight that is `[in, out]`.
    """

    def __init__(self, *sizes, lora_rank=8, lora_alpha=32, lora_dropout=0.0, **arguments):
        super().__init__(*sizes, **arguments)
        self._create_adapter(Adapter("lora", (), lora_rank, lora_alpha, lora_dropout))

    def construct(self, input_):
        """See `RowParallelLinear`."""
        output, bias = super().construct(input_)
        if not self.is_active:
            return output, bias
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, self.group)
        low = self._product_with_a(input_, True)
        if self.sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low, self.group)
        else:
            low = reduce_from_tensor_model_parallel_region(low, self.group)
        return self._add(output, low, False, False), bias


@contextmanager
def adapters_switched_off(cells):
    """Context manager: the adapters in `cells` compute nothing, as of a reference model."""
    adapters = [part for cell in cells for _, part in cell.cells_and_names() if isinstance(part, _LoRA)]
    for part in adapters:
        part.is_active = False
    try:
        yield
    finally:
        for part in adapters:
            part.is_active = True


_ADAPTED = {ColumnParallelLinear: ColumnParallelLoRA, RowParallelLinear: RowParallelLoRA}


def add_adapters(model, cell):
    """Add the adapters of a model to a built cell, before `initialize_parameters`; everything else is frozen.

    Args:
        model (ModelDescription): read: `adapters`.
        cell (Cell): the model or a chunk of it, whose names are those of the state dictionary.

    Returns:
        Cell: the same; as it was if there are no adapters or it has them.
    """
    if not model.adapters or any(isinstance(part, _LoRA) for _, part in cell.cells_and_names()):
        return cell
    for name, parameter in cell.parameters_and_names():
        if not is_trained_beside(name):
            set_description(parameter, replace(description_of(parameter), trainable=False))
    with deferred_initialization():
        for name, part in cell.cells_and_names():
            kind = _ADAPTED.get(type(part))
            for adapter in adapters_of(model, name) if kind is not None and part.weight is not None else ():
                part.__class__ = kind
                part._create_adapter(adapter)
    return cell
