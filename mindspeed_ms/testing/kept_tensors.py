"""Bytes of the tensors that a backward keeps, counted from what operators save."""

from mindspeed_ms.core import autograd


def bytes_kept(model, batch):
    """Bytes of the tensors that the backward of one forward keeps, each counted once, without parameters.

    Args:
        model (Cell): returns its loss.
        batch (dict): arguments of its construct.
    """
    found = {}

    def pack(tensor):
        found[tensor.data_ptr()] = max(found.get(tensor.data_ptr(), 0), tensor.size * tensor.itemsize)
        return tensor

    with autograd.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch)
    for parameter in model.get_parameters():
        found.pop(parameter.data_ptr(), None)
    autograd.backward(loss)
    for parameter in model.trainable_params():
        autograd.set_grad(parameter, None)
    return sum(found.values())
