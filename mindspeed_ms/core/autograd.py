"""Autograd on MindSpore's PyNative tape: backward, gradients, hooks, differentiable functions, no_grad.

Forward and backward are separate calls, and several graphs may be alive and differentiated in any order: pipeline
schedules, gradient hooks and recomputation need this, and MindSpore's `value_and_grad` and `vjp` do not offer it. All private
calls of the tape are in this module; `python -m mindspeed_ms.testing.autograd` checks every property that the package relies
on.

Facts that shape the callers: a leaf's gradient accumulates out of place (never alias it to a buffer); it has the dtype and
shape of the leaf; post-accumulate hooks run in the calling thread and may clear the gradient.
"""

import ctypes
import functools
import sys

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore._c_expression import run_backward as _run_backward
from mindspore.common._grad_function import _Function
from mindspore.graph.api import _pynative_executor as _executor

_decrease_reference_count = ctypes.pythonapi.Py_DecRef
_decrease_reference_count.argtypes, _decrease_reference_count.restype = [ctypes.py_object], None
_leaks_needs_input_grad = False  # set by enable_tape


class Function(_Function):
    """Base of differentiable functions: static `forward(ctx, *args)` and `backward(ctx, *grads)`; call `.apply(*args)`.

    Arguments are positional. `ctx.save_for_backward(*tensors)`, `ctx.saved_tensors`, `ctx.needs_input_grad`,
    `ctx.set_materialize_grads`. Neither direction is recorded; gradients of non-tensor arguments are None.

    MindSpore 2.10 never gives up its reference to `ctx.needs_input_grad`, so that each call would leave a tuple behind: it
    is given up with `ctx`, where `leaked_references` finds it. Where nothing is recorded, `forward` is called without the
    tape, which would take as long as a small kernel.
    """

    @classmethod
    def apply(cls, *args):
        """Result of `forward`, recorded unless inside `no_grad` or another Function."""
        return super().apply(*args) if _executor.enable_grad() else cls._unrecorded_forward(_Unrecorded(len(args)), *args)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            cls._unrecorded_forward = staticmethod(cls.forward)
            cls.forward = staticmethod(_with_owner(cls.forward))


class _Unrecorded:
    """`ctx` of a `forward` whose backward never runs: it keeps no tensors."""

    saved_tensors, _owner = (), None

    def __init__(self, arguments):
        self.needs_input_grad = (False,) * arguments

    def save_for_backward(self, *tensors):
        pass

    mark_dirty = mark_non_differentiable = set_materialize_grads = save_for_backward


class _Owner:
    """Owner of the leaked reference to a tuple: lives as long as the `ctx` that it is an attribute of."""

    __slots__ = ("needs_input_grad",)

    def __init__(self, needs_input_grad):
        self.needs_input_grad = needs_input_grad

    def __del__(self):
        _decrease_reference_count(self.needs_input_grad)


def _with_owner(forward):
    """`forward`, with an owner of `ctx.needs_input_grad` in `ctx`."""

    @functools.wraps(forward)
    def forward_with_owner(ctx, *args):
        if _leaks_needs_input_grad and not hasattr(ctx, "_owner"):
            ctx._owner = _Owner(ctx.needs_input_grad)
        return forward(ctx, *args)

    return forward_with_owner


class _Probe(_Function):
    @staticmethod
    def forward(ctx, held, tensor):
        held.append(ctx.needs_input_grad)
        return tensor * 1.0

    @staticmethod
    def backward(ctx, grad):
        return None, grad


def leaked_references():
    """References to `ctx.needs_input_grad` that a call of a Function leaves behind (int), by a probe call."""
    held, reference = [], [tuple(map(bool, (0, 1)))]
    with no_grad():
        _Probe.apply(held, Tensor(1.0, ms.float32))
    return sys.getrefcount(held[0]) - sys.getrefcount(reference[0])


def enable_tape():
    """Switch recording on. `ms.value_and_grad`, `ms.grad` and a failed kernel switch it off: call again after those."""
    global _leaks_needs_input_grad
    _executor.set_grad_flag(True)
    _leaks_needs_input_grad = leaked_references() == 1


def backward(tensors, grads=None, retain_graph=False):
    """Run the backward of `tensors` and accumulate into the gradients of all leaves that they depend on.

    Args:
        tensors: a Tensor or a sequence of Tensors.
        grads: their gradients, same structure; None means ones.
        retain_graph: keep the graph for another backward.

    Raises:
        RuntimeError: the graph was used before, or no tensor requires a gradient.
    """
    tensors, grads = _pair(tensors, grads)
    _run(tensors, grads, retain_graph, (), accumulate_grad=True)


def grad(outputs, inputs, grad_outputs=None, retain_graph=False):
    """Return the gradients of `inputs` (a tuple) without touching any leaf's accumulated gradient."""
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    outputs, grad_outputs = _pair(outputs, grad_outputs)
    return tuple(_run(outputs, grad_outputs, retain_graph, inputs, accumulate_grad=False))


