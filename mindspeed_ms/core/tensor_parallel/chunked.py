"""Head with cross entropy, and feed-forward block, in chunks of tokens: no `[s, vocabulary]` or `[s, ffn]` is ever whole.

Each is one Function. It keeps its input alone; the backward computes a chunk again before it takes the chunk's gradients, and
adds up the gradients of the weights, so that the hooks of a parameter fire once.
"""

from mindspore import dtype, mint

from mindspeed_ms import ops
from mindspeed_ms.core import autograd
from mindspeed_ms.core.autograd import Function
from mindspeed_ms.core.tensor_parallel.cross_entropy import sum_over_group
from mindspeed_ms.core.tensor_parallel.linear import WeightGradient, cast


def _chunks(tensor, rows):
    """Parts of at most `rows` along the first axis."""
    length = tensor.shape[0]
    return [mint.narrow(tensor, 0, start, min(rows, length - start)).contiguous() for start in range(0, length, rows)]


def _rows(chunk_size, batch):
    """Sequence positions of a chunk of about `chunk_size` tokens."""
    return max(1, chunk_size // batch)


class _ChunkedCrossEntropy(Function):
    @staticmethod
    def forward(ctx, hidden, weight, target, label_smoothing, chunk_size, compute_dtype, is_fused, sequence_parallel, group):
        ctx.weight, ctx.group, ctx.is_fused, ctx.sequence_parallel = weight, group, is_fused, sequence_parallel
        ctx.label_smoothing, ctx.compute_dtype = label_smoothing, compute_dtype
        vocabulary = weight.shape[0]
        ctx.span, ctx.vocabulary = (group.rank * vocabulary, (group.rank + 1) * vocabulary), vocabulary * group.size
        whole = cast(hidden, compute_dtype)
        whole = group.all_gather(whole) if sequence_parallel else whole
        ctx.rows = _rows(chunk_size, whole.shape[1])
        losses, statistics = [], []
        head = cast(weight, compute_dtype)
        for part, labels in zip(_chunks(whole, ctx.rows), _chunks(target, ctx.rows)):
            logits = ops.cast(ops.linear_forward(part, head), dtype.float32)
            maximum = ops.cross_entropy_local_max(logits)
            maximum = group.all_reduce(maximum, op="max") if group.size > 1 else maximum
            sums = ops.cross_entropy_local_sums(logits, maximum, labels, *ctx.span, label_smoothing)
            sum_exp, target_logit, sum_logits = sum_over_group(sums, group)
            losses.append(ops.cross_entropy_loss(sum_exp, target_logit, sum_logits, label_smoothing, ctx.vocabulary))
            statistics += [maximum, sum_exp]
        ctx.save_for_backward(hidden, target, *statistics)
        return ops.cat(losses, dim=0)

    @staticmethod
    def backward(ctx, grad_output):
        hidden, target, *statistics = ctx.saved_tensors
        group, needs_hidden, needs_weight = ctx.group, *ctx.needs_input_grad[:2]
        whole = cast(hidden, ctx.compute_dtype)
        whole = group.all_gather(whole) if ctx.sequence_parallel else whole
        head, grads = cast(ctx.weight, ctx.compute_dtype), []
        tokens = (_chunks(tensor, ctx.rows) for tensor in (whole, target, grad_output))
        pieces = zip(*tokens, statistics[::2], statistics[1::2], strict=True)
        weight_gradient = WeightGradient(ctx.weight, ctx.is_fused) if needs_weight else None
        for part, labels, grad, maximum, sum_exp in pieces:
            logits = ops.cast(ops.linear_forward(part, head), dtype.float32)
            logits_grad = ops.cross_entropy_gradient(
                logits, maximum, sum_exp, labels, *ctx.span, grad, ctx.label_smoothing, ctx.vocabulary, in_place=True
            )
            logits_grad = ops.cast(logits_grad, ctx.compute_dtype)
            if needs_hidden:
                grads.append(ops.linear_input_grad(logits_grad, head, any_order=not needs_weight))
            if needs_weight:
                weight_gradient.add(logits_grad, part)
        hidden_grad = cast(_reduced(grads, group, ctx.sequence_parallel), hidden.dtype) if needs_hidden else None
        return hidden_grad, weight_gradient.result() if needs_weight else None, *[None] * 7


def _reduced(parts, group, sequence_parallel):
    """Gradient of a column-parallel layer's input: the sum over the ranks of the joined parts, or this rank's share of it."""
    whole = ops.cat(parts, dim=0)
    if group.size == 1:
        return whole
    return group.reduce_scatter(whole) if sequence_parallel else group.all_reduce(whole)


def chunked_cross_entropy(hidden, weight, target, chunk_size, group, settings, compute_dtype, label_smoothing=0.0):
    """Cross entropy of each token from hidden states, `chunk_size` tokens at a time.

    Args:
        hidden (Tensor): `[s, b, h]`, under sequence parallelism `[s / tp, b, h]`.
        weight (Parameter): of the head, `[v / tp, h]`.
        target (Tensor): ids `[s, b]`.
        chunk_size (int): tokens whose logits exist at a time.
        group (ProcessGroup): tensor-parallel group.
        settings (LayerSettings): of the layers: sequence parallelism, fused gradients.
        compute_dtype: of the product; the loss is float32.
        label_smoothing (float): see `vocab_parallel_cross_entropy`.

    Returns:
        Tensor: float32 `[s, b]`.
    """
    return _ChunkedCrossEntropy.apply(
        hidden,
        weight,
        target,
        label_smoothing,
        chunk_size,
        compute_dtype,
        settings.gradient_accumulation_fusion,
        settings.sequence_parallel and group.size > 1,
        group,
    )


class _ChunkedMLP(Function):
    @staticmethod
    def forward(
        ctx, hidden, mapping, bias, projection, activate, chunk_size, compute_dtype, is_fused, sequence_parallel, group
    ):
        ctx.weights, ctx.bias, ctx.activate, ctx.compute_dtype = (mapping, projection), bias, activate, compute_dtype
        ctx.is_fused, ctx.sequence_parallel, ctx.group = is_fused, sequence_parallel, group
        ctx.save_for_backward(hidden)
        whole = cast(hidden, compute_dtype)
        whole = group.all_gather(whole) if sequence_parallel else whole
        ctx.rows = _rows(chunk_size, whole.shape[1])
        inner, outer, shift = (cast(tensor, compute_dtype) for tensor in (mapping, projection, bias))
        outputs = [
            ops.linear_forward(activate(ops.linear_forward(part, inner), shift), outer) for part in _chunks(whole, ctx.rows)
        ]
        return _reduced(outputs, group, sequence_parallel)

    @staticmethod
    def backward(ctx, grad_output):
        (hidden,) = ctx.saved_tensors
        group, needs = ctx.group, ctx.needs_input_grad[:4]
        whole, grad_output = cast(hidden, ctx.compute_dtype), cast(grad_output, ctx.compute_dtype)
        if ctx.sequence_parallel:
            whole, grad_output = group.all_gather(whole), group.all_gather(grad_output)
        inner, outer, shift = (cast(tensor, ctx.compute_dtype) for tensor in (ctx.weights[0], ctx.weights[1], ctx.bias))
        mapping, projection = (WeightGradient(weight, ctx.is_fused) for weight in ctx.weights)
        grads, bias_grad = [], None
        for part, grad in zip(_chunks(whole, ctx.rows), _chunks(grad_output, ctx.rows), strict=True):
            leaf = autograd.set_requires_grad(autograd.detach(ops.linear_forward(part, inner)))
            with autograd.enable_grad():
                active = ctx.activate(leaf, shift)
            if needs[3]:
                projection.add(grad, autograd.detach(active))
            (middle,) = autograd.grad(active, leaf, ops.linear_input_grad(grad, outer))
            if needs[0]:
                grads.append(ops.linear_input_grad(middle, inner))
            if needs[1]:
                mapping.add(middle, part)
            if ctx.bias is not None and needs[2]:
                own = ops.bias_grad(middle)
                bias_grad = own if bias_grad is None else bias_grad + own
        hidden_grad = cast(_reduced(grads, group, ctx.sequence_parallel), hidden.dtype) if needs[0] else None
        weights = [gradient.result() if needed else None for gradient, needed in ((mapping, needs[1]), (projection, needs[3]))]
        bias_grad = None if bias_grad is None else cast(bias_grad, ctx.bias.dtype)
        return hidden_grad, weights[0], bias_grad, weights[1], *[None] * 6


def chunked_mlp(hidden, mapping, bias, projection, activate, chunk_size, group, settings, compute_dtype):
    """`projection(activate(mapping(hidden), bias))` without the projection's bias, `chunk_size` tokens at a time.

    Args:
        hidden (Tensor): `[s, b, h]`, under sequence parallelism `[s / tp, b, h]`.
        mapping (Parameter): `[f / tp, h]`; bias (Optional[Parameter]): `[f / tp]`; projection (Parameter): `[h, f' / tp]`.
        activate (Callable): `(x [c, b, f / tp], bias or None) -> [c, b, f' / tp]`, without parameters of its own, whose
            gradient in the bias is that in x, summed.
        chunk_size (int): tokens inside the block at a time.
        group, settings, compute_dtype: as in `chunked_cross_entropy`.

    Returns:
        Tensor like `hidden`.
    """
    return _ChunkedMLP.apply(
        hidden,
        mapping,
        bias,
        projection,
        activate,
        chunk_size,
        compute_dtype,
        settings.gradient_accumulation_fusion,
        settings.sequence_parallel and group.size > 1,
        group,
    )
