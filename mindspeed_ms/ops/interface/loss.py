"""Vocabulary-parallel cross entropy: local pieces; the caller reduces between ranks. Not differentiable."""

from mindspeed_ms.ops.forms import operator


@operator
def cross_entropy_local_max(logits):
    """Maximum over the local vocabulary: [..., v] -> float32 [...]."""


@operator
def cross_entropy_local_sums(logits, maximum, target, vocab_start, vocab_end, label_smoothing=0.0):
    """Sums over the local vocabulary, all relative to the global maximum, in one pass over `logits`.

    Args:
        logits (Tensor): [..., v] with v = vocab_end - vocab_start.
        maximum (Tensor): float32 [...], maximum over all ranks.
        target (Tensor): integers [...], ids of the whole vocabulary.
        label_smoothing: 0 lets the third sum be skipped.

    Returns:
        float32 Tensors [...]: sum of exp(logits - maximum); logits[target] - maximum, 0 where the target is another
        rank's; sum of (logits - maximum), None if `label_smoothing` is 0. Sums are accumulated in double precision.
    """


@operator
def cross_entropy_loss(sum_exp, target_logit, logit_sum=None, label_smoothing=0.0, vocab_size=None):
    """Loss of each token from the sums over all ranks; the logarithm is taken in double precision on CPU.

    log(sum_exp) - target_logit, and with label smoothing, a = label_smoothing * vocab_size / (vocab_size - 1):
    (1 - a) * that - a * (logit_sum / vocab_size - log(sum_exp)).

    Args:
        sum_exp, target_logit, logit_sum (Tensor): float32 [...], see `cross_entropy_local_sums`.

    Returns:
        float32 Tensor [...].
    """


@operator
def cross_entropy_gradient(
    logits, maximum, sum_exp, target, vocab_start, vocab_end, grad_output, label_smoothing=0.0, vocab_size=None, in_place=False
):
    """Gradient of the loss with respect to the local logits.

    (softmax - (1 - a) * onehot(target) - a / vocab_size) * grad_output, with softmax = exp(logits - maximum) / sum_exp
    and a = label_smoothing * vocab_size / (vocab_size - 1) for the part spread over all ids (Megatron's form).

    Args:
        sum_exp (Tensor): float32 [...], summed over all ranks.
        grad_output (Tensor): float32 [...].
        vocab_size: whole vocabulary, needed with label smoothing.
        in_place: overwrite `logits` (CPU) and return it; only if they are not read afterwards.

    Returns:
        Tensor [..., v] in the dtype of `logits`.
    """
