"""Random states of tensor parallelism, and recomputation (`checkpoint`) that replays them. Source: Megatron core, `random.py`.

The states themselves live in `mindspeed_ms.core.rng`.
"""

from mindspore import Tensor

from mindspeed_ms.core import parallel_state, rng
from mindspeed_ms.core.autograd import (
    Function,
    backward,
    detach,
    enable_grad,
    is_grad_enabled,
    requires_grad,
    set_requires_grad,
    tensor_grad,
)
from mindspeed_ms.core.rng import get_rng_tracker
from mindspeed_ms.core.tensor_parallel.utils import divide

get_cuda_rng_tracker = get_rng_tracker


def get_data_parallel_rng_tracker_name():
    """Name of the state that is equal on the ranks of a model-parallel group."""
    return rng.DATA_PARALLEL_RNG


def get_expert_parallel_rng_tracker_name():
    """Name of the state of the experts."""
    return rng.EXPERT_PARALLEL_RNG


def model_parallel_manual_seed(seed, data_parallel_random_init=False):
    """Seed every random state of this rank from its place in the parallel grid; also the seed of initial weights.

    Raises:
        RuntimeError: model parallelism is not initialised.
    """
    place = parallel_state.get_coordinates()
    rng.model_parallel_manual_seed(
        seed,
        tensor_rank=place.tp,
        pipeline_rank=place.pp,
        data_rank=place.dp,
        expert_rank=place.ep,
        expert_tensor_rank=place.expert_tp,
        data_parallel_random_init=data_parallel_random_init,
        context_rank=place.cp,
    )


model_parallel_cuda_manual_seed = model_parallel_manual_seed


class CheckpointFunction(Function):
    """Recomputation Function: keeps no intermediate results; the backward runs it again with the same random numbers."""

    @staticmethod
    def forward(ctx, function, distribute_saved_activations, *args):
        """Run `function(*args)`; keep only the tensor arguments and the random states."""
        ctx.function = function
        ctx.states = get_rng_tracker().get_states()
        ctx.is_tensor = [isinstance(arg, Tensor) for arg in args]
        ctx.others = [None if isinstance(arg, Tensor) else arg for arg in args]
        ctx.needs_grad = [isinstance(arg, Tensor) and requires_grad(arg) for arg in args]
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        ctx.whole_shape = None
        if distribute_saved_activations and tensors:
            ctx.whole_shape = tensors[0].shape
            tensors[0] = split_tensor_into_1d_equal_chunks(tensors[0])
        ctx.save_for_backward(*tensors)
        return function(*args)

    @staticmethod
    def backward(ctx, *grads):
        """Run `function` again, recorded, and then its backward."""
        saved = list(ctx.saved_tensors)
        if ctx.whole_shape is not None:
            saved[0] = gather_split_1d_tensor(saved[0]).reshape(ctx.whole_shape)
        saved = iter(saved)
        args = [
            set_requires_grad(detach(next(saved)), needs_grad) if is_tensor else other
            for is_tensor, needs_grad, other in zip(ctx.is_tensor, ctx.needs_grad, ctx.others)
        ]
        tracker = get_rng_tracker()
        states_now = tracker.get_states()
        tracker.set_states(ctx.states)
        with enable_grad():
            outputs = ctx.function(*args)
        tracker.set_states(states_now)
        outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        pairs = [(out, grad) for out, grad in zip(outputs, grads) if isinstance(out, Tensor) and requires_grad(out)]
        backward([out for out, _ in pairs], [grad for _, grad in pairs])
        input_grads = [tensor_grad(arg) if needs_grad else None for arg, needs_grad in zip(args, ctx.needs_grad)]
        return (None, None, *input_grads)


def checkpoint(function, distribute_saved_activations, *args):
    """Recomputation: `function(*args)` whose intermediate results the backward computes again; a plain call under `no_grad`.

    Args:
        function (Callable): takes and returns Tensors; must draw random numbers from `core.rng` only.
        distribute_saved_activations (bool): keep only this rank's part of the first tensor argument, cut over the
            tensor-parallel group, and gather it in the backward.
        args: positional arguments of `function`.
    """
    if not is_grad_enabled():
        return function(*args)
    if not any(isinstance(arg, Tensor) and requires_grad(arg) for arg in args):
        args = _with_one_leaf(args)
    return CheckpointFunction.apply(function, distribute_saved_activations, *args)


def _with_one_leaf(args):
    """`args` with their first floating Tensor as a leaf: without one the parameters inside would get no gradient."""
    for place, arg in enumerate(args):
        if isinstance(arg, Tensor) and arg.is_floating_point():
            return (*args[:place], set_requires_grad(detach(arg)), *args[place + 1 :])
    raise ValueError("checkpoint needs a floating-point Tensor among the arguments: the backward starts from its gradient.")


def split_tensor_into_1d_equal_chunks(tensor, group=None):
    """This rank's part of the flattened tensor, cut over the tensor-parallel group; ValueError if it has none."""
    group = parallel_state.get_tensor_model_parallel_group() if group is None else group
    flat = tensor.reshape(-1)
    size = divide(flat.shape[0], group.size, "the number of elements", "tensor_model_parallel_size")
    return flat[group.rank * size : (group.rank + 1) * size].contiguous()


def gather_split_1d_tensor(tensor, group=None):
    """The whole flattened tensor from each rank's part: inverse of `split_tensor_into_1d_equal_chunks`."""
    group = parallel_state.get_tensor_model_parallel_group() if group is None else group
    return group.all_gather(tensor)
