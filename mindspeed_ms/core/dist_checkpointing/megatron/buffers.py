"""Flat buffers of Megatron's distributed optimizer: the place of each parameter in `distrib_optim.pt`.

Source: Megatron core 0.12, `param_and_grad_buffer.py` and `distrib_optimizer.py`. Parameters come in reversed module order;
each starts at a multiple of 64 in its bucket. A bucket ends when it has `bucket_size` elements, and before and after a tied
embedding (with a pipeline). The file joins the buckets without the padding at their ends.
"""

_START = 64
_LEAST_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000


def bucket_size_of(arguments, stage, chunk):
    """Elements of a bucket, or None for one bucket: buckets overlap with the backward of the first stage and chunk only."""
    if not arguments.get("overlap_grad_reduce") or stage or chunk or arguments.get("overlap_param_gather_with_optimizer_step"):
        return None
    ranks = arguments.get("data_parallel_size") or 1
    return arguments.get("ddp_bucket_size") or max(_LEAST_BUCKET, _BUCKET_PER_RANK * ranks)


def places(sizes, shared=(), bucket_size=None):
    """Start of each parameter in the joined buckets, and their length.

    Args:
        sizes (list[int]): elements of the parameters, in module order.
        shared (collection[int]): positions of tied embeddings.
        bucket_size (Optional[int]): of `bucket_size_of`.

    Returns:
        (list[int], int): starts in module order, length.
    """
    starts, bucket, position = [0] * len(sizes), 0, 0
    for index in reversed(range(len(sizes))):
        position = -(-position // _START) * _START
        if index in shared:
            bucket, position = bucket + position, 0
        starts[index] = bucket + position
        position += sizes[index]
        if index in shared or (bucket_size is not None and position >= bucket_size):
            bucket, position = bucket + position, 0
    return starts, bucket + position


def places_in_buckets(sizes, lengths):
    """(bucket, start) of each parameter where the file has a tensor per bucket (before core 0.8), in module order.

    Args:
        sizes (list[int]): elements of the parameters, in module order.
        lengths (list[int]): elements of the buckets.

    Returns:
        list[(int, int)] | None: None if they do not fit.
    """
    result, bucket, position = [None] * len(sizes), 0, 0
    for index in reversed(range(len(sizes))):
        position = -(-position // _START) * _START
        if bucket < len(lengths) and position + sizes[index] > lengths[bucket] and position:
            bucket, position = bucket + 1, 0
        if bucket == len(lengths) or position + sizes[index] > lengths[bucket]:
            return None
        result[index] = bucket, position
        position += sizes[index]
    return result
