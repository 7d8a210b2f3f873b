"""Initial weights that do not depend on the layout, and recomputation that repeats its random numbers."""

from contextlib import nullcontext

import numpy as np


def initial_weights(size):
    """Two equal layers and a gated one, outside of any model."""
    from mindspeed_ms.config import ModelParallelConfig
    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, model_parallel_manual_seed

    parallel_state.initialize_model_parallel(size)
    config = ModelParallelConfig(tensor_model_parallel_size=size)
    runs = []
    for _ in range(2):
        model_parallel_manual_seed(11)
        layers = [ColumnParallelLinear(8, 12, config=config, init_method="normal", bias=False) for _ in range(2)]
        layers.append(ColumnParallelLinear(8, 16, config=config, init_method="normal", bias=False, stride=2))
        layers.append(RowParallelLinear(16, 8, config=config, init_method="normal", bias=True, input_is_parallel=True))
        runs.append([(layer.weight.sharding, layer.weight.asnumpy().copy()) for layer in layers])
    for first, second in zip(*runs):
        np.testing.assert_array_equal(first[1], second[1])
    return runs[0]


def test_initial_weights_do_not_depend_on_the_layout(world):
    from mindspeed_ms.layout.parameters import join

    whole = []
    for size in (1, 2, 4):
        results = world(size)(initial_weights, size)
        whole.append([join([result[index] for result in results]) for index in range(4)])
    for layers in whole[1:]:
        for first, other in zip(whole[0], layers):
            np.testing.assert_array_equal(first, other)
    assert not np.array_equal(whole[0][0], whole[0][1])


def recomputed(size, distribute):
    """A function with dropout, plain and recomputed: same output, same gradients, same random numbers afterwards."""
    from mindspore import Tensor

    from mindspeed_ms import ops
    from mindspeed_ms.core import autograd, parallel_state
    from mindspeed_ms.core.tensor_parallel import checkpoint, get_rng_tracker, model_parallel_manual_seed

    parallel_state.initialize_model_parallel(size)
    weight = autograd.set_requires_grad(Tensor.from_numpy(np.random.RandomState(1).randn(6, 6).astype(np.float32)))

    def function(x, scale):
        # what is distributed must be equal on all ranks, so must be what is dropped
        with nullcontext(get_rng_tracker().current) if distribute else get_rng_tracker().fork() as state:
            keep = state.keep_mask(x.shape, 0.5)
        return ops.silu(ops.dropout(ops.linear(x, weight), 0.5, keep)) * scale

    results = []
    for is_recomputed in (False, True):
        model_parallel_manual_seed(5)
        x = autograd.set_requires_grad(Tensor.from_numpy(np.random.RandomState(2).randn(4, 6).astype(np.float32)))
        autograd.set_grad(weight, None)
        run = (lambda a, b: checkpoint(function, distribute, a, b)) if is_recomputed else function
        output = run(run(x, 2.0), 1.0)
        after = get_rng_tracker().current.uniform((2,)).asnumpy().copy()
        autograd.backward(output)
        results.append(
            [
                output.asnumpy().copy(),
                autograd.tensor_grad(x).asnumpy().copy(),
                autograd.tensor_grad(weight).asnumpy().copy(),
                after,
            ]
        )
    for plain, again in zip(*results):
        np.testing.assert_array_equal(plain, again)
    return True


def test_recomputation_repeats_dropout(world):
    assert world(1)(recomputed, 1, False) == [True]
    assert world(2)(recomputed, 2, True) == [True, True]


def gradient_inside(frozen_input):
    """Gradient of a weight inside a recomputed function whose input needs a gradient, or does not."""
    from mindspore import Tensor

    from mindspeed_ms import ops
    from mindspeed_ms.core import autograd, parallel_state
    from mindspeed_ms.core.tensor_parallel import checkpoint

    parallel_state.initialize_model_parallel(1)
    weight = autograd.set_requires_grad(Tensor.from_numpy(np.ones((3, 3), np.float32)))
    x = autograd.set_requires_grad(Tensor.from_numpy(np.ones((2, 3), np.float32)), not frozen_input)
    autograd.backward(checkpoint(lambda a: ops.linear(a, weight), False, x))
    return autograd.tensor_grad(weight).asnumpy().copy()


def test_parameters_inside_recomputation_get_gradients_for_a_frozen_input(world):
    np.testing.assert_array_equal(world(1)(gradient_inside, True)[0], world(1)(gradient_inside, False)[0])


def batches():
    """Only the first tensor-parallel rank has the batch."""
    import pytest
    from mindspore import Tensor

    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.core.tensor_parallel import broadcast_data

    parallel_state.initialize_model_parallel(2)
    is_first = parallel_state.get_tensor_model_parallel_rank() == 0
    data = {"tokens": Tensor(np.arange(6).reshape(2, 3).astype(np.int32)), "mask": Tensor(np.ones(2, np.float32))}
    if is_first:
        with pytest.raises(ValueError, match="labels"):
            broadcast_data(["labels"], data)
    return broadcast_data(["tokens", "mask"], data if is_first else None)


def test_broadcast_data(world):
    for result in world(2)(batches):
        np.testing.assert_array_equal(result["tokens"], np.arange(6).reshape(2, 3))
        np.testing.assert_array_equal(result["mask"], [1, 1])
