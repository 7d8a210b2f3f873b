"""Sums over the tokens of whole sequences, of what a rank holds of them."""

from mindspore import mint

from mindspeed_ms import ops
from mindspeed_ms.core.autograd import Function
from mindspeed_ms.core.tensor_parallel.mappings import reduce_from_context_parallel_region


def sum_of_sequences(values, mask):
    """Masked sums `[n]` of `values [n, s]` (this rank's part of the sequences), over the whole sequences.

    Equal on all ranks that share them; the gradient is that of this rank's part, as the backward scale expects."""
    return reduce_from_context_parallel_region(ops.row_sums(values * mask))


def tokens_of_sequences(mask):
    """Number of tokens of each whole sequence: float32 `[n]`."""
    return reduce_from_context_parallel_region(ops.row_sums(mask))


def log_probabilities(losses, mask):
    """Summed log-probabilities of the answers `[n]`, and their numbers of tokens `[n]`.

    Args:
        losses (Tensor): cross entropy of each token, float32 `[n, s]`.
        mask (Tensor): 1.0 at the tokens of the answer `[n, s]`.
    """
    return -sum_of_sequences(losses, mask), tokens_of_sequences(mask)


def per_token(sums, tokens):
    """Means over tokens; 0 for a sequence without any."""
    return sums / (tokens + ops.is_zero(tokens))


class _Half(Function):
    """Half of a Tensor `[2n]`. The gradient of a view by MindSpore would keep memory on CPU in each step."""

    @staticmethod
    def forward(ctx, values, number):
        ctx.number, half = number, values.shape[0] // 2
        return ops.cat([mint.narrow(values, 0, number * half, half)])

    @staticmethod
    def backward(ctx, output_grad):
        zeros = ops.scaled(output_grad, 0.0)
        return ops.cat([zeros, output_grad] if ctx.number else [output_grad, zeros]), None


def halves(values):
    """The first and the second half of a Tensor `[2n]`: chosen, rejected."""
    return _Half.apply(values, 0), _Half.apply(values, 1)
