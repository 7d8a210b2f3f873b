"""Self-test of the autograd tape: properties of `core/autograd.py` and `core/storage.py` that the package relies on.

Run first on a new MindSpore or a new device: `python -m mindspeed_ms.testing.autograd`.
"""

import copy
import pickle
import sys
import weakref

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, ops

from mindspeed_ms.core import autograd, storage
from mindspeed_ms.core.device import initialize_device


def _tensor(*shape, seed=0):
    return Tensor(np.random.RandomState(seed).standard_normal(shape).astype(np.float32))


def _leaf(*shape, seed=0):
    return autograd.set_requires_grad(_tensor(*shape, seed=seed))


def _close(actual, expected, tolerance=1e-5):
    actual = actual.asnumpy() if isinstance(actual, Tensor) else np.asarray(actual)
    expected = expected.asnumpy() if isinstance(expected, Tensor) else np.asarray(expected)
    error = np.abs(actual - expected).max() if actual.size else 0.0
    if not actual.shape == expected.shape or not error <= tolerance * max(1.0, np.abs(expected).max(initial=0.0)):
        raise AssertionError(f"expected {expected.ravel()[:4]}, got {actual.ravel()[:4]} (error {error})")


class _Double(autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output * ctx.factor, None


class _Checkpoint(autograd.Function):
    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, grad_output):
        x = autograd.set_requires_grad(autograd.detach(ctx.saved_tensors[0]))
        with autograd.enable_grad():
            output = ctx.function(x)
        autograd.backward(output, grad_output)
        return None, autograd.tensor_grad(x)


def test_gradient_accumulates_over_backwards():
    weight, x = _leaf(3, 3), _tensor(2, 3, seed=1)
    for _ in range(2):
        autograd.backward(mint.matmul(x, weight).sum())
    _close(autograd.tensor_grad(weight), 2 * np.repeat(x.asnumpy().sum(0)[:, None], 3, 1))


def test_graphs_are_used_in_any_order():
    weight = _leaf(4, 4)
    inputs = [_tensor(2, 4, seed=i) for i in range(4)]
    outputs = [mint.tanh(mint.matmul(x, weight)) for x in inputs]
    for i in (2, 0, 3, 1):
        autograd.backward(outputs[i].sum())
    out_of_order = autograd.tensor_grad(weight)
    autograd.set_grad(weight, None)
    for x in inputs:
        autograd.backward(mint.tanh(mint.matmul(x, weight)).sum())
    _close(out_of_order, autograd.tensor_grad(weight))


def test_a_graph_is_used_once_unless_retained():
    x = _leaf(2, 2)
    y = mint.tanh(x).sum()
    autograd.backward(y, retain_graph=True)
    autograd.backward(y)
    try:
        autograd.backward(y)
    except RuntimeError:
        return
    raise AssertionError("a third backward over a freed graph did not fail")


def test_cut_between_stages():
    x, weight = _leaf(2, 3), _leaf(3, 3, seed=1)
    y = mint.matmul(x, weight)
    received = autograd.set_requires_grad(autograd.detach(y))
    autograd.backward((received * received).sum())
    autograd.backward(y, autograd.tensor_grad(received))
    reference = 2 * y.asnumpy()
    _close(autograd.tensor_grad(x), reference @ weight.asnumpy().T)


def test_deallocated_output_still_runs_backward():
    x, weight = _leaf(2, 3), _leaf(3, 3, seed=1)
    y = mint.matmul(x, weight)
    shape = y.shape
    autograd.deallocate_output(y)
    autograd.backward(y, ops.ones(shape, ms.float32))
    _close(autograd.tensor_grad(x), np.ones(shape) @ weight.asnumpy().T)


def test_post_accumulate_hook_moves_the_gradient():
    weight = Parameter(_tensor(3, 3), name="weight")
    main_grad, calls = storage.FlatBuffer(9, "float32"), []

    def hook(parameter):
        calls.append(parameter is weight)
        storage.add_into(main_grad.tensor, autograd.tensor_grad(parameter).reshape(-1))
        autograd.set_grad(parameter, None)

    handle = autograd.post_accumulate_hook(weight, hook)
    x = _tensor(2, 3, seed=1)
    for _ in range(2):  # the weight is used twice in one backward: still one call
        autograd.backward(mint.matmul(mint.matmul(x, weight), weight).sum())
    if calls != [True, True]:
        raise AssertionError(f"the hook ran {calls}, expected once per backward")
    if autograd.tensor_grad(weight) is not None:
        raise AssertionError("the gradient was not cleared by the hook")
    handle.remove()
    autograd.backward(mint.matmul(mint.matmul(x, weight), weight).sum())
    _close(main_grad.tensor, 2 * autograd.tensor_grad(weight).asnumpy().ravel())


