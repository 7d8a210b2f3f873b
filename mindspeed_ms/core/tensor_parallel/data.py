"""Broadcast of a batch over the tensor-parallel group. Source: Megatron core, `data.py`."""

from mindspeed_ms.core import parallel_state, storage
from mindspeed_ms.core.device import dtype_name, to_dtype


def broadcast_data(keys, data, datatype=None):
    """Broadcast the tensors of a dictionary from the first rank of the tensor-parallel group.

    Args:
        keys (list[str]): names of the tensors, the same on every rank.
        data (Optional[dict[str, Tensor]]): the tensors; needed on the first rank only.
        datatype: dtype that all must have; None allows any.

    Returns:
        dict[str, Tensor]

    Raises:
        ValueError: on the first rank, a missing key or another dtype.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    source = parallel_state.get_tensor_model_parallel_src_rank()
    is_source = group.rank == 0
    if is_source:
        _check(keys, data, datatype)
    if group.size == 1:
        return {key: data[key] for key in keys}
    shapes = {key: (tuple(data[key].shape), dtype_name(data[key].dtype)) for key in keys} if is_source else None
    shapes = group.broadcast_object(shapes, source)
    result = {}
    for key in keys:
        shape, name = shapes[key]
        tensor = data[key] if is_source else storage.zeros(shape, name)
        result[key] = group.broadcast(tensor, source)
    return result


def _check(keys, data, datatype):
    missing = [key for key in keys if data is None or key not in data]
    if missing:
        raise ValueError(f"broadcast_data needs {missing} on the first tensor-parallel rank, but the batch lacks them.")
    for key in keys if datatype is not None else ():
        if data[key].dtype != to_dtype(datatype):
            raise ValueError(f"broadcast_data: '{key}' is {data[key].dtype}, expected {datatype}.")
