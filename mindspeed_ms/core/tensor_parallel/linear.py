"""Matrix product of tensor-parallel linear layers with its communication. Source: Megatron core, `layers.py`."""

import functools

from mindspore import mint

from mindspeed_ms import ops
from mindspeed_ms.core import parallel_state, storage
from mindspeed_ms.core.autograd import Function
from mindspeed_ms.core.device import to_dtype


def cast(tensor, dtype):
    """Cast `tensor` to `dtype`; unchanged if it has that dtype or is None."""
    # a comparison of two dtypes takes longer than asking whether they are one object, as they are
    if tensor is None or tensor.dtype is dtype or tensor.dtype == dtype:
        return tensor
    return ops.cast(tensor, dtype)


class LinearWithGradAccumulationAndAsyncCommunication(Function):
    """Autograd Function `x @ weight^T + bias`; its backward overlaps communication with the weight gradient.

    Under sequence parallelism the input `[s / tp, b, h]` is gathered for the product and gathered again in the backward
    instead of being kept. Order of the backward: all-gather issued, input gradient, wait, reduce-scatter issued, weight
    gradient, wait. Without it: input gradient, all-reduce issued, weight gradient, wait.
    """

    @staticmethod
    def forward(ctx, input_, weight, bias, compute_dtype, fuse_accumulation, allreduce_dgrad, sequence_parallel, group):
        """`[..., in]` to `[..., out]` in `compute_dtype`; parameters of another dtype are cast for the product."""
        # of a frozen weight the input is not needed
        ctx.save_for_backward(*([input_] if ctx.needs_input_grad[1] else []))
        ctx.input_dtype = input_.dtype
        # The parameter itself, not a snapshot: sharded parameters change their memory between forward and backward.
        ctx.weight = weight
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.compute_dtype = compute_dtype
        ctx.fuse_accumulation = fuse_accumulation
        ctx.allreduce_dgrad = allreduce_dgrad
        ctx.sequence_parallel = sequence_parallel
        ctx.group = group
        total_input = cast(input_, compute_dtype)
        if sequence_parallel:
            total_input = group.all_gather(total_input)
        return ops.linear_forward(total_input, cast(weight, compute_dtype), cast(bias, compute_dtype))

    @staticmethod
    def backward(ctx, grad_output):
        """Gradients of input, weight and bias."""
        weight, group = ctx.weight, ctx.group
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        total_input, gathering, grad_input, reducing = None, None, None, None
        if needs_weight:
            total_input = cast(ctx.saved_tensors[0], ctx.compute_dtype)
            if ctx.sequence_parallel:
                gathering = group.all_gather(total_input, async_op=True)
        if needs_input:
            grad_input = ops.linear_input_grad(grad_output, cast(weight, ctx.compute_dtype), any_order=not needs_weight)
        if gathering is not None:
            total_input = gathering.wait()
        if needs_input and ctx.sequence_parallel:
            reducing = group.reduce_scatter(grad_input, async_op=True)
        elif needs_input and ctx.allreduce_dgrad:
            reducing = group.all_reduce(grad_input, async_op=True)
        grad_weight = _weight_gradient(ctx, grad_output, total_input) if needs_weight else None
        grad_bias = cast(ops.bias_grad(grad_output), ctx.bias_dtype) if needs_bias else None
        if reducing is not None:
            grad_input = reducing.wait()
        return cast(grad_input, ctx.input_dtype), grad_weight, grad_bias, None, None, None, None, None


def _weight_gradient(ctx, grad_output, total_input):
    """Gradient of the weight; if fused it is added to `weight.main_grad` and a placeholder returned."""
    weight = ctx.weight
    main_grad = getattr(weight, "main_grad", None) if ctx.fuse_accumulation else None
    if main_grad is None:
        return cast(ops.linear_weight_grad(grad_output, total_input), weight.dtype)
    ops.linear_weight_grad(grad_output, total_input, accumulate_into=main_grad)
    return _mark_added(weight)


