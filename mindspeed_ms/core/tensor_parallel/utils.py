"""Division of sizes, tensors and the vocabulary over tensor-parallel ranks. Source: Megatron's `tensor_parallel/utils.py`."""

from mindspore import mint

from mindspeed_ms.core.device import dtype_name


def divide(numerator, denominator, what=None, by=None):
    """Quotient `numerator // denominator`; ValueError if there is a remainder.

    Args:
        numerator, denominator (int): the division.
        what, by (Optional[str]): names of the two numbers for the error text.

    Raises:
        ValueError: the division leaves a remainder.
    """
    if numerator % denominator:
        what = what or "the size"
        by = by or "the number of parts"
        raise ValueError(
            f"{what} ({numerator}) is not divisible by {by} ({denominator}): "
            f"choose a multiple of {denominator}, or a divisor of {numerator} for {by}."
        )
    return numerator // denominator


def check_integer(what, tensor):
    """Raise ValueError unless a tensor of ids holds integers: other numbers would be truncated silently."""
    kind = dtype_name(tensor.dtype)
    if not kind.startswith(("int", "uint")):
        raise ValueError(f"{what} are {kind}: expected integers, such as int32.")


def split_tensor_along_last_dim(tensor, num_partitions, contiguous_split_chunks=False):
    """Cut a tensor `[..., n]` into `num_partitions` views `[..., n / num_partitions]`.

    Args:
        tensor (Tensor): the tensor to cut.
        num_partitions (int): number of equal parts.
        contiguous_split_chunks (bool): give contiguous copies instead of views.

    Returns:
        tuple[Tensor]: the parts in order.

    Raises:
        ValueError: the last dimension is not divisible.
    """
    size = divide(tensor.shape[-1], num_partitions, "the last dimension of the tensor", "num_partitions")
    parts = tuple(mint.narrow(tensor, -1, index * size, size) for index in range(num_partitions))
    if contiguous_split_chunks:
        parts = tuple(part.contiguous() for part in parts)
    return parts


class VocabUtility:
    """Row ranges `[first, last)` of a vocabulary on tensor-parallel ranks: equal and consecutive."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(per_partition_vocab_size, rank, world_size=None):
        """Range `(first, last)` of rank `rank`, given the rows per rank."""
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size, rank, world_size):
        """Range `(first, last)` of rank `rank` of `world_size`. ValueError when the vocabulary does not divide."""
        size = divide(global_vocab_size, world_size, "the padded vocabulary size", "tensor_model_parallel_size")
        return VocabUtility.vocab_range_from_per_partition_vocab_size(size, rank, world_size)