def _run(outputs, grads, retain_graph, inputs, accumulate_grad):
    try:
        return _run_backward(outputs, grads, retain_graph, False, inputs, True, accumulate_grad=accumulate_grad)
    finally:
        if not retain_graph:
            for handle in _called_hooks:
                handle.remove()
        _called_hooks.clear()


ARRAY = "_array_of_values"
"""Attribute of a tensor that was made of a numpy array: the array and its address, see `core.storage`."""
_called_hooks = []
"""Handles of gradient hooks that were called: MindSpore keeps 100 bytes of each until it is removed, which a hook cannot do
itself."""


def _pair(tensors, grads):
    tensors = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    if grads is None:
        grads = tuple(Tensor(np.ones(t.shape, np.float32), t.dtype) for t in tensors)
    grads = (grads,) if isinstance(grads, Tensor) else tuple(grads)
    if len(tensors) != len(grads):
        raise ValueError(f"backward got {len(tensors)} tensors but {len(grads)} gradients: expected one for each.")
    return tensors, grads


no_grad = ms._no_grad
"""Context manager and decorator: nothing inside is recorded."""


class enable_grad:
    """Context manager: record inside, even within `no_grad` or a Function's backward (recomputation)."""

    def __enter__(self):
        self.previous = _executor.enable_grad()
        _executor.set_enable_grad(True)
        return self

    def __exit__(self, *exception):
        _executor.set_enable_grad(self.previous)


def has_forward_hooks(cell):
    """Whether hooks run around the `construct` of a cell."""
    return bool(cell._forward_pre_hook or cell._forward_hook)


def is_grad_enabled():
    """Whether operations are recorded on the tape now."""
    return bool(_executor.enable_grad())


def detach(tensor):
    """Leaf that shares the storage of `tensor`, without history; it does not require a gradient."""
    return tensor.data  # ops.stop_gradient keeps 700 bytes of each of its first 10,000 calls


def requires_grad(tensor):
    """Whether `tensor` requires a gradient."""
    return bool(tensor._requires_grad)


def set_requires_grad(tensor, flag=True):
    """Make a leaf require a gradient (or not) and return it."""
    tensor.requires_grad_(flag)
    return tensor


def tensor_grad(tensor):
    """The accumulated gradient of a leaf, or None."""
    return tensor._grad


def set_grad(tensor, value):
    """Replace the accumulated gradient of a leaf; None clears it."""
    tensor._grad = value


class HookHandle:
    """Handle of a hook: keeps the hook and its graph node alive; `remove()` removes the hook."""

    def __init__(self, node, handle):
        self.node = node
        self.handle = handle

    def remove(self):
        """Remove the hook; safe to call twice."""
        if self.handle is not None and hasattr(self.handle, "remove"):
            self.handle.remove()
        self.handle = None


def post_accumulate_hook(parameter, hook):
    """Call `hook(parameter)` after each backward has added to the gradient of this leaf; once per backward.

    The hook may move the gradient elsewhere and clear it with `set_grad(parameter, None)`. Source: Megatron's DDP hooks
    on the AccumulateGrad node.
    """
    if not parameter._requires_grad:
        raise ValueError(f"parameter {getattr(parameter, 'name', '')!r} does not require a gradient: no hook can fire.")
    node = parameter.view(-1)._grad_node.next_functions[0][0]

    def call(*_):
        hook(parameter)  # returning a value would replace the gradients of the node

    return HookHandle(node, node.register_hook(call))


def gradient_hook(tensor, hook):
    """Call `hook(gradient)` with this tensor's total gradient of a backward, before it is accumulated or passed on.

    A returned tensor replaces the gradient. Returns a handle with `remove()`; the hook is removed with the graph.
    """

    def call(gradient):
        _called_hooks.append(handle)
        return hook(gradient)

    handle = tensor.register_hook(call)
    return handle


def when_backward_ends(function):
    """Run `function()` once the running backward has finished; called inside a hook."""
    _executor.queue_backward_final_callback(function)


def saved_tensors_hooks(pack, unpack):
    """Context manager: `pack(tensor)` sees what operators save for backward, `unpack(packed)` must give it back."""
    return ms.saved_tensors_hooks(pack, unpack)


def recorded_operators(tensor):
    """Names of the operators that the backward of `tensor` will run, each node of its graph once, leaves left out."""
    names, seen, waiting = [], set(), [tensor._grad_node]
    while waiting:
        node = waiting.pop()
        if node is None or str(node) in seen:  # nodes are wrapped anew at each look; their text has a sequence number
            continue
        seen.add(str(node))
        waiting.extend(following for following, _ in node.next_functions)
        if node.next_functions:
            names.append(str(node).strip("<>").split(",")[0])
    return names


def deallocate_output(tensor):
    """Free the data of a graph output that was sent away, keeping its graph for the backward.

    Source: Megatron's `deallocate_output_tensor`. `backward(tensor, grad)` afterwards takes the original shape.
    """
    tensor.__dict__.pop(ARRAY, None)
    with no_grad():
        tensor.data = _placeholder(tensor.dtype)


@functools.cache
def _placeholder(dtype):
    return Tensor([0], dtype)


def synchronize():
    """Wait until every issued operator has run."""
    _executor.sync()