class WeightGradient:
    """Gradient of a weight from several parts of the tokens, which is given to the tape once."""

    def __init__(self, weight, is_fused):
        self._weight = weight
        self._main_grad = getattr(weight, "main_grad", None) if is_fused else None
        self._sum = None

    def add(self, grad_output, input_):
        """Add the gradient of some tokens: of the output `[..., out]` and their input `[..., in]`."""
        if self._main_grad is not None:
            ops.linear_weight_grad(grad_output, input_, accumulate_into=self._main_grad)
        else:
            own = ops.linear_weight_grad(grad_output, input_)
            self._sum = own if self._sum is None else self._sum + own

    def result(self):
        """The gradient, or where it was added to `main_grad` a placeholder."""
        if self._main_grad is None:
            return cast(self._sum, self._weight.dtype)
        return _mark_added(self._weight)


def _mark_added(weight):
    """Note that the gradient is in `main_grad`; returns a placeholder for the hooks of the leaf."""
    if not getattr(weight, "zero_out_wgrad", False):  # tied weights: the hook adds the embedding's own gradient
        weight.grad_added_to_main_grad = True
    return placeholder_gradient(weight)


def placeholder_gradient(weight):
    """Zero gradient of a weight whose gradient lies in its buffer already; it takes no memory, and the leaf's hooks fire."""
    return mint.broadcast_to(_zero(weight.dtype, len(weight.shape)), weight.shape)


@functools.cache
def _zero(dtype, dimensions):
    return storage.zeros((1,) * dimensions, dtype)


def linear_with_grad_accumulation_and_async_allreduce(
    input,
    weight,
    bias,
    gradient_accumulation_fusion,
    allreduce_dgrad,
    sequence_parallel,
    grad_output_buffer=None,
    wgrad_deferral_limit=None,
    compute_dtype=None,
    group=None,
):
    """Linear product `input @ weight^T + bias` with the communication of a column-parallel layer.

    Args:
        input (Tensor): `[..., in]`; under `sequence_parallel` this rank's part `[s / tp, b, in]`.
        weight (Tensor): `[out, in]`, this rank's part.
        bias (Optional[Tensor]): `[out]`.
        gradient_accumulation_fusion (bool): add the weight gradient to `weight.main_grad`, where the parameter has one,
            inside the matrix product, and set `weight.grad_added_to_main_grad`.
        allreduce_dgrad (bool): sum the input gradient over the group, overlapped with the weight gradient.
        sequence_parallel (bool): gather the input, reduce-scatter its gradient.
        grad_output_buffer, wgrad_deferral_limit: Megatron's deferred weight gradients; must be None.
        compute_dtype: dtype of the product; default that of `weight`.
        group (Optional[ProcessGroup]): default the tensor-parallel group.

    Raises:
        ValueError: `allreduce_dgrad` together with `sequence_parallel`, or deferred weight gradients.
    """
    if grad_output_buffer is not None or wgrad_deferral_limit is not None:
        raise ValueError(
            "grad_output_buffer and wgrad_deferral_limit defer weight gradients to the pipeline flush, but here the "
            "weight gradient is always taken in the backward itself: leave them None."
        )
    if allreduce_dgrad and sequence_parallel:
        raise ValueError("allreduce_dgrad and sequence_parallel exclude each other: sequence_parallel already reduces.")
    group = parallel_state.get_tensor_model_parallel_group() if group is None else group
    compute_dtype = weight.dtype if compute_dtype is None else to_dtype(compute_dtype)
    is_parallel = group.size > 1
    return LinearWithGradAccumulationAndAsyncCommunication.apply(
        input,
        weight,
        bias,
        compute_dtype,
        gradient_accumulation_fusion,
        allreduce_dgrad and is_parallel,
        sequence_parallel and is_parallel,
        group,
    )


def linear_with_frozen_weight(input, weight, bias, *, sequence_parallel=False, compute_dtype=None, group=None):
    """Linear product with a frozen weight: the backward gives the input's gradient only. Source: Megatron."""
    return linear_with_grad_accumulation_and_async_allreduce(
        input, weight, bias, False, not sequence_parallel, sequence_parallel, compute_dtype=compute_dtype, group=group
    )
