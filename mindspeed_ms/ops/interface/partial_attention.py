"""Attention to a part of the keys, with softmax statistics: parts are merged to the attention over all keys."""

from mindspeed_ms.ops.forms import operator


@operator
def attention_with_statistics(query, key, value, first_keys, stop_keys, mask=None, scale=None, before=None):
    """Attention to some keys and the statistics of its softmax; not recorded, see `attention_with_statistics_gradient`.

    Which keys are visible is said by two numbers for each query, so causal, sliding-window and document masks need no [sq, sk]
    tensor; blocks that nobody sees are not computed. The result for several parts of the keys, one after another with the last
    result as `before`, is that for all of them.

    Args:
        query (Tensor): [sq, b, n, d]; key (Tensor): [sk, b, groups, d]; value (Tensor): [sk, b, groups, dv]; n a multiple of
            groups; query head h uses group h // (n / groups).
        first_keys, stop_keys (ndarray): int32 [b or 1, sq], places of the first visible key in `key` and after the last;
            equal: the query sees none of them.
        mask (Tensor): bool or uint8 [b, 1, sq, sk], [1, 1, sq, sk] or [sq, sk], True = blocked in addition; or None.
        scale: None means 1 / sqrt(d).
        before (tuple): result for other keys, which is merged in and must not be used afterwards.

    Returns:
        (output, maximum, total): float32 [sq, b, n, dv], and float32 [b, n, sq] twice: the largest visible score, and the sum
        of exponentials of the scores less the largest. A query that sees nothing has output 0 and total 0.

    Raises:
        ValueError: shapes that do not fit.
    """


@operator
def attention_with_statistics_gradient(
    output_grad, query, key, value, output, maximum, total, first_keys, stop_keys, mask=None, scale=None, before=None
):
    """Gradients of `attention_with_statistics` from the output and the statistics over all keys.

    Args:
        output_grad (Tensor): [sq, b, n, dv], of `output`; the statistics are not differentiated.
        query, key, value, first_keys, stop_keys, mask, scale: of one part of the keys.
        output, maximum, total (Tensor): result for all parts.
        before (tuple): (query_grad, key_grad, value_grad), float32, to which the gradients are added; must not be used
            afterwards.

    Returns:
        (query_grad, key_grad, value_grad): float32, in the shapes of query, key and value.
    """
