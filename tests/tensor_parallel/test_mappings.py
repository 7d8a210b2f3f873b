"""Each mapping forward and backward against numpy, on 2 and 4 ranks."""

import numpy as np
import pytest

SHAPE = (8, 3, 8)
GATHERED = (
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "all_gather_last_dim_from_tensor_parallel_region",
)
SCATTERED = (
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
)


def _run(function, array, weight):
    """Output of `function` and the input's gradient when the output is weighted by `weight(rank)`."""
    from mindspore import Tensor

    from mindspeed_ms.core import autograd

    tensor = autograd.set_requires_grad(Tensor.from_numpy(array.copy()))
    output = function(tensor)
    autograd.backward(output, Tensor.from_numpy(np.ascontiguousarray(weight.astype(np.float32))))
    return output.asnumpy().copy(), autograd.tensor_grad(tensor).asnumpy().copy()


def _values(seed, shape):
    return np.random.RandomState(seed).randint(-4, 5, shape).astype(np.float32)


def run_all(size):
    """Every mapping on this rank; assertions inside."""
    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.core.tensor_parallel import mapping_cells, mappings

    parallel_state.initialize_model_parallel(size)
    rank = parallel_state.get_tensor_model_parallel_rank()
    inputs = [_values(index, SHAPE) for index in range(size)]
    grads = [_values(100 + index, SHAPE) for index in range(size)]
    own = inputs[rank]
    output, grad = _run(mappings.copy_to_tensor_model_parallel_region, own, grads[rank])
    np.testing.assert_array_equal(output, own)
    np.testing.assert_array_equal(grad, sum(grads))
    output, grad = _run(mappings.reduce_from_tensor_model_parallel_region, own, grads[rank])
    np.testing.assert_array_equal(output, sum(inputs))
    np.testing.assert_array_equal(grad, grads[rank])
    for name in SCATTERED:
        _check_scatter(getattr(mappings, name), name, inputs, rank, size)
    for name in GATHERED:
        _check_gather(getattr(mappings, name), name, inputs, rank, size)
    _check_cells(mapping_cells, inputs, rank, size)
    return rank


def _axis(name):
    return 0 if "sequence" in name else 2


def _check_scatter(function, name, inputs, rank, size):
    axis = _axis(name)
    source = sum(inputs) if name.startswith("reduce_scatter") else inputs[rank]
    expected = np.split(source, size, axis)[rank]
    parts = [_values(50 + index, expected.shape) for index in range(size)]
    output, grad = _run(function, inputs[rank], parts[rank])
    np.testing.assert_array_equal(output, expected)
    np.testing.assert_array_equal(grad, np.concatenate(parts, axis))


def _check_gather(function, name, inputs, rank, size):
    axis = _axis(name)
    whole = np.concatenate(inputs, axis)
    grads = [_values(70 + index, whole.shape) for index in range(size)]
    output, grad = _run(function, inputs[rank], grads[rank])
    np.testing.assert_array_equal(output, whole)
    source = grads[rank] if name == "gather_from_tensor_model_parallel_region" else sum(grads)
    np.testing.assert_array_equal(grad, np.split(source, size, axis)[rank])


def _check_cells(cells, inputs, rank, size):
    """Upstream's Cells: swapped axes, no reduction of a gradient that is the same everywhere, and the exchanges."""
    own = inputs[rank]
    cell = cells.GatherFromSequenceParallelRegion(need_to_swapaxes=True, tensor_parallel_output_grad=False)
    weight = _values(5, (8, 3 * size, 8))
    output, grad = _run(cell, own, weight)
    np.testing.assert_array_equal(output, np.concatenate(inputs, 1))
    np.testing.assert_array_equal(grad, np.split(weight, size, 1)[rank])
    output, grad = _run(cells.AllToAllSP2HP(), own, _values(rank, (24 * size, 8 // size)))
    np.testing.assert_array_equal(output, np.split(np.concatenate([x.reshape(24, 8) for x in inputs]), size, 1)[rank])
    back, _ = _run(cells.AllToAllHP2SP(), output, own.reshape(24, 8))
    np.testing.assert_array_equal(back, own.reshape(24, 8))


def uneven():
    """Rows that differ between ranks; errors."""
    from mindspore import Tensor

    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.core.tensor_parallel import mappings

    parallel_state.initialize_model_parallel(2)
    group, rank = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_tensor_model_parallel_rank()
    sizes = [3, 1]
    parts = [_values(1, (3, 2)), _values(2, (1, 2))]
    grads = [_values(3, (4, 2)), _values(4, (4, 2))]
    gather = lambda x: mappings.gather_from_sequence_parallel_region(x, output_split_sizes=sizes)  # noqa: E731
    output, grad = _run(gather, parts[rank], grads[rank])
    np.testing.assert_array_equal(output, np.concatenate(parts))
    np.testing.assert_array_equal(grad, np.split(sum(grads), [3])[rank])
    scatter = lambda x: mappings.reduce_scatter_to_sequence_parallel_region(x, input_split_sizes=sizes)  # noqa: E731
    output, grad = _run(scatter, grads[rank], parts[rank])
    np.testing.assert_array_equal(output, np.split(sum(grads), [3])[rank])
    np.testing.assert_array_equal(grad, np.concatenate(parts))
    received, sent = [[2, 0], [1, 1]][rank], [[2, 1], [0, 1]][rank]
    grads = [_values(5, (2, 2)), _values(6, (2, 2))]
    output, grad = _run(lambda x: mappings.all_to_all(group, x, received, sent), parts[rank], grads[rank])
    np.testing.assert_array_equal(output, [parts[0][:2], np.concatenate([parts[0][2:], parts[1]])][rank])
    np.testing.assert_array_equal(grad, [np.concatenate([grads[0], grads[1][:1]]), grads[1][1:]][rank])
    with pytest.raises(ValueError, match="not divisible"):
        mappings.scatter_to_sequence_parallel_region(Tensor.from_numpy(_values(1, (3, 2))))
    return True


@pytest.mark.parametrize("size", [1, 2, 4])
def test_mappings(world, size):
    assert world(size)(run_all, size) == list(range(size))


def test_uneven_mappings(world):
    assert world(2)(uneven) == [True, True]
