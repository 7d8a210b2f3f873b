"""Linear layers and the embedding: every layout equals one rank and numpy; argument handling; order of the backward."""

import numpy as np
import pytest

SEQUENCE, BATCH, INPUT, OUTPUT = 8, 2, 12, 16


def _config(**parallel):
    from mindspeed_ms.config import ModelParallelConfig

    return ModelParallelConfig(**parallel)


def _start(size, sequence_parallel=False, **parallel):
    from mindspeed_ms.core import parallel_state
    from mindspeed_ms.core.tensor_parallel import model_parallel_manual_seed

    parallel_state.initialize_model_parallel(size)
    model_parallel_manual_seed(7)
    return _config(tensor_model_parallel_size=size, sequence_parallel=sequence_parallel, **parallel)


def _arrays():
    random = np.random.RandomState(3)
    return {
        "x": random.randn(SEQUENCE, BATCH, INPUT).astype(np.float32),
        "grad": random.randn(SEQUENCE, BATCH, OUTPUT).astype(np.float32),
    }


def _tensor(array, requires_grad=False):
    from mindspore import Tensor

    from mindspeed_ms.core import autograd

    tensor = Tensor.from_numpy(np.ascontiguousarray(array))
    return autograd.set_requires_grad(tensor) if requires_grad else tensor


def _gradient(parameter):
    from mindspeed_ms.core import autograd

    return parameter.sharding, autograd.tensor_grad(parameter).asnumpy().copy()


def column_and_row(size, sequence_parallel, transpose_b):
    """A column-parallel and a row-parallel layer in a row: output, input gradient and parameter gradients."""
    from mindspeed_ms.core import autograd, parallel_state
    from mindspeed_ms.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    config = _start(size, sequence_parallel)
    column = ColumnParallelLinear(
        INPUT, 24, config=config, init_method="normal", bias=True, bias_init=0.5, transpose_b=transpose_b
    )
    row = RowParallelLinear(
        24,
        OUTPUT,
        config=config,
        init_method="normal",
        bias=True,
        input_is_parallel=True,
        skip_bias_add=False,
        bias_init=0.25,
        transpose_b=transpose_b,
    )
    arrays, rank = _arrays(), parallel_state.get_tensor_model_parallel_rank()
    own = (lambda array: np.split(array, size)[rank]) if sequence_parallel else (lambda array: array)
    x = _tensor(own(arrays["x"]), requires_grad=True)
    output = row(column(x)[0])[0]
    autograd.backward(output, _tensor(own(arrays["grad"])))
    group = parallel_state.get_tensor_model_parallel_group()
    bias_grad = autograd.tensor_grad(row.bias)
    if row.bias.sequence_parallel:
        bias_grad = group.all_reduce(bias_grad)
    assert row.bias.sequence_parallel == (sequence_parallel and size > 1)
    return {
        "output": output,
        "dx": autograd.tensor_grad(x),
        "column": _gradient(column.weight),
        "column_bias": _gradient(column.bias),
        "row": _gradient(row.weight),
        "row_bias": bias_grad,
        "weights": [(weight.sharding, weight.asnumpy().copy()) for weight in (column.weight, row.weight)],
    }