def test_hooks_survive_new_data():
    weight, calls = Parameter(_tensor(2, 2), name="weight"), []
    handle = autograd.post_accumulate_hook(weight, calls.append)
    buffer = storage.FlatBuffer(4, "float32")
    storage.set_data(weight, buffer.slice(0, 4, (2, 2)))
    storage.write(buffer.tensor, Tensor(np.arange(4, dtype=np.float32)))
    output = mint.matmul(_tensor(1, 2), weight)
    _close(output, _tensor(1, 2).asnumpy() @ np.arange(4).reshape(2, 2))
    autograd.backward(output.sum())
    if len(calls) != 1:
        raise AssertionError(f"the hook ran {len(calls)} times after the data was replaced")
    handle.remove()


def test_function_with_none_and_numbers():
    x = _leaf(2, 2)
    autograd.backward(_Double.apply(x, 3.0).sum())
    _close(autograd.tensor_grad(x), np.full((2, 2), 3.0))
    if autograd.requires_grad(_Double.apply(_tensor(2, 2), 3.0)):
        raise AssertionError("an output requires a gradient though no input does")


def test_function_calls_leave_nothing_behind():
    kept, reference = [], [tuple(map(bool, (1, 0)))]

    class _Keep(autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            kept.append(ctx.needs_input_grad)
            return x * factor

        @staticmethod
        def backward(ctx, grad):
            kept.append(ctx.needs_input_grad)
            return grad, None

    x = _leaf(3)
    autograd.backward(_Keep.apply(x, 2.0))
    with autograd.no_grad():
        _Keep.apply(x, 2.0)
    assert [tuple(one) for one in kept] == [(True, False), (True, False), (False, False)]  # unrecorded: none is needed
    del kept[1:2]  # the forward's tuple again
    assert [sys.getrefcount(kept[i]) for i in range(2)] == [sys.getrefcount(reference[0])] * 2


def test_recomputation_inside_backward():
    weight, x = _leaf(3, 3), _leaf(2, 3, seed=1)

    def block(value):
        return mint.tanh(mint.matmul(value, weight))

    autograd.backward(_Checkpoint.apply(block, x).sum())
    recomputed = autograd.tensor_grad(x).asnumpy(), autograd.tensor_grad(weight).asnumpy()
    autograd.set_grad(x, None)
    autograd.set_grad(weight, None)
    autograd.backward(block(x).sum())
    _close(recomputed[0], autograd.tensor_grad(x))
    _close(recomputed[1], autograd.tensor_grad(weight))


def test_no_grad_records_nothing():
    x = _leaf(2, 2)
    with autograd.no_grad():
        y = x * 2.0
        if autograd.is_grad_enabled():
            raise AssertionError("recording is on inside no_grad")
    if autograd.requires_grad(y):
        raise AssertionError("an operation inside no_grad was recorded")


def test_grad_leaves_leaves_alone():
    x = _leaf(2, 2)
    (gradient,) = autograd.grad((x * x).sum(), x)
    _close(gradient, 2 * x.asnumpy())
    if autograd.tensor_grad(x) is not None:
        raise AssertionError("grad() touched the accumulated gradient")


def test_errors_in_hooks_reach_the_caller():
    weight = Parameter(_tensor(2, 2), name="weight")

    def fail(_):
        raise ValueError("from the hook")

    handle = autograd.post_accumulate_hook(weight, fail)
    try:
        autograd.backward(mint.matmul(_tensor(2, 2), weight).sum())
    except ValueError:
        handle.remove()
        autograd.set_grad(weight, None)
        autograd.backward(mint.matmul(_tensor(2, 2), weight).sum())
        return
    raise AssertionError("an exception in a hook was lost")


def test_end_of_backward_callback():
    x, order = Parameter(_tensor(2, 2), name="x"), []
    handle = autograd.post_accumulate_hook(
        x, lambda _: (order.append("hook"), autograd.when_backward_ends(lambda: order.append("end")))
    )
    autograd.backward((x * 2.0).sum())
    handle.remove()
    if order != ["hook", "end"]:
        raise AssertionError(f"callbacks ran as {order}")


def test_gradient_hooks_run_in_each_backward():
    x, calls = _leaf(2, 2), []
    y = x * 2.0
    autograd.gradient_hook(y, lambda _: calls.append("note"))
    autograd.gradient_hook(y, lambda grad: grad * 3.0)
    total = y.sum()
    autograd.backward(total, retain_graph=True)
    autograd.backward(total)
    if calls != ["note", "note"]:
        raise AssertionError(f"a gradient hook ran {len(calls)} times in 2 backwards")
    _close(autograd.tensor_grad(x), np.full((2, 2), 12.0))


def test_graph_memory_is_released():
    class Marker:
        pass

    marker = Marker()
    alive = weakref.ref(marker)

    class _Keep(autograd.Function):
        @staticmethod
        def forward(ctx, x, value):
            ctx.value = value
            return x * 1.0

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output, None

    x = _leaf(2, 2)
    y = _Keep.apply(x, marker)
    del marker
    autograd.backward(y.sum())
    if alive() is not None:
        raise AssertionError("the context of a finished backward is still alive")


def test_saved_tensors_hooks_pack_and_unpack():
    x, packed = _leaf(2, 2), []
    with autograd.saved_tensors_hooks(lambda t: (packed.append(t.shape), t)[1], lambda t: t):
        y = mint.tanh(x)
    autograd.backward(y.sum())
    if not packed:
        raise AssertionError("nothing was packed")


def test_storage_slices_share_memory():
    buffer = storage.FlatBuffer(12, "float32")
    left, right = buffer.slice(0, 6, (2, 3)), buffer.slice(6, 12, (6,))
    storage.write(left, _tensor(2, 3))
    storage.add_into(right, ops.ones((6,), ms.float32))
    _close(buffer.tensor, np.concatenate([_tensor(2, 3).asnumpy().ravel(), np.ones(6)]))
    storage.zero(left)
    _close(buffer.tensor, np.concatenate([np.zeros(6), np.ones(6)]))


def test_bfloat16_storage():
    buffer = storage.FlatBuffer(4, "bfloat16")
    part = buffer.slice(2, 4)
    storage.write(part, ops.ones((2,), ms.float32) * 1.5)
    storage.add_into(part, ops.ones((2,), ms.float32).astype(ms.bfloat16))
    _close(buffer.tensor.astype(ms.float32), np.array([0, 0, 2.5, 2.5]))


def test_arrays_of_tensors_are_their_memory():
    made = storage.from_array(np.zeros(3, np.float32))
    replaced, strided = storage.from_array(np.zeros(3, np.float32)), storage.from_array(np.zeros((3, 2), np.float32)[:, 0])
    with autograd.no_grad():
        replaced.data = Tensor(np.zeros(3, np.float32))
    for tensor in (made, copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made)), replaced, strided):
        storage.as_array(tensor)[:] = 2.0
        _close(tensor, np.full(3, 2.0))


def test_kernels_give_the_same_bits_from_the_first_call():
    x = _tensor(64, 1024)
    if len({ops.logsumexp(x, 1).asnumpy().tobytes() for _ in range(30)}) != 1:
        raise AssertionError("a kernel changed the order of its sums between calls")


def run_checks():
    """Run every check; returns `{name: error text, None if the property holds}`."""
    outcomes = {}
    for name, function in sorted(globals().items()):
        if not name.startswith("test_"):
            continue
        try:
            function()
            outcomes[name] = None
        except Exception as error:  # every property is reported, whatever breaks
            outcomes[name] = f"{type(error).__name__}: {error}"
            autograd.enable_tape()
    return outcomes


def main():
    """Print one line per property; returns the exit code, 1 if a property does not hold."""
    target = initialize_device()
    outcomes = run_checks()
    for name, error in outcomes.items():
        outcome = "ok" if error is None else f"FAILED: {error}"
        sys.stdout.write(f"{name.removeprefix('test_').replace('_', ' '):55s} {outcome}\n")
    failures = sum(error is not None for error in outcomes.values())
    sys.stdout.write(f"MindSpore {ms.__version__} on {target}: {failures} failed\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
