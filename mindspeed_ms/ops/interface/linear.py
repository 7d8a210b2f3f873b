"""Linear layers and matrix products."""

from mindspeed_ms.ops.forms import operator


@operator
def linear(x, weight, bias=None):
    """Linear layer `x @ weight^T + bias`, differentiable.

    Args:
        x (Tensor): [..., input_size]; float32, float16 or bfloat16.
        weight (Tensor): [output_size, input_size], dtype of `x`.
        bias (Tensor): [output_size], dtype of `x`, or None.

    Returns:
        Tensor [..., output_size] in the dtype of `x`; half precisions are summed in float32 and rounded once.
    """


@operator
def linear_forward(x, weight, bias=None):
    """`linear` without a gradient: for layers that write their own backward around communication."""


@operator
def linear_input_grad(output_grad, weight, any_order=False):
    """Gradient of a linear's input: [..., output_size] x [output_size, input_size] -> [..., input_size]. Not
    differentiable.

    Args:
        any_order: sum in any order, by the quickest kernel; otherwise by the one of trainings whose numbers were recorded.
    """


@operator
def linear_weight_grad(output_grad, x, accumulate_into=None, overwrite=False):
    """Gradient of a linear's weight: [..., output_size], [..., input_size] -> [output_size, input_size].

    Args:
        output_grad (Tensor), x (Tensor): same leading dimensions and dtype.
        accumulate_into (Tensor): storage tensor [output_size, input_size] (float32, or the dtype of `x`) to which the
            gradient is added in place in the same product; it is returned. None: a new tensor in the dtype of `x`.
        overwrite: write the gradient there instead of adding it, for the first micro-batch of a step.
    """


@operator
def add_linear(output, x, weight):
    """`output + x @ weight^T`, in the memory of `output` where its dtype allows it. Not differentiable.

    Args:
        output (Tensor): [..., output_size]; not to be used afterwards.
        x (Tensor): [..., input_size], weight (Tensor): [output_size, input_size], of the dtype of `output`.
    """


@operator
def add_linear_input_grad(input_grad, output_grad, weight):
    """`input_grad + output_grad @ weight`, in the memory of `input_grad` where its dtype allows it. Not differentiable.

    Args:
        input_grad (Tensor): [..., input_size]; not to be used afterwards.
        output_grad (Tensor): [..., output_size], weight (Tensor): [output_size, input_size], of the dtype of `input_grad`.
    """


@operator
def narrow_weight_grad(narrow, wide, transposed=False):
    """Product `narrow^T @ wide` over all leading dimensions, for few columns: [..., r], [..., n] -> [r, n], or [n, r] if
    `transposed`. Not differentiable.

    It is the gradient of a low-rank adapter's A, of the gradient of its output and its input; transposed that of B, of its
    input and the gradient of its output.
    """


@operator
def bias_grad(output_grad):
    """Sum over all leading dimensions, accumulated in double precision: [..., n] -> [n] in the dtype of
    `output_grad`.
    """


@operator
def matmul(a, b, transpose_a=False, transpose_b=False):
    """Matrix product `op(a) @ op(b)`, differentiable; op transposes the last two dimensions if asked, without a copy.

    Args:
        a (Tensor), b (Tensor): [..., m, k] and [..., k, n] after the transposes, both two-dimensional or with equal
            leading dimensions.
    """


def batch_matmul(a, b, transpose_a=False, transpose_b=False):
    """`matmul` of batches: [..., m, k] @ [..., k, n] with equal leading dimensions (at least one)."""
    return matmul(a, b, transpose_a, transpose_b)