@pytest.mark.parametrize(
    "size, sequence_parallel, transpose_b",
    [(1, False, True), (2, False, True), (2, True, True), (4, False, False), (4, True, True)],
)
def test_column_and_row_equal_numpy(world, size, sequence_parallel, transpose_b):
    from mindspeed_ms.layout.parameters import join

    results = world(size)(column_and_row, size, sequence_parallel, transpose_b)
    arrays = _arrays()
    turn = (lambda array: array) if transpose_b else np.transpose
    first, second = (turn(join([result["weights"][index] for result in results])) for index in range(2))
    hidden = arrays["x"] @ first.T + 0.5
    output = hidden @ second.T + 0.25
    d_hidden = arrays["grad"] @ second
    whole = {"output": output, "dx": d_hidden @ first}
    for name, expected in whole.items():
        parts = [result[name] for result in results]
        actual = np.concatenate(parts) if sequence_parallel and size > 1 else parts[0]
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    flat = lambda array: array.reshape(-1, array.shape[-1])  # noqa: E731
    expected = {
        "column": flat(d_hidden).T @ flat(arrays["x"]),
        "row": flat(arrays["grad"]).T @ flat(hidden),
        "column_bias": flat(d_hidden).sum(0),
    }
    for name, value in expected.items():
        actual = join([result[name] for result in results])
        np.testing.assert_allclose(actual if name == "column_bias" else turn(actual), value, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(results[0]["row_bias"], flat(arrays["grad"]).sum(0), rtol=1e-5, atol=1e-5)


def options(size):
    """gather_output, whole input, skipped bias, stride, foreign weight, fused accumulation, kept master weight."""
    import mindspore as ms

    from mindspeed_ms.core import autograd, parallel_state, storage
    from mindspeed_ms.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

    config = _start(size)
    rank = parallel_state.get_tensor_model_parallel_rank()
    arrays = _arrays()
    gathered = ColumnParallelLinear(
        INPUT,
        OUTPUT,
        config=config,
        init_method="normal",
        gather_output=True,
        stride=2,
        keep_master_weight_for_test=True,
        skip_bias_add=True,
        bias_init=1.0,
    )
    output, bias = gathered(_tensor(arrays["x"]))
    master = gathered.master_weight.asnumpy()
    parts = np.split(master, 2 * size)
    np.testing.assert_array_equal(gathered.weight.asnumpy(), np.concatenate([parts[rank], parts[size + rank]]))
    assert output.shape == (SEQUENCE, BATCH, OUTPUT) and bias is gathered.bias
    row = RowParallelLinear(INPUT, OUTPUT, config=config, init_method="normal", bias=True, input_is_parallel=False)
    output, bias = row(_tensor(arrays["x"]))
    assert output.shape == (SEQUENCE, BATCH, OUTPUT) and bias is row.bias
    tied = ColumnParallelLinear(
        INPUT, OUTPUT, config=config, init_method="normal", bias=False, skip_weight_param_allocation=True
    )
    with pytest.raises(ValueError, match="pass one"):
        tied(_tensor(arrays["x"]))
    with pytest.raises(ValueError, match="shape"):
        tied(_tensor(arrays["x"]), _tensor(np.zeros((3, INPUT), np.float32)))
    product = tied(_tensor(arrays["x"]), gathered.weight)[0]
    assert product.shape[-1] == OUTPUT // size
    turned = ColumnParallelLinear(
        INPUT, OUTPUT, config=config, init_method="normal", bias=False, skip_weight_param_allocation=True, transpose_b=False
    )
    turned_product = turned(_tensor(arrays["x"]), gathered.weight.swapaxes(0, 1).contiguous())[0]
    np.testing.assert_array_equal(turned_product.asnumpy(), product.asnumpy())
    input_gradients = []
    for disabled in (False, True):  # the caller reduces the partial sums itself
        column = ColumnParallelLinear(INPUT, OUTPUT, config=config, init_method=0.1, disable_grad_reduce=disabled)
        x = _tensor(arrays["x"], requires_grad=True)
        autograd.backward(column(x)[0])
        input_gradients.append(autograd.tensor_grad(x))
    reduced = parallel_state.get_tensor_model_parallel_group().all_reduce(input_gradients[1])
    np.testing.assert_allclose(input_gradients[0].asnumpy(), reduced.asnumpy(), rtol=1e-6)
    half = VocabParallelEmbedding(16, 4, init_method="normal", config=config, param_init_dtype=ms.float16)
    assert half.weight.dtype == ms.float16
    with pytest.raises(ValueError, match="has its own weight"):
        gathered(_tensor(arrays["x"]), gathered.weight)
    return _fused(config, arrays, autograd, storage)


def _fused(config, arrays, autograd, storage):
    """Two backwards add into main_grad, and the hook of the leaf still fires."""
    from mindspeed_ms.config import ModelParallelConfig
    from mindspeed_ms.core.tensor_parallel import ColumnParallelLinear

    fused_config = ModelParallelConfig(gradient_accumulation_fusion=True, tensor_model_parallel_size=2)
    seen, gradients = [], []
    for used in (config, fused_config):
        layer = ColumnParallelLinear(INPUT, OUTPUT, config=used, init_method=0.1, bias=False)
        layer.weight.main_grad = storage.FlatBuffer(layer.weight.size, "float32").slice(
            0, layer.weight.size, layer.weight.shape
        )
        handle = autograd.post_accumulate_hook(
            layer.weight, lambda parameter: seen.append(getattr(parameter, "grad_added_to_main_grad", False))
        )
        for _ in range(2):
            autograd.backward(layer(_tensor(arrays["x"]))[0])
        gradients.append(layer.weight.main_grad if used is fused_config else autograd.tensor_grad(layer.weight))
        handle.remove()
    np.testing.assert_allclose(gradients[0].asnumpy(), gradients[1].asnumpy(), rtol=1e-6)
    return seen


def test_options(world):
    assert world(2)(options, 2) == [[False, False, True, True]] * 2


def refused():
    """Arguments that cannot take effect are refused with the reason when the layer is built."""
    from mindspeed_ms.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

    config = _start(2, sequence_parallel=True)
    column = {"config": config, "init_method": "normal"}
    row = {**column, "bias": True, "input_is_parallel": True}
    cases = [
        ("not divisible", lambda: ColumnParallelLinear(4, 5, **column)),
        ("not divisible", lambda: ColumnParallelLinear(4, 6, stride=2, **column)),
        ("not divisible", lambda: RowParallelLinear(5, 4, **row)),
        ("stride", lambda: ColumnParallelLinear(4, 4, stride=0, **column)),
        ("Transformer Engine", lambda: ColumnParallelLinear(4, 4, tp_comm_buffer_name="qkv", **column)),
        ("Transformer Engine", lambda: RowParallelLinear(4, 4, tp_comm_buffer_name="proj", **row)),
        ("pipeline flush", lambda: ColumnParallelLinear(4, 4, embedding_activation_buffer=[], **column)),
        ("pipeline flush", lambda: ColumnParallelLinear(4, 4, grad_output_buffer=[], **column)),
        ("sequence_parallel", lambda: ColumnParallelLinear(4, 4, gather_output=True, **column)),
        ("input_is_parallel", lambda: RowParallelLinear(4, 4, **{**row, "input_is_parallel": False})),
        ("init_method", lambda: ColumnParallelLinear(4, 4, config=config, init_method="xavier")),
        ("vocabulary", lambda: VocabParallelEmbedding(5, 4, init_method="normal", config=config)),
    ]
    for text, build in cases:
        with pytest.raises(ValueError, match=text):
            build()
    return len(cases)


def test_refused_arguments(world):
    assert world(2)(refused) == [12, 12]


class _RecordingGroup:
    """A group of two whose collectives do nothing but write down when they were issued and waited for."""

    name, size, rank, ranks = "recording", 2, 0, [0, 1]

    def __init__(self):
        self.events = []

    def _start(self, name, result, async_op):
        self.events.append(f"{name} issued")
        if not async_op:
            return result
        events = self.events

        class Handle:
            """Result that is ready at once."""

            def wait(self):
                """Hand it over."""
                events.append(f"{name} waited")
                return result

        return Handle()

    def all_gather(self, tensor, async_op=False):
        """The tensor twice."""
        from mindspore import mint

        return self._start("all_gather", mint.cat((tensor, tensor)), async_op)

    def reduce_scatter(self, tensor, op="sum", async_op=False):
        """The first half."""
        return self._start("reduce_scatter", tensor[: tensor.shape[0] // 2], async_op)

    def all_reduce(self, tensor, op="sum", async_op=False):
        """The tensor itself."""
        return self._start("all_reduce", tensor, async_op)


def backward_events(sequence_parallel, disable_grad_reduce=False):
    """What the backward of a column-parallel layer does, in order."""
    from mindspeed_ms.core import autograd
    from mindspeed_ms.core.tensor_parallel import linear

    _start(1)
    group, ops = _RecordingGroup(), linear.ops
    names = {"linear_input_grad": "dgrad", "linear_weight_grad": "wgrad"}

    class Recorder:
        """`ops` that writes down the two products."""

        def __getattr__(self, name):
            if name in names:
                group.events.append(names[name])
            return getattr(ops, name)

    linear.ops = Recorder()
    try:
        x = _tensor(np.ones((4, 2, 3), np.float32), requires_grad=True)
        weight = _tensor(np.ones((5, 3), np.float32), requires_grad=True)
        output = linear.linear_with_grad_accumulation_and_async_allreduce(
            x, weight, None, False, not sequence_parallel and not disable_grad_reduce, sequence_parallel, group=group
        )
        group.events.clear()
        autograd.backward(output)
    finally:
        linear.ops = ops
    return group.events


def test_order_of_the_backward(world):
    """Megatron's: each collective is issued before, and waited for after, the product that it can hide behind."""
    assert world(1)(backward_events, True)[0] == [
        "all_gather issued",
        "dgrad",
        "all_gather waited",
        "reduce_scatter issued",
        "wgrad",
        "reduce_scatter waited",
    ]
    assert world(1)(backward_events, False)[0] == ["dgrad", "all_reduce issued", "wgrad", "all_reduce waited"]
    assert world(1)(backward_events, False, True)[0] == ["dgrad", "wgrad"]


def embedding(size, reduce_scatter):
    """Rows, their gradient, and an id outside the vocabulary."""
    from mindspeed_ms.core import autograd
    from mindspeed_ms.core.tensor_parallel import VocabParallelEmbedding

    config = _start(size, sequence_parallel=reduce_scatter)
    layer = VocabParallelEmbedding(16, 4, init_method="normal", config=config, reduce_scatter_embeddings=reduce_scatter)
    ids = np.array([[0, 5, 15, 5], [8, 7, 5, 0]], np.int32)
    output = layer(_tensor(ids))
    autograd.backward(output)
    ids[1, 2] = 16
    with pytest.raises(ValueError, match="16"):
        layer(_tensor(ids))
    with pytest.raises(ValueError, match="token ids are float32: expected integers"):
        layer(_tensor(ids.astype(np.float32)))
    return {
        "output": output,
        "weight": (layer.weight.sharding, layer.weight.asnumpy().copy()),
        "gradient": _gradient(layer.weight),
    }


@pytest.mark.parametrize("size, reduce_scatter", [(1, False), (2, False), (4, True)])
def test_embedding(world, size, reduce_scatter):
    from mindspeed_ms.layout.parameters import join

    results = world(size)(embedding, size, reduce_scatter)
    weight = join([result["weight"] for result in results])
    ids = np.array([[0, 5, 15, 5], [8, 7, 5, 0]])
    expected = weight[ids]
    if reduce_scatter:
        actual, expected = np.concatenate([result["output"] for result in results]), expected.swapaxes(0, 1)
    else:
        actual = results[-1]["output"]
    np.testing.assert_array_equal(actual, expected)
    counts = np.bincount(ids.reshape(-1), minlength=16)[:, None] * np.ones((1, 4))
    np.testing.assert_array_equal(join([result["gradient"] for result in results]), counts)
