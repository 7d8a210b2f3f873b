"""Low-rank adapters (LoRA) of parallel linears: ColumnParallelLoRA, RowParallelLoRA, and `add_adapters` to a built model.

Source: upstream's classes; scale and dropout as in PEFT: `linear(x) + scale * (dropout(x) A^T) B^T`.
"""

from contextlib import contextmanager
from dataclasses import replace

from mindspeed_ms import ops
from mindspeed_ms.core.device import dtype_name
from mindspeed_ms.core.rng import get_rng_tracker
from mindspeed_ms.core.tensor_parallel.cell import ParallelCell, deferred_initialization, description_of, set_description
from mindspeed_ms.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from mindspeed_ms.core.tensor_parallel.linear import LinearWithGradAccumulationAndAsyncCommunication, cast
from mindspeed_ms.layout.adapters import Adapter, adapters_of, is_trained_beside
from mindspeed_ms.layout.describers.lora import describe_lora
from mindspeed_ms.layout.layer_parameters import LayerPart


class LinearWithLowRank(LinearWithGradAccumulationAndAsyncCommunication):
    """Autograd Function of a linear with its adapter: `x W^T + bias + scale * (dropout(x) A^T) B^T`.

    Both share their input and its gradient, and the adapter's product is added in the memory of the linear's. What is
    communicated for the adapter is `r` wide. Column-parallel: under sequence parallelism `x A^T` is gathered and its gradient
    reduce-scattered, otherwise the gradient is all-reduced. Row-parallel: `x W^T` and `x A^T` are both reduced (scattered
    under sequence parallelism, and their gradients gathered).
    """

    @staticmethod
    def forward(
        ctx, input_, weight, bias, compute_dtype, fuse_accumulation, allreduce_dgrad, sequence_parallel, group,
        a, b, scale, dropout, is_column,
    ):  # fmt: skip
        """`[..., in]` to `[..., out]`; A is `[r, in]`, B `[out, r]`, `dropout` (probability, mask of what is kept) or None."""
        base = LinearWithGradAccumulationAndAsyncCommunication
        gathers = is_column and sequence_parallel
        output = base.forward(ctx, input_, weight, bias, compute_dtype, fuse_accumulation, allreduce_dgrad, gathers, group)
        ctx.gathers_gradients = sequence_parallel and not is_column
        ctx.a, ctx.b, ctx.scale, ctx.dropout = a, b, scale, dropout
        low = ops.linear_forward(_dropped(cast(input_, compute_dtype), dropout), cast(a, compute_dtype))
        low = ops.scaled(low, scale)
        if gathers:
            low = group.all_gather(low)
        elif not is_column and group.size > 1:
            reduce = group.reduce_scatter if sequence_parallel else group.all_reduce
            output, low = reduce(output), reduce(low)
        ctx.save_for_backward(input_, low)
        return ops.add_linear(output, low, cast(b, compute_dtype))

    @staticmethod
    def backward(ctx, grad_output):
        """Gradients of input, weight, bias, A and B."""
        input_, low = ctx.saved_tensors
        a, b, dtype, group, reducing = ctx.a, ctx.b, ctx.compute_dtype, ctx.group, None
        needs_input, needs_a, needs_b = ctx.needs_input_grad[0], *ctx.needs_input_grad[8:10]
        low_grad = ops.scaled(ops.linear_input_grad(grad_output, cast(b, dtype), any_order=True), ctx.scale)
        grad_b = cast(ops.narrow_weight_grad(low, grad_output, transposed=True), b.dtype) if needs_b else None
        if ctx.gathers_gradients:
            grad_output, low_grad = group.all_gather(grad_output), group.all_gather(low_grad)
        elif ctx.sequence_parallel:
            reducing = group.reduce_scatter(low_grad, async_op=True)
        elif ctx.allreduce_dgrad:
            reducing = group.all_reduce(low_grad, async_op=True)
        grad_input, *others = LinearWithGradAccumulationAndAsyncCommunication.backward(ctx, grad_output)
        if reducing is not None:
            low_grad = reducing.wait()
        grad_a = None
        if needs_a:
            dropped = _dropped(cast(input_, dtype), ctx.dropout)
            grad_a = cast(ops.narrow_weight_grad(low_grad, dropped), a.dtype)
        if needs_input and ctx.dropout is None:
            grad_input = cast(ops.add_linear_input_grad(cast(grad_input, dtype), low_grad, cast(a, dtype)), ctx.input_dtype)
        elif needs_input:
            own = _dropped(ops.linear_input_grad(low_grad, cast(a, dtype)), ctx.dropout)
            grad_input = grad_input + cast(own, ctx.input_dtype)
        return grad_input, *others, grad_a, grad_b, None, None, None


def _dropped(tensor, dropout):
    return tensor if dropout is None else ops.dropout(tensor, *dropout)


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

    def _adapted_product(self, input_, bias, allreduce_dgrad):
        is_parallel, weights = self.world_size > 1, (self.lora_a, self.lora_b)
        return LinearWithLowRank.apply(
            input_,
            self.weight,
            bias,
            self.compute_dtype,
            self.fuse_accumulation,
            allreduce_dgrad and is_parallel,
            self.sequence_parallel and is_parallel,
            self.group,
            *weights,
            self.scale,
            self._dropout_of(input_),
            self.is_column,
        )

    def _dropout_of(self, input_):
        """Probability and mask of what dropout keeps of the adapter's input; None without dropout."""
        if not self.training or self.lora_dropout == 0.0:
            return None
        tracker, shape, keep = get_rng_tracker(), tuple(input_.shape), 1.0 - self.lora_dropout
        if self.is_column and not self.sequence_parallel:  # every rank has the same input
            return self.lora_dropout, tracker.current.keep_mask(shape, keep)
        with tracker.fork() as state:
            return self.lora_dropout, state.keep_mask(shape, keep)


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

    def _matmul(self, input_, weight, bias, allreduce_dgrad, sequence_parallel):
        if not self.is_active:
            return super()._matmul(input_, weight, bias, allreduce_dgrad, sequence_parallel)
        return self._adapted_product(input_, bias, allreduce_dgrad)


class RowParallelLoRA(_LoRA, RowParallelLinear):
    """RowParallelLinear with a low-rank adapter: A `[r, in / tp]` is cut like the weight, B `[out, r]` on every rank.

    Args: as `RowParallelLinear`, and those of `ColumnParallelLoRA`.

    Raises:
        ValueError: as `RowParallelLinear`; an expert, a weight that is `[in, out]`.
    """

    def __init__(self, *sizes, lora_rank=8, lora_alpha=32, lora_dropout=0.0, **arguments):
        super().__init__(*sizes, **arguments)
        self._create_adapter(Adapter("lora", (), lora_rank, lora_alpha, lora_dropout))

    def _summed_product(self, input_, bias):
        return self._adapted_product(input_, bias, False) if self.is_active else super()._summed_product(input_, bias)


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
